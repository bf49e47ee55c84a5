"""Every route over the case table that it claims, on the stand-in, and which route is chosen."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import splitkv
from ascend_calls import make_call, on_npu
from splitkv.backends.ascend import AscendBackend
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend import fusion, output_only, standin, whole
from splitkv.kernels_ascend.routes import OWN, ROUTES, Wants, choose, route_named
from splitkv.kernels_ascend.soc import Soc, soc_named, soc_of
from splitkv.matrix.case import Case
from splitkv.matrix.cases import CASES
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.inputs import build
from splitkv.matrix.parity import Outcome, _in_case_order, run_case
from splitkv.matrix.reference import reference

RAGGED = [300, 0, 129, 2, 520]
STATES = [route for route in ROUTES if route.state and route.name != "fia-mla"]
OUTPUTS = [route for route in ROUTES if not route.state]


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="page size")
        yield


def claimed(route: str, **fields: Any) -> list[Case]:
    backend = AscendBackend(route=route, **fields)
    return [
        case for case in CASES if not backend.refusals(case.spec) and case.size.value == "small"
    ]


# --- the case table, route by route -------------------------------------------------------------


@pytest.mark.parametrize("route", STATES, ids=lambda route: route.name)
def test_a_route_with_states_passes_the_cases_that_it_claims(route: Any) -> None:
    backend = AscendBackend(route=route.name)
    cases = claimed(route.name)
    assert len(cases) >= {"fia-rows": 60, "fia-tnd": 5, "fusion": 8}[route.name]
    for case in cases:
        result = run_case(backend, case)
        assert result.outcome in (Outcome.PASSED, Outcome.REFUSED), (case.id, result.why)
    assert sum(run_case(backend, case).outcome is Outcome.PASSED for case in cases[:8]) >= 4


def off(backend: AscendBackend, case: Case) -> list[str] | None:
    """What is wrong with a route's output (and lse, where it has one); None where it refuses."""
    inputs = build(case, 0, "npu")
    if case.returns_state:
        return None
    splits = {"num_splits": case.num_splits, "split_size": case.split_size}
    plan = backend.plan_for(inputs.call, **splits)
    try:
        out, lse = backend.decode(inputs.call, plan, sinks=inputs.sinks)
    except splitkv.UnsupportedError:
        return None
    host = build(case, 0)
    answer = reference(host.call, host.sinks)
    queries = [case.queries[index] for index in inputs.order]
    out = _in_case_order(out.cpu(), inputs.order, queries, inputs.call)
    lse = _in_case_order(lse.cpu(), inputs.order, queries, inputs.call)
    if backend.route_name != "fia-sinks":
        assert lse.isnan().all()
        lse = answer.lse.float()
    return errors(out, lse, answer).exceeds(bounds(host.call, host.sinks, answer, 1))


@pytest.mark.parametrize("route", OUTPUTS, ids=lambda route: route.name)
def test_a_route_without_states_passes_the_cases_that_it_claims(route: Any) -> None:
    backend = AscendBackend(route=route.name, needs_lse=False)
    results = {case.id: off(backend, case) for case in claimed(route.name, needs_lse=False)}
    ran = {name: wrong for name, wrong in results.items() if wrong is not None}
    assert {name: wrong for name, wrong in ran.items() if wrong} == {}
    # the two zeros have no case in the table that is theirs: test_prompt_route, test_sinks_...
    enough = {"incre": 30, "paged-attention": 20, "prompt": 0, "fia-sinks": 0}
    assert len(ran) >= enough[route.name], list(ran)


def run(call: DecodeCall, sinks: Any = None, **fields: Any) -> list[str]:
    """Complaints about one call of ours on a named route."""
    backend = AscendBackend(**fields)
    placed = replace(call, q=on_npu(call.q), cache=on_npu(call.cache))
    plan = backend.plan_for(placed, num_splits=1)
    handed = None if sinks is None else on_npu(sinks)
    out, lse = (part.cpu() for part in backend.decode(placed, plan, sinks=handed))
    answer = reference(call, sinks)
    lse = answer.lse.float() if lse.isnan().all() else lse
    return errors(out, lse, answer).exceeds(bounds(call, sinks, answer, 1))


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_prompt_route(layout: str) -> None:
    for causal in (True, False):
        call = make_call(layout, [300, 0, 129, 9], queries=5, causal=causal)
        assert run(call, route="prompt", needs_lse=False) == []
    with pytest.raises(splitkv.UnsupportedError, match="5 queries over 3 keys"):
        run(make_call(layout, [300, 3], queries=5), route="prompt", needs_lse=False)


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_prompt_route_of_a_310p_has_no_lists(layout: str) -> None:
    """Nor a mask, nor grouped heads: requests that fill their cache are left."""
    fields = {"queries": 5, "causal": False, "heads": (4, 4), "dtype": torch.float16}
    wants = {"soc": Soc.ATLAS_310P, "needs_lse": False, "route": "prompt"}
    with standin.recording() as calls:
        assert run(make_call(layout, [128, 128], capacity=128, **fields), **wants) == []
    (given,) = [one.arguments for one in calls if "npu::" in one.name]
    unsaid = {"actual_seq_lengths", "actual_seq_lengths_kv", "atten_mask"}
    assert {given[name] for name in unsaid} == {None}
    assert (given["num_key_value_heads"], given["sparse_mode"]) == (0, 0)
    with pytest.raises(splitkv.UnsupportedError, match="on 310P it takes no length lists"):
        run(make_call(layout, [128, 127], capacity=128, **fields), **wants)
    for change, words in (
        ({"causal": True}, "the sparse mode is 0"),
        ({"heads": (4, 2)}, "num_key_"),
    ):
        call = make_call(layout, [128, 128], capacity=128, **{**fields, **change})
        assert words in str(AscendBackend(**wants).refusals(call.spec))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_sinks_that_the_operator_adds_are_added_once(layout: str, queries: int) -> None:
    sinks = torch.tensor([0.5, -3.0, 2.0, 4.0]).bfloat16().float()
    call = make_call(layout, [300, 0, 129, 520], queries=queries, sinks=True)
    assert run(call, sinks, route="fia-sinks") == []
    with standin.recording() as calls:
        run(call, sinks, route="fia-sinks")
    assert [
        one.arguments["learnable_sink"] is not None for one in calls if "npu::" in one.name
    ] == [True]


@pytest.mark.parametrize("route", [route.name for route in ROUTES if route.name != "fia-mla"])
def test_no_request_at_all(route: str) -> None:
    queries, sinks = (3 if route in ("prompt", "fia-tnd") else 1), torch.zeros(4)
    layout = next(iter(route_named(route).layouts)).value
    layout = "BSND" if layout == "packed" else layout  # packed queries are another shape
    call = make_call(layout, [], queries=queries, sinks=route == "fia-sinks")
    backend = AscendBackend(route=route, strict=False, needs_lse=False)
    assert backend.refusals(call.spec) == []
    placed = replace(call, q=on_npu(call.q), cache=on_npu(call.cache))
    handed = on_npu(sinks) if route == "fia-sinks" else None
    out, lse = backend.decode(placed, backend.plan_for(placed), sinks=handed)
    assert out.shape == (0, queries, 4, 128)
    assert lse.shape == (0, queries, 4)


def test_sinks_added_twice_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: finishing what the operator has finished."""
    sinks = torch.tensor([0.5, -3.0, 2.0, 4.0]).bfloat16().float()
    call = make_call("NHD", [300, 129], sinks=True)
    right = whole._with_sinks

    def twice(call: Any, facts: Any, wants: Any, sinks: Any) -> Any:
        out, lse = right(call, facts, wants, sinks)
        state = splitkv.PartialState(lse, lse, out.float())
        return splitkv.finish(state, sinks=sinks, dtype=out.dtype)

    monkeypatch.setattr(whole, "_with_sinks", twice)
    assert run(call, sinks, route="fia-sinks")


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "packed"])
def test_the_training_operator_serves_float32_and_narrow_values(layout: str) -> None:
    for queries, window in ((1, None), (3, None), (3, 100)):
        fields = {"queries": queries, "sliding_window": window}
        call = make_call(layout, RAGGED, dtype=torch.float32, D=72, **fields)
        assert run(call) == []
        narrow = make_call(layout, RAGGED, D=192, **fields)
        v = narrow.cache.v[..., :128].contiguous()
        spec = replace(narrow.spec, head_dim_v=128)
        assert run(replace(narrow, cache=replace(narrow.cache, v=v), spec=spec)) == []


def latent_call(layout: str, lengths: list[int], **fields: Any) -> DecodeCall:
    call = make_call(layout, lengths, heads=(16, 1), D=576, page=64, **fields)
    cache = replace(call.cache, v=call.cache.k[..., :512])
    return replace(call, cache=cache, spec=replace(call.spec, head_dim_v=512))


@pytest.mark.parametrize("layout", ["NHD", "HND", "BSND", "BNSD"])
def test_absorbed_mla_gives_states_where_asked_for_loosely(layout: str) -> None:
    for fields in ({}, {"queries": 3}, {"sliding_window": 100}):
        call = latent_call(layout, RAGGED, **fields)
        assert run(call, route="fia-mla", strict=False) == []
    placed = replace(call, q=on_npu(call.q), cache=on_npu(call.cache))
    backend = AscendBackend(route="fia-mla", strict=False)
    state = backend.partial(placed, backend.plan_for(placed, num_splits=3))
    assert state.lse.shape == call.rows
    (reason,) = AscendBackend(route="fia-mla").refusals(call.spec)
    assert reason.startswith("state 1: an LSE with head dim 512 is documented as unsupported")


def test_absorbed_mla_wants_the_values_to_be_the_latent() -> None:
    call = latent_call("NHD", [300])
    apart = replace(call, cache=replace(call.cache, v=call.cache.v.contiguous()))
    with pytest.raises(splitkv.UnsupportedError, match=r"v is not k\[..., :512\]"):
        run(apart, route="fia-mla", strict=False)
    assert run(apart, route="paged-attention", needs_lse=False) == []


# --- outputs are no states ----------------------------------------------------------------------


def test_a_state_is_never_made_up() -> None:
    call = make_call("NHD", RAGGED)
    placed = replace(call, q=on_npu(call.q), cache=on_npu(call.cache))
    backend = AscendBackend(route="paged-attention", needs_lse=False)
    plan = backend.plan_for(placed)
    with pytest.raises(splitkv.UnsupportedError, match="a state is asked for, and route paged-att"):
        backend.partial(placed, plan)
    _, lse = backend.decode(placed, plan)
    assert lse.cpu().isnan().all()
    with pytest.raises(ValueError, match="lse= is given"):
        backend.decode(placed, plan, lse=torch.zeros(call.rows, device="npu"))
    with pytest.raises(splitkv.UnsupportedError, match="3 splits of a request"):
        backend.decode(placed, backend.plan_for(placed, num_splits=3))
    (reason,) = backend.refusals(replace(call.spec, sinks=True))
    assert reason.startswith("learned sinks: they are folded in by the LSE")


def test_rows_that_the_operator_leaves_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call("NHD", RAGGED)
    empty = torch.zeros

    def garbage(*args: Any, **fields: Any) -> Any:
        return torch.full_like(empty(*args, **fields), math.nan)

    monkeypatch.setattr(output_only.torch, "zeros", garbage)
    assert run(call, route="paged-attention", needs_lse=False) == []
    monkeypatch.setattr(whole, "_zeroed", lambda out, lengths: out)
    assert run(call, route="paged-attention", needs_lse=False)


def test_max_and_sum_taken_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call("packed", RAGGED, D=64, queries=2)
    right = fusion.packed_rows
    assert run(call) == []
    for name, change in {
        "sum without its logarithm": lambda out, lse: (out, lse + 1),
        "eight times": lambda out, lse: (out, lse + math.log(8)),
    }.items():
        patch = lambda *args, change=change, **rest: change(*right(*args, **rest))  # noqa: E731
        monkeypatch.setattr("splitkv.kernels_ascend.launches.packed_rows", patch)
        assert run(call), name


# --- the table ----------------------------------------------------------------------------------


def spec(layout: str = "NHD", **fields: Any) -> DecodeSpec:
    paged = layout in ("NHD", "HND")
    base = {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 128,
        "page_size": 128 if paged else None,
    }
    return DecodeSpec(layout=Layout(layout), **{**base, **fields})


MLA = {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1}
TWELVE = {**MLA, "num_q_heads": 12}
NARROW = {"dtype": torch.float16, "num_queries": 4}
ON_310P = {"soc": Soc.ATLAS_310P, "needs_lse": False}

TABLE = [
    # layout, spec, wants, route
    ("NHD", {}, {}, "fia-rows"),
    ("HND", {}, {}, "fia-rows"),
    ("BSND", {}, {}, "fia-rows"),
    ("packed", {}, {}, "fia-tnd"),
    ("NHD", {"num_queries": 4}, {}, "fia-tnd"),
    ("NHD", {"num_queries": 4, "head_dim": 64}, {}, "fia-rows"),
    ("NHD", {"num_queries": 4, "head_dim": 64}, {"strict": False}, "fia-tnd"),
    ("HND", {"num_queries": 4, "head_dim": 96}, {"strict": False}, "fia-rows"),
    ("NHD", {"num_queries": 4, "page_size": 64}, {}, "fia-rows"),
    ("NHD", {"num_queries": 4, "page_size": 256}, {}, "fia-rows"),
    ("NHD", {"num_queries": 4, "dtype": torch.float16}, {}, "fia-rows"),
    ("BSND", {"dtype": torch.float32}, {}, "fusion"),
    ("packed", {"dtype": torch.float16}, {}, "fusion"),
    ("NHD", {"dtype": torch.float32}, {}, None),
    ("NHD", {"head_dim_v": 64}, {}, None),
    ("NHD", {"head_dim_v": 64}, {"needs_lse": False}, "paged-attention"),
    ("NHD", {"num_kv_heads": 1, "num_q_heads": 65}, {}, None),
    ("NHD", {"num_kv_heads": 1, "num_q_heads": 65}, {"strict": False}, "fia-rows"),
    ("NHD", {"num_kv_heads": 1, "num_q_heads": 65}, {"needs_lse": False}, "paged-attention"),
    ("BSND", {"num_kv_heads": 1, "num_q_heads": 65}, {}, "fusion"),
    ("NHD", {"dtype": torch.float16}, {"soc": Soc.ATLAS_310P}, None),
    ("NHD", {"dtype": torch.float16}, ON_310P, "incre"),
    ("NHD", {}, ON_310P, None),
    ("BSND", {"dtype": torch.float16, "num_queries": 4}, ON_310P, None),
    ("BSND", {**NARROW, "num_kv_heads": 4}, ON_310P, None),  # causal
    ("BSND", {**NARROW, "num_kv_heads": 4, "causal": False}, ON_310P, "prompt"),
    ("BSND", {**NARROW, "num_kv_heads": 2, "causal": False}, ON_310P, None),
    ("NHD", {}, {"soc": Soc.A5}, "fia-rows"),
    ("BSND", {"dtype": torch.float32}, {"soc": Soc.A5}, None),
    ("NHD", {}, {"soc": Soc.A3, "needs_lse": False}, "fia-rows"),
    ("NHD", {"sliding_window": 9}, {"route": "incre", "needs_lse": False}, None),
    ("NHD", {"sinks": True}, {}, "fia-rows"),
    ("NHD", {"sinks": True}, {"route": "fia-sinks"}, "fia-sinks"),
    ("NHD", {"sinks": True, "dtype": torch.float16}, {"route": "fia-sinks"}, None),
    ("NHD", MLA, {}, None),
    ("NHD", MLA, {"strict": False}, "fia-mla"),
    ("NHD", MLA, {"needs_lse": False}, "fia-mla"),
    ("NHD", TWELVE, {"strict": False}, "fia-mla"),
    ("NHD", TWELVE, {"needs_lse": False}, "paged-attention"),
    ("BSND", MLA, {}, "fusion"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "fields", "wants", "name"), TABLE, ids=str)
def test_which_route_is_chosen(
    layout: str, fields: dict[str, Any], wants: dict[str, Any], name: str | None
) -> None:
    choice = choose(spec(layout, **fields), Wants(**wants))
    assert (None if choice.route is None else choice.route.name) == name, choice.refusals
    assert bool(choice.refusals) == (name is None)
    others = {route.name for route in (*ROUTES, OWN)} - {name}
    assert set(choice.against) == others
    assert all(reasons and all(reasons) for reasons in choice.against.values())


def test_a_named_route_is_that_or_a_refusal() -> None:
    assert AscendBackend(route="incre", needs_lse=False).refusals(spec("packed")) == [
        "layout packed: route incre takes BSND, BNSD, NHD, HND"
    ]
    with pytest.raises(ValueError, match="unknown route 'fia', known: "):
        AscendBackend(route="fia").refusals(spec())
    assert route_named("incre").state is False


@pytest.mark.parametrize(
    ("device", "soc"),
    [("Ascend910B3", Soc.A2), ("Ascend910_9382", Soc.A3), ("Ascend310P3", Soc.ATLAS_310P),
     ("Ascend950PR", Soc.A5), ("Ascend910A", None)],
)  # fmt: skip
def test_generations_go_by_device_name(device: str, soc: Soc | None) -> None:
    assert soc_of(device) is soc
    if soc is not None:
        assert soc_named(soc.value) is soc_named(soc.name) is soc_named(device) is soc
    else:
        with pytest.raises(ValueError, match="unknown SoC"):
            soc_named(device)

"""Route ``own``: calls that reach our own kernel through the backend, which refuses them otherwise.

The kernel runs in Triton's interpreter here, so that the tensors are the host's.
"""

import json
from typing import Any

import pytest

import splitkv
from splitkv.backends import registry
from splitkv.backends.ascend import AscendBackend
from splitkv.cli.main import main
from splitkv.common.spec import Feature
from splitkv.kernels_ascend import own, standin
from splitkv.kernels_ascend.emit import emit
from splitkv.kernels_ascend.routes import OWN, Wants, choose, route_named
from splitkv.kernels_ascend.soc import Soc
from splitkv.matrix.case import Case, make
from splitkv.matrix.cases import CASES
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.inputs import build
from splitkv.matrix.parity import SEED, Outcome, run_case
from splitkv.matrix.reference import reference

BY_ID = {case.id: case for case in CASES}
SCORES = {
    "soft-cap": Feature.SOFT_CAP,
    "alibi": Feature.ALIBI,
    "bias": Feature.ATTN_BIAS,
    "mask-tree": Feature.ATTN_MASK,
}
EVERYTHING = make(
    "own-route",
    "",
    (300, 7, 0, 131),
    num_queries=3,
    sliding_window=90,
    anchor_tokens=5,
    logits_soft_cap=10.0,
    alibi=True,
    attn_bias=True,
    attn_mask=True,
    columns=8,
    num_splits=3,
)


class OnHost(AscendBackend):
    """The backend on host tensors, its kernel interpreted."""

    device_type = "cpu"

    def missing(self) -> str | None:
        return None


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> AscendBackend:
    """The backend that asks for route own, found by its name."""
    backend = OnHost(route="own")
    monkeypatch.setattr(own, "missing", lambda: None)
    monkeypatch.setattr(registry, "BACKENDS", (backend,))
    return backend


def wrong(case: Case) -> list[str]:
    """What is wrong with the public call's answer."""
    inputs = build(case, SEED)
    call = inputs.call
    out, lse = splitkv.decode(
        call.q,
        call.cache,
        call.spec,
        alibi_slopes=call.alibi_slopes,
        attn_bias=call.attn_bias,
        attn_mask=call.attn_mask,
        sinks=inputs.sinks,
        num_splits=case.num_splits,
        backend="ascend",
    )
    answer = reference(call, inputs.sinks)
    return errors(out, lse, answer).exceeds(bounds(call, inputs.sinks, answer, 1))


@pytest.mark.parametrize(
    "case", [*map(BY_ID.get, SCORES), BY_ID["anchors"], BY_ID["sinks"], EVERYTHING], ids=str
)
def test_a_public_call_reaches_the_kernel(
    case: Case, interpreted: AscendBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interpreted.refusals(case.spec) == []
    assert wrong(case) == []
    # the negative control: a kernel that shifts every LSE is seen
    right, calls = own.split_decode, []

    def shifted(*given: Any) -> splitkv.PartialState:
        state = right(*given)
        calls.append(given)
        return splitkv.PartialState(state.max + 1, state.lse + 1, state.out * 0.9)

    monkeypatch.setattr(own, "split_decode", shifted)
    assert wrong(case)
    assert calls


def test_a_state_and_the_refused_strides(interpreted: AscendBackend) -> None:
    assert run_case(interpreted, BY_ID["soft-cap"]).outcome is Outcome.PASSED
    strided = run_case(interpreted, BY_ID["memory-strided"])
    assert strided.outcome is Outcome.REFUSED
    assert "own kernel reads whole rows" in strided.why[0]
    call = build(EVERYTHING, SEED).call
    plan = interpreted.plan_for(call, num_splits=2)
    assert interpreted.tensor_refusals(call, plan) == []
    state = interpreted.partial(call, plan)
    answer = reference(call, None)
    assert (
        errors(state.out.to(call.q.dtype), state.lse, answer).exceeds(bounds(call, None, answer, 1))
        == []
    )


def test_its_plans_are_cut_for_the_kernel(interpreted: AscendBackend) -> None:
    spec = BY_ID["soft-cap"].spec
    assert interpreted.plan(spec, (100_000,)).max_splits > 1
    assert AscendBackend().plan(BY_ID["lengths-one"].spec, (100_000,)).max_splits == 1


@pytest.mark.parametrize("name", SCORES)
def test_it_is_taken_by_name_only_and_the_refusal_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, feature = BY_ID[name].spec, SCORES[name]
    monkeypatch.setattr(own, "missing", lambda: None)
    assert AscendBackend.support.features[feature] is not None
    (said,) = (line for line in AscendBackend().refusals(spec) if line.startswith(feature.value))
    assert said.endswith(
        'AscendBackend(route="own") takes it where triton-ascend is installed (compiled to HIVM '
        "and interpreted, never run on an NPU)"
    )
    assert AscendBackend(route="fia-rows").refusals(spec)
    choice = AscendBackend().choice(spec)
    assert choice.route is None  # no operator's route pretends to take it
    assert all(feature.value in choice.against[name][0] for name in choice.against if name != "own")
    assert choice.against["own"][0].startswith("it takes this; ask for it by name")
    assert AscendBackend(route="own").refusals(spec) == []


def test_where_it_serves_and_is_not_asked_for_the_table_says_how() -> None:
    spec = BY_ID["lengths-one"].spec
    choice = choose(spec, Wants())
    assert choice.route is not OWN
    assert choice.against["own"] == [
        "it takes this; ask for it by name: AscendBackend(route='own')"
    ]
    packed = choose(BY_ID["layout-packed"].spec, Wants()).against["own"]
    assert "the own kernel reads paged and dense caches" in packed[0]
    assert route_named("own") is OWN


def test_without_a_compiler_that_is_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BY_ID["soft-cap"].spec
    backend = AscendBackend(route="own")
    monkeypatch.setattr(own, "missing", lambda: "no compiler here")
    assert backend.refusals(spec) == ["no compiler here"]
    assert backend.choice(spec).route is None
    assert backend.choice(spec).against["own"] == ["no compiler here"]
    monkeypatch.setattr(own, "missing", lambda: None)  # installed since: nothing is remembered
    assert backend.refusals(spec) == []
    assert backend.route(spec) == OWN.text
    monkeypatch.undo()
    with standin.installed():
        (said,) = backend.refusals(spec)
    assert said == "the stand-in for torch_npu runs operators, not kernels"


@pytest.mark.parametrize(
    ("wants", "name", "words"),
    [
        ({"soc": Soc.ATLAS_310P}, "soft-cap", "compiled for 910B and 910_93 only"),
        ({"soc": Soc.A5}, "soft-cap", "compiled for 910B and 910_93 only"),
        ({}, "head-dim-80", "head_dim 80 is not in 64, 128, 256"),
        ({}, "model-drafts", "the own kernel has no dequantisation"),
    ],
)
def test_what_it_does_not_take(
    wants: dict[str, Any], name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "missing", lambda: None)
    found = AscendBackend(route="own", **wants).refusals(BY_ID[name].spec)
    assert any(words in line for line in found), found


def test_it_is_no_operator_to_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "missing", lambda: None)
    with pytest.raises(splitkv.UnsupportedError, match="route own is a kernel of splitkv's"):
        emit(BY_ID["soft-cap"].spec, Wants(route="own"))


EXPLAIN = ("explain", "--backend", "ascend", "--route", "own", "--page-size", "128")


def test_explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*EXPLAIN, "--soft-cap", "10"]
    assert main(words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "no triton with an Ascend backend is installed" in shown
    monkeypatch.setattr(own, "missing", lambda: None)
    monkeypatch.setattr(AscendBackend, "missing", lambda self: None)
    assert main(words) == 0
    assert f"route on Ascend 910B: {OWN.text}" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["chosen"], said["ascend"]["route"]) == ("ascend", "own")
    assert main([*words, "--emit", "torch_npu"]) == 1
    assert "route own is a kernel" in capsys.readouterr().out

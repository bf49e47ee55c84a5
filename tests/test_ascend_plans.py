"""The Ascend backend's plans, launches, lengths and states, on the stand-in: host code only, no
device.
"""

import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from ascend_calls import LAYOUTS, complaints, decode, make_call, on_npu
from splitkv.backends.registry import backend_named, explain, select
from splitkv.common.call import DecodeCall
from splitkv.common.state import PartialState, merge_states_torch, stack_states
from splitkv.kernels_ascend import standin
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.reference import reference

ASCEND = backend_named("ascend")
RAGGED = [300, 0, 129, 2, 520]
V1, V2 = (f"npu::npu_fused_infer_attention_score{version}" for version in ("", "_v2"))


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


@pytest.fixture(autouse=True)
def odd_pages_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="page size")
        yield


def test_partial_states_merge_to_the_whole() -> None:
    """One history in two caches, merged on the device, is the history in one."""
    whole = make_call("packed", [300, 129])
    starts = whole.cache.cu_seqlens_k.tolist()
    states = []
    for ranges in (((0, 170), (0, 100)), ((170, 300), (100, 129))):
        tokens = [
            torch.arange(start + low, start + high)
            for start, (low, high) in zip(starts, ranges, strict=False)
        ]
        offsets = torch.tensor([0, *itertools.accumulate(map(len, tokens))])
        rows = torch.cat(tokens)
        cache = splitkv.PackedCache(whole.cache.k[rows], whole.cache.v[rows], offsets)
        states.append(splitkv.partial(on_npu(whole.q), on_npu(cache), whole.spec))
    out, lse = splitkv.finish(splitkv.merge_states(states))
    answer = reference(whole)
    assert not errors(out.cpu(), lse.cpu(), answer).exceeds(bounds(whole, None, answer, 2))


def _states(count: int, D: int = 64) -> list[PartialState]:
    generator = torch.Generator().manual_seed(count)
    states = []
    for index in range(count):
        lse = torch.randn(3, 4, generator=generator) * 5
        out = torch.randn(3, 4, D, generator=generator)
        lse[0], out[0] = -math.inf, 0.0  # nobody saw row 0
        if index:
            lse[1], out[1] = -math.inf, 0.0  # one state saw row 1
        states.append(PartialState(lse, lse.clone(), out))
    return states


def _to(device: str, state: PartialState) -> PartialState:
    if device == "npu":
        return PartialState(*map(on_npu, (state.max, state.lse, state.out)))
    return PartialState(state.max.cpu(), state.lse.cpu(), state.out.cpu())


@pytest.mark.parametrize(("count", "D"), [(1, 64), (2, 64), (16, 64), (17, 64), (3, 12), (3, 520)])
def test_merging_on_the_device(count: int, D: int) -> None:
    states = _states(count, D)
    expected = merge_states_torch(states)
    with standin.recording() as calls:
        merged = _to("cpu", splitkv.merge_states([_to("npu", state) for state in states]))
    fused = [call for call in calls if call.name == "npu::npu_attention_update"]
    assert len(fused) == (1 < count <= 16 and D % 8 == 0 and D <= 512)
    torch.testing.assert_close(merged.lse, expected.lse)
    torch.testing.assert_close(merged.out, expected.out)
    assert torch.equal(merged.max, expected.max)
    assert torch.equal(merged.out[0], torch.zeros(4, D))
    assert torch.equal(merged.lse[0], torch.full((4,), -math.inf))
    assert torch.equal(merged.out[1], states[0].out[1])
    assert torch.equal(merged.lse[1], states[0].lse[1])


def test_merging_a_stacked_state_on_the_device() -> None:
    states = _states(4)
    stacked = _to("cpu", splitkv.merge_states(_to("npu", stack_states(states))))
    listed = _to("cpu", splitkv.merge_states([_to("npu", state) for state in states]))
    assert torch.equal(stacked.out, listed.out)


def _launches(call: DecodeCall, **arguments: Any) -> list[standin.Call]:
    with standin.recording() as calls:
        decode(call, **arguments)
    return [one for one in calls if one.name in (V1, V2)]


def _key_lengths(launch: standin.Call) -> list[int]:
    v1 = launch.name == V1
    return launch.arguments["actual_seq_lengths_kv" if v1 else "actual_seq_kvlen"]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_splits_run_in_one_call(layout: str, queries: int) -> None:
    call = make_call(layout, [300, 520], queries=queries)
    launch, *copies = _launches(call, num_splits=3)
    if layout == "packed" and queries > 1:  # tails overlap, and a packed row cannot
        assert len(copies) == 1
        return
    assert copies == []
    # several queries share two splits per request, and read the last one in a row each
    rows = 3 + 3 if queries == 1 else 2 * (2 + queries)
    assert len(_key_lengths(launch)) == rows * (2 if layout == "BNSD" else 1)


def test_automatic_plans_leave_the_cutting_to_the_operator() -> None:
    (launch,) = _launches(make_call("NHD", RAGGED))
    assert _key_lengths(launch) == [300, 129, 2, 520]
    spec = make_call("NHD", [1]).spec
    assert ASCEND.plan(spec, [262144]).num_splits == 1
    assert ASCEND.plan(spec, [262145]).num_splits == 2


@pytest.mark.parametrize(
    ("layout", "queries", "operator", "operator_layout"),
    [
        ("NHD", 1, V1, "BSND"),
        ("NHD", 3, V2, "TND"),
        ("HND", 1, V1, "BNSD"),
        ("HND", 3, V2, "TND"),
        ("BSND", 1, V1, "BSND"),
        ("BSND", 3, V2, "TND"),
        ("BNSD", 1, V1, "BNSD"),
        ("BNSD", 3, V2, "TND"),
        ("packed", 1, V2, "TND"),
        ("packed", 3, V2, "TND"),
    ],
)
def test_routes(layout: str, queries: int, operator: str, operator_layout: str) -> None:
    call = make_call(layout, [300, 520], queries=queries)
    (launch,) = _launches(call)
    assert launch.name == operator
    assert launch.arguments["input_layout"] == operator_layout
    assert launch.arguments["sparse_mode"] == (3 if queries > 1 else 0)
    assert (launch.arguments["atten_mask"] is not None) == (queries > 1)


@pytest.mark.parametrize("fields", [{"dtype": torch.float16}, {"D": 64}, {"page": 16}], ids=str)
def test_queries_share_no_row_where_tnd_is_not_documented(fields: dict[str, Any]) -> None:
    call = make_call("NHD", [300, 520], queries=3, **fields)
    (launch,) = _launches(call)
    assert launch.name == V1
    assert launch.arguments["atten_mask"] is None
    assert _key_lengths(launch) == [298, 299, 300, 518, 519, 520]


def test_cuts_and_windows_need_no_mask() -> None:
    for layout, queries, window in itertools.product(LAYOUTS, (1, 3), (None, 100)):
        call = make_call(layout, RAGGED, queries=queries, sliding_window=window)
        for launch in _launches(call, num_splits=3):
            assert launch.arguments["sparse_mode"] == 0
            assert launch.arguments["atten_mask"] is None


def test_route_is_told_in_words() -> None:
    assert ASCEND.route(make_call("NHD", [1]).spec).startswith("FIA v1, BSND, 3-D cache")
    assert ASCEND.route(make_call("HND", [1]).spec).startswith("FIA v1, BNSD, 4-D cache")
    assert ASCEND.route(make_call("NHD", [1], queries=2).spec).endswith(
        "queries of a request share rows"
    )
    assert ASCEND.route(make_call("NHD", [1], queries=2, page=16).spec).endswith(
        "one query per row"
    )


def _run(call: DecodeCall, seq_lens: Tensor, plan: splitkv.SplitPlan | None) -> Tensor:
    cache = replace(on_npu(call.cache), seq_lens=seq_lens)
    return splitkv.decode(on_npu(call.q), cache, call.spec, plan=plan)[0].cpu()


def test_device_lengths_are_copied_once_per_plan() -> None:
    call = make_call("NHD", RAGGED)
    expected = decode(call)[0]
    lengths = call.cache.seq_lens.npu()
    plan = ASCEND.plan(call.spec, RAGGED)
    with standin.recording() as calls:
        for _ in range(3):
            assert torch.equal(_run(call, lengths, plan), expected)
    results_read = 3
    assert sum(one.name == "device to host" for one in calls) == results_read + 1


def test_host_lengths_cause_no_wait() -> None:
    call = make_call("NHD", RAGGED, queries=2, sliding_window=100)
    cache, q = on_npu(call.cache), on_npu(call.q)
    plan = ASCEND.plan(call.spec, RAGGED, num_splits=2)
    with standin.recording() as calls:
        splitkv.decode(q, cache, call.spec, plan=plan)
    assert [one.name for one in calls if one.syncs] == []


def test_device_lengths_that_changed_are_read_again() -> None:
    call = make_call("NHD", RAGGED)
    plan = ASCEND.plan(call.spec, RAGGED)
    lengths = call.cache.seq_lens.npu()
    _run(call, lengths, plan)
    shorter = torch.tensor([299, 0, 128, 1, 519], dtype=torch.int32)
    lengths.copy_(shorter)
    expected = _run(call, shorter, None)
    assert torch.equal(_run(call, lengths, plan), expected)
    assert torch.equal(_run(call, shorter.npu(), plan), expected)


def test_a_plan_for_longer_requests_serves_shorter_ones() -> None:
    call = make_call("NHD", RAGGED, sliding_window=200, anchor_tokens=7)
    plan = ASCEND.plan(call.spec, [640] * 5, split_size=128)
    out, lse = decode(call, plan=plan)
    answer = reference(call)
    assert not errors(out, lse, answer).exceeds(bounds(call, None, answer, 6))


def test_a_plan_keeps_one_preparation_per_spec() -> None:
    call = make_call("NHD", RAGGED)
    plan = ASCEND.plan(call.spec, RAGGED)
    for step in range(4):
        _run(call, (call.cache.seq_lens - step).clamp(min=0), plan)
    assert sum(isinstance(key, tuple) and key[0] == "ascend" for key in plan.bound) == 1


def test_padded_rows_of_a_bucket_are_empty() -> None:
    """A bucket of 24 rows, 20 of them live: lists have the bucket's length, pads come out as
    nothing seen.
    """
    live = [1 + 7 * row for row in range(20)]
    call = make_call("NHD", [*live, 0, 0, 0, 0])
    assert complaints(call) == []
    out, lse = decode(call)
    assert torch.equal(out[20:], torch.zeros_like(out[20:]))
    assert torch.all(lse[20:] == -math.inf)


def test_capture_refuses_what_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call("NHD", RAGGED)
    plan = ASCEND.plan(call.spec, RAGGED)
    lengths = call.cache.seq_lens.npu()
    monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="seq_lens is on npu:0 and the stream is being captured"):
        _run(call, lengths, plan)
    with pytest.raises(RuntimeError, match="run one call with it before the capture"):
        _run(call, call.cache.seq_lens, plan)
    monkeypatch.undo()
    expected = _run(call, lengths, plan)
    monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
    with standin.recording() as calls:
        cache = replace(on_npu(call.cache), seq_lens=lengths)
        out, _ = splitkv.decode(on_npu(call.q), cache, call.spec, plan=plan)
    assert [one.name for one in calls if one.syncs] == []
    assert torch.equal(out.cpu(), expected)


def test_evidence_names_the_stand_in() -> None:
    assert ASCEND.evidence == "stand-in"
    assert ASCEND.missing() is None
    assert ASCEND.profile().name == "Ascend910B3"
    assert ASCEND.rounds_partials


def test_npu_tensors_select_this_backend() -> None:
    spec = make_call("NHD", [1]).spec
    assert select(spec, "npu").name == "ascend"
    assert explain(spec, "npu")["ascend"] == []

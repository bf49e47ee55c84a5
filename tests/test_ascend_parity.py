"""The Ascend backend against the dense float64 reference, through the stand-in: checks our host
code, no device.
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
from ascend_calls import LAYOUTS, complaints, decode, make_call, on_npu, windows
from splitkv.backends.registry import backend_named, explain, select
from splitkv.common.call import DecodeCall
from splitkv.common.state import PartialState, merge_states_torch, stack_states
from splitkv.kernels_ascend import standin
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.reference import reference

ASCEND = backend_named("ascend")
RAGGED = [300, 0, 129, 2, 520]
FIA = "npu::npu_fused_infer_attention_score"


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


@pytest.fixture(autouse=True)
def odd_pages_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="page size")
        yield


@pytest.mark.parametrize("splits", [None, 1, 3], ids=lambda splits: f"splits-{splits}")
@pytest.mark.parametrize("queries", [1, 3], ids=lambda queries: f"S{queries}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_and_anchors(layout: str, queries: int, splits: int | None) -> None:
    for semantics in windows():
        call = make_call(layout, RAGGED, queries=queries, **semantics)
        assert complaints(call, num_splits=splits) == [], semantics


@pytest.mark.parametrize("split_size", [1, 128, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_sizes(layout: str, split_size: int) -> None:
    assert complaints(make_call(layout, RAGGED), split_size=split_size) == []


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_queries(layout: str, causal: bool, splits: int | None) -> None:
    for semantics in windows():
        call = make_call(layout, RAGGED, counts=[3, 2, 0, 3, 1], causal=causal, **semantics)
        assert complaints(call, num_splits=splits) == [], semantics


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_queries_than_keys(layout: str, causal: bool) -> None:
    assert complaints(make_call(layout, [2, 0, 5], queries=4, causal=causal)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (64, 1), (14, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_counts(layout: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for queries in (1, 2):
        call = make_call(layout, [300, 17], heads=heads, queries=queries, dtype=dtype)
        assert complaints(call, num_splits=2) == []


@pytest.mark.parametrize("D", [16, 80, 96, 128, 192, 256, 272, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_dims(layout: str, D: int) -> None:
    for queries, window in itertools.product((1, 2), (None, 50)):
        call = make_call(layout, [300, 17], D=D, queries=queries, sliding_window=window)
        if layout == "packed" and D > 256:
            with pytest.raises(splitkv.UnsupportedError, match=f"head_dim {D}: layout TND takes"):
                decode(call)
        else:
            assert complaints(call, num_splits=2) == []


@pytest.mark.parametrize("page", [16, 48, 128, 256, 512])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_sizes(layout: str, page: int) -> None:
    for queries, window in itertools.product((1, 3), (None, 100)):
        call = make_call(layout, [300, 600], page=page, queries=queries, sliding_window=window)
        assert complaints(call, num_splits=2) == []


@pytest.mark.parametrize("capacity", [544, 528, 640, 1024])
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_dense_capacities(layout: str, capacity: int) -> None:
    for queries, splits in itertools.product((1, 2), (1, 3)):
        call = make_call(layout, RAGGED, capacity=capacity, queries=queries)
        assert complaints(call, num_splits=splits) == []


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_any_dense_capacity_for_one_query_uncut(layout: str) -> None:
    assert complaints(make_call(layout, RAGGED, capacity=521)) == []


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinks_enter_once(layout: str, splits: int) -> None:
    sinks = torch.tensor([0.5, -math.inf, 2.0, 4.0])
    call = make_call(layout, RAGGED, sinks=True)
    assert complaints(call, sinks=sinks, num_splits=splits) == []
    with standin.recording() as calls:
        decode(call, sinks=sinks, num_splits=splits)
    assert all("learnable_sink" not in one.arguments for one in calls)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sm_scale_is_always_handed_over(layout: str) -> None:
    assert complaints(make_call(layout, RAGGED, sm_scale=0.3), num_splits=2) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_batches(layout: str) -> None:
    if layout == "packed":
        cache = splitkv.PackedCache(*torch.zeros(2, 0, 2, 64).half(), torch.zeros(1).int())
        call = replace(make_call(layout, [1]), q=torch.zeros(0, 1, 4, 64).half(), cache=cache)
    else:
        call = make_call(layout, [])
    out, lse = decode(call)
    assert out.shape == (0, 1, 4, 64)
    assert lse.shape == (0, 1, 4)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_rows_empty(layout: str, queries: int) -> None:
    out, lse = decode(make_call(layout, [0, 0], queries=queries), num_splits=2)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_slots_change_no_bit(layout: str) -> None:
    """Slots before the window hold NaN in one run and zeros in the other."""
    for queries, splits in itertools.product((1, 3), (1, 3)):
        call = make_call(layout, [300, 520], queries=queries, sliding_window=100, anchor_tokens=7)
        results = []
        for filler in (0.0, math.nan):
            for request, length in enumerate((300, 520)):
                for position in range(7, length - queries - 99):
                    _write(call, request, position, filler)
            results.append(decode(call, num_splits=splits))
        assert all(map(torch.equal, *results))
        assert results[0][0].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_visible_nan_is_not_swallowed(layout: str) -> None:
    call = make_call(layout, [300, 40])
    _write(call, 1, 20, math.nan)
    for splits in (1, 3):
        out, lse = decode(call, num_splits=splits)
        assert out[1].isnan().all()
        assert lse[1].isnan().all()
        assert out[0].isfinite().all()


def test_a_visible_infinity_is_not_taken_for_nothing_seen() -> None:
    call = make_call("NHD", [40])
    _write(call, 0, 20, math.inf)
    out, _ = decode(call)
    assert not torch.equal(out, torch.zeros_like(out))


def _write(call: DecodeCall, request: int, position: int, value: float) -> None:
    cache = call.cache
    for tensor in (cache.k, cache.v):
        match cache.layout.value:
            case "BSND":
                tensor[request, position] = value
            case "BNSD":
                tensor[request, :, position] = value
            case "packed":
                tensor[cache.cu_seqlens_k[request] + position] = value
            case layout:
                page = cache.block_table[request, position // cache.page_size]
                offset = position % cache.page_size
                tensor[(page, offset) if layout == "NHD" else (page, slice(None), offset)] = value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_run_gives_the_same_bits(layout: str) -> None:
    call = make_call(layout, RAGGED, queries=2, sliding_window=200)
    assert all(map(torch.equal, decode(call, num_splits=3), decode(call, num_splits=3)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_strided_query_is_copied_and_nothing_else(layout: str) -> None:
    call = make_call(layout, RAGGED)
    strided = torch.stack([call.q, call.q], -1)[..., 0]
    assert not strided.is_contiguous()
    assert complaints(replace(call, q=strided)) == []


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_pool_of_alternating_k_and_v_pages_is_read_in_place(layout: str, queries: int) -> None:
    call = make_call(layout, RAGGED, queries=queries, sliding_window=200)
    joint = torch.stack([call.cache.k, call.cache.v], 1)
    joined = replace(call, cache=replace(call.cache, k=joint[:, 0], v=joint[:, 1]))
    assert not joined.cache.k.is_contiguous()
    assert all(map(torch.equal, decode(joined, num_splits=2), decode(call, num_splits=2)))
    with standin.recording() as calls:
        decode(joined)
    (launch,) = [
        one for one in calls if one.name == FIA and one.arguments["block_table"] is not None
    ]
    assert launch.arguments["key"].data_ptr() == joint.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_destinations_are_written(layout: str) -> None:
    call = make_call(layout, RAGGED)
    out, lse = on_npu(torch.full_like(call.q, math.nan)), on_npu(torch.full(call.rows, 7.0))
    expected = decode(call)
    decode(call, out=out, lse=lse)
    assert torch.equal(out.cpu(), expected[0])
    assert torch.equal(lse.cpu(), expected[1])


# --- states ------------------------------------------------------------------------------------


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


# --- lengths, plans, launches ------------------------------------------------------------------


def _launches(call: DecodeCall, **arguments: Any) -> list[standin.Call]:
    with standin.recording() as calls:
        decode(call, **arguments)
    return [one for one in calls if one.name == FIA]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_splits_run_in_one_call(layout: str) -> None:
    call = make_call(layout, [300, 520])
    (launch,) = _launches(call, num_splits=3)
    folded = 2 if layout == "BNSD" else 1
    assert len(launch.arguments["actual_seq_lengths_kv"]) == folded * (3 + 3)


def test_automatic_plans_leave_the_cutting_to_the_operator() -> None:
    (launch,) = _launches(make_call("NHD", RAGGED))
    assert launch.arguments["actual_seq_lengths_kv"] == [300, 129, 2, 520]
    spec = make_call("NHD", [1]).spec
    assert ASCEND.plan(spec, [262144]).num_splits == 1
    assert ASCEND.plan(spec, [262145]).num_splits == 2


@pytest.mark.parametrize(
    ("layout", "queries", "operator_layout"),
    [
        ("NHD", 1, "TND"),
        ("NHD", 3, "TND"),
        ("HND", 1, "TND"),
        ("BSND", 1, "BSND"),
        ("BSND", 3, "TND"),
        ("BNSD", 1, "BNSD"),
        ("BNSD", 3, "TND"),
        ("packed", 1, "TND"),
    ],
)
def test_routes(layout: str, queries: int, operator_layout: str) -> None:
    call = make_call(layout, [300, 520], queries=queries)
    (launch,) = _launches(call)
    assert launch.arguments["input_layout"] == operator_layout
    assert launch.arguments["sparse_mode"] == (3 if queries > 1 else 0)
    assert (launch.arguments["atten_mask"] is not None) == (queries > 1)


def test_cuts_and_windows_need_no_mask() -> None:
    for queries, window in ((3, None), (1, 100), (3, 100)):
        call = make_call("NHD", RAGGED, queries=queries, sliding_window=window)
        for launch in _launches(call, num_splits=3):
            assert launch.arguments["sparse_mode"] == 0
            assert launch.arguments["atten_mask"] is None


def test_route_is_told_in_words() -> None:
    assert "TND, 3-D cache" in ASCEND.route(make_call("NHD", [1]).spec)
    assert "BNSD, 4-D cache" in ASCEND.route(make_call("HND", [1], D=96).spec)
    assert "one query per row" in ASCEND.route(make_call("NHD", [1], page=16).spec)


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


# --- what the backend says of itself -----------------------------------------------------------


def test_evidence_names_the_stand_in() -> None:
    assert ASCEND.evidence == "stand-in"
    assert ASCEND.missing() is None
    assert ASCEND.profile().name == "Ascend910B3"
    assert ASCEND.rounds_partials


def test_npu_tensors_select_this_backend() -> None:
    spec = make_call("NHD", [1]).spec
    assert select(spec, "npu").name == "ascend"
    assert explain(spec, "npu")["ascend"] == []

"""The Ascend backend against the dense float64 reference, through the stand-in: checks our host
code, no device.
"""

import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import splitkv
from ascend_calls import LAYOUTS, complaints, decode, make_call, on_npu, windows
from splitkv.common.call import DecodeCall
from splitkv.kernels_ascend import standin

RAGGED = [300, 0, 129, 2, 520]


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
    for semantics in list(windows())[::2]:
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
    assert all(one.arguments.get("learnable_sink") is None for one in calls)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sm_scale_is_always_handed_over(layout: str) -> None:
    assert complaints(make_call(layout, RAGGED, sm_scale=0.3), num_splits=2) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_batches(layout: str) -> None:
    if layout == "packed":
        cache = splitkv.PackedCache(*torch.zeros(2, 0, 2, 128).bfloat16(), torch.zeros(1).int())
        call = replace(make_call(layout, [1]), q=torch.zeros(0, 1, 4, 128).bfloat16(), cache=cache)
    else:
        call = make_call(layout, [])
    out, lse = decode(call)
    assert out.shape == (0, 1, 4, 128)
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
    (launch,) = [one for one in calls if one.arguments.get("block_table") is not None]
    assert launch.arguments["key"].data_ptr() == joint.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_destinations_are_written(layout: str) -> None:
    call = make_call(layout, RAGGED)
    out, lse = on_npu(torch.full_like(call.q, math.nan)), on_npu(torch.full(call.rows, 7.0))
    expected = decode(call)
    decode(call, out=out, lse=lse)
    assert torch.equal(out.cpu(), expected[0])
    assert torch.equal(lse.cpu(), expected[1])

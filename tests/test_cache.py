"""What caches are views of: layouts, page lists, packed offsets, rings."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import splitkv
from splitkv.common.cache import (
    DenseCache,
    PackedCache,
    PagedCache,
    RingCache,
    check_offsets,
)
from splitkv.common.spec import DecodeSpec, Layout

K, D, DV, P = 2, 4, 6, 16


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def pages(count: int, page_size: int = P, layout: Layout = Layout.NHD) -> tuple[Tensor, Tensor]:
    shape = (count, page_size, K) if layout is Layout.NHD else (count, K, page_size)
    k = torch.arange(math.prod(shape) * D, dtype=torch.float32).reshape(*shape, D)
    return k, torch.zeros(*shape, DV)


# Layouts


@pytest.mark.parametrize("layout", ["BSND", "BNSD", Layout.BSND, Layout.BNSD])
def test_dense_layouts_name_their_axes(layout: str) -> None:
    heads_last = Layout(layout) is Layout.BSND
    shape = (3, 7, K) if heads_last else (3, K, 7)
    cache = DenseCache(torch.zeros(*shape, D), torch.zeros(*shape, DV), ints(1, 2, 3), layout)  # type: ignore[arg-type]
    assert cache.layout is Layout(layout)
    assert (cache.batch, cache.num_kv_heads, cache.capacity, cache.page_size) == (3, K, 7, None)
    k, v = cache.bnsd()
    assert k.shape == (3, K, 7, D)
    assert v.shape == (3, K, 7, DV)
    assert k.data_ptr() == cache.k.data_ptr()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_layouts_name_their_axes(layout: str) -> None:
    k, v = pages(5, layout=Layout(layout))
    table = torch.zeros(3, 4, dtype=torch.int32)
    cache = PagedCache(k, v, table, ints(1, 2, 3), layout)  # type: ignore[arg-type]
    assert (cache.batch, cache.num_kv_heads, cache.page_size, cache.num_pages) == (3, K, P, 5)
    assert cache.capacity == 4 * P
    nhd_k, nhd_v = cache.nhd()
    assert nhd_k.shape == (5, P, K, D)
    assert nhd_v.shape == (5, P, K, DV)
    assert nhd_k.data_ptr() == k.data_ptr()


def test_a_packed_cache_has_lengths_and_no_layout_to_choose() -> None:
    cache = PackedCache(torch.zeros(9, K, D), torch.zeros(9, K, DV), ints(0, 4, 4, 9))
    assert cache.layout is Layout.PACKED
    assert (cache.batch, cache.num_kv_heads, cache.capacity, cache.page_size) == (3, K, 9, None)
    assert cache.seq_lens.tolist() == [4, 0, 5]


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_a_dense_cache_takes_dense_layouts_only(layout: str) -> None:
    with pytest.raises(ValueError, match=f"a dense cache is BSND or BNSD, got {layout}"):
        DenseCache(torch.zeros(1, 2, K, D), torch.zeros(1, 2, K, D), ints(1), Layout(layout))


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "packed"])
def test_a_paged_cache_takes_page_layouts_only(layout: str) -> None:
    k, v = pages(1)
    with pytest.raises(ValueError, match=f"a paged cache is NHD or HND, got {layout}"):
        PagedCache(k, v, ints(0)[None], ints(1), Layout(layout))


def test_views_of_a_larger_pool_are_taken_as_they_are() -> None:
    pool = torch.zeros(2, 5, P, K, D + DV)
    k, v = pool[0, ..., :D], pool[1, ..., D:]
    cache = PagedCache(k, v, ints(0)[None], ints(1))
    assert not cache.k.is_contiguous()
    assert cache.k.data_ptr() == pool.data_ptr()
    assert cache.v.storage_offset() == v.storage_offset() > 0


# Page lists (FlashInfer's form)


def lists(*counts: int) -> tuple[Tensor, Tensor]:
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return torch.from_numpy(offsets), torch.arange(int(offsets[-1]), dtype=torch.int32).flip(0)


def test_d09_a_full_last_page_has_the_page_size_and_no_page_follows() -> None:
    k, v = pages(5)
    indptr, indices = lists(1, 2, 2)
    cache = PagedCache.from_indptr(k, v, indptr, indices, last_page_len=ints(16, 16, 1))
    assert cache.seq_lens.tolist() == [16, 32, 17]
    assert cache.block_table.tolist() == [[4, -1], [3, 2], [1, 0]]


@pytest.mark.parametrize(("last", "bad"), [((0, 0, 1), 0), ((17, 16, 1), 17), ((16, 16, -1), -1)])
def test_d09_a_last_page_of_0_or_more_than_a_page_is_refused(
    last: tuple[int, ...], bad: int
) -> None:
    k, v = pages(5)
    with pytest.raises(
        ValueError, match=rf"is {bad}, allowed are 1 to 16 \(a full last page is 16\)"
    ):
        PagedCache.from_indptr(k, v, *lists(1, 2, 2), last_page_len=ints(*last))


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_property_d09_lengths_survive_the_way_to_page_lists_and_back(
    lengths: list[int], page_size: int
) -> None:
    counts = [-(-length // page_size) for length in lengths]
    last = [
        length - (count - 1) * page_size if count else 0
        for length, count in zip(lengths, counts, strict=True)
    ]
    assert all(1 <= value <= page_size for value, count in zip(last, counts, strict=True) if count)
    indptr, indices = lists(*counts)
    k, v = pages(max(sum(counts), 1), page_size)
    back = PagedCache.from_indptr(k, v, indptr, indices, last_page_len=ints(*last))
    assert back.seq_lens.tolist() == lengths
    given_lengths = PagedCache.from_indptr(k, v, indptr, indices, seq_lens=ints(*lengths))
    assert torch.equal(given_lengths.block_table, back.block_table)
    listed = [
        page
        for row, count in zip(back.block_table.tolist(), counts, strict=True)
        for page in row[:count]
    ]
    assert listed == indices.tolist()


def test_page_lists_of_no_request_and_of_requests_without_pages() -> None:
    k, v = pages(2)
    none = PagedCache.from_indptr(k, v, *lists(), last_page_len=ints())
    assert (none.batch, none.capacity) == (0, 0)
    empty = PagedCache.from_indptr(k, v, *lists(0, 2, 0), last_page_len=ints(0, 3, 0))
    assert empty.seq_lens.tolist() == [0, 19, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_table_of_page_lists_has_their_dtype(dtype: torch.dtype) -> None:
    k, v = pages(3)
    indptr, indices = lists(1, 2)
    cache = PagedCache.from_indptr(k, v, indptr.to(dtype), indices.to(dtype), seq_lens=ints(1, 20))
    assert cache.block_table.dtype == dtype


@pytest.mark.parametrize("how", [{}, {"seq_lens": ints(1, 20), "last_page_len": ints(1, 4)}])
def test_page_lists_need_one_kind_of_length(how: dict[str, Any]) -> None:
    k, v = pages(3)
    with pytest.raises(ValueError, match="exactly one of seq_lens and last_page_len"):
        PagedCache.from_indptr(k, v, *lists(1, 2), **how)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((17, 20), r"seq_lens\[0\] is 17, its 1 pages hold 16 tokens"),
        ((16, 33), r"seq_lens\[1\] is 33, its 2 pages hold 32 tokens"),
        ((16,), r"seq_lens has 1 requests, kv_indptr has 2"),
    ],
)
def test_lengths_that_the_listed_pages_do_not_hold_are_refused(
    lengths: tuple[int, ...], message: str
) -> None:
    k, v = pages(3)
    with pytest.raises(ValueError, match=message):
        PagedCache.from_indptr(k, v, *lists(1, 2), seq_lens=ints(*lengths))


@pytest.mark.parametrize(
    ("values", "total", "message"),
    [
        ([], 0, r"x\[0\] must be 0, got no entry"),
        ([1, 2], 2, r"x\[0\] must be 0, got 1"),
        ([0, 3, 2], 2, r"x must not fall: x\[2\] is 2 after 3"),
        ([0, 3, 5], 6, r"x\[2\] must be the row count 6, got 5"),
    ],
)
def test_offsets_say_which_entry_breaks_the_rule(
    values: list[int], total: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_offsets("x", torch.tensor(values, dtype=torch.int32), total)


# Rings


def ring(
    lengths: list[int],
    columns: int,
    anchor_blocks: int = 0,
    max_seq_len: int | None = None,
    page_size: int = 4,
) -> RingCache:
    k, v = pages(len(lengths) * columns, page_size)
    table = torch.arange(len(lengths) * columns, dtype=torch.int32).flip(0).reshape(-1, columns)
    return RingCache(k, v, table, ints(*lengths), Layout.NHD, anchor_blocks, max_seq_len)


def test_a_ring_repeats_its_columns_after_the_anchors() -> None:
    paged = ring([33, 5], columns=4, anchor_blocks=1).as_paged()
    assert paged.capacity == 36
    assert paged.block_table.tolist() == [[7, 6, 5, 4, 6, 5, 4, 6, 5], [3, 2, 1, 0, 2, 1, 0, 2, 1]]
    assert paged.seq_lens.tolist() == [33, 5]
    assert isinstance(paged, PagedCache)


@given(st.integers(0, 100), st.integers(1, 5), st.integers(0, 3), st.integers(1, 7))
@settings(deadline=None, max_examples=100)
def test_property_a_position_lies_where_the_ring_wrote_it(
    length: int, ring_blocks: int, anchor_blocks: int, page_size: int
) -> None:
    cache = ring([length], ring_blocks + anchor_blocks, anchor_blocks, page_size=page_size)
    written: dict[int, int] = {}
    for block in range(-(-length // page_size)):
        column = block
        if block >= anchor_blocks:
            column = anchor_blocks + (block - anchor_blocks) % ring_blocks
        written[int(cache.block_table[0, column])] = block
    table = cache.as_paged().block_table[0].tolist()
    last = -(-length // page_size) - 1
    for block, page in enumerate(table):
        if block < anchor_blocks or block > last - ring_blocks:
            assert written[page] == block


@pytest.mark.parametrize("bound", [33, 100])
def test_a_ring_with_a_host_bound_does_not_read_its_lengths(bound: int) -> None:
    cache = ring([33, 5], columns=4, max_seq_len=bound)
    elsewhere = RingCache(
        cache.k, cache.v, cache.block_table, cache.seq_lens.to("meta"), Layout.NHD, 0, bound
    )
    assert elsewhere.as_paged().block_table.shape == (2, -(-bound // 4))


def test_a_ring_of_no_request_and_of_empty_requests() -> None:
    assert ring([], columns=4).as_paged().batch == 0
    assert ring([0, 0], columns=4).as_paged().capacity == 0


@pytest.mark.parametrize("anchor_blocks", [-1, 4, 9])
def test_a_ring_keeps_at_least_one_block_apart_from_its_anchors(anchor_blocks: int) -> None:
    with pytest.raises(ValueError, match=rf"anchor_blocks must be 0 to 3 .*got {anchor_blocks}"):
        ring([1], columns=4, anchor_blocks=anchor_blocks)


@pytest.mark.parametrize("table", [torch.tensor(0, dtype=torch.int32), ints(0, 1)])
def test_a_ring_needs_a_table_of_two_dimensions(table: Tensor) -> None:
    k, v = pages(2)
    with pytest.raises(ValueError, match=r"block_table must be \[B, max_blocks\]"):
        RingCache(k, v, table, ints(1))


def decode_ring(cache: RingCache, validate: str | None = None, **fields: int) -> Tensor:
    spec = DecodeSpec(
        num_q_heads=K,
        num_kv_heads=K,
        head_dim=D,
        head_dim_v=DV,
        layout=Layout.NHD,
        page_size=cache.page_size,
        dtype=torch.float32,
        **fields,  # type: ignore[arg-type]
    )
    q = torch.zeros(len(cache.seq_lens), spec.num_queries, K, D)
    return splitkv.decode(q, cache, spec, validate=validate)[0]


def test_a_ring_serves_the_windows_that_it_still_holds() -> None:
    # 4 pages of 4 tokens: at length 33 the positions from 20 on
    cache = ring([33], columns=4)
    decode_ring(cache, sliding_window=13)
    with pytest.raises(
        ValueError, match=r"seq_lens\[0\] is 33: the ring holds .* 20 to 33.*19 to 33"
    ):
        decode_ring(cache, sliding_window=14)
    with pytest.raises(ValueError, match="or a smaller sliding_window"):
        decode_ring(cache)
    decode_ring(ring([16], columns=4))  # has not come round yet


def test_a_ring_serves_the_anchors_that_it_pins() -> None:
    cache = ring([50], columns=4, anchor_blocks=1)
    decode_ring(cache, sliding_window=9, anchor_tokens=4)
    with pytest.raises(
        ValueError, match=r"the ring holds positions 0 to 4 .*the spec shows 0 to 5"
    ):
        decode_ring(cache, sliding_window=9, anchor_tokens=5)


def test_several_queries_reach_further_back() -> None:
    cache = ring([33], columns=4)
    decode_ring(cache, sliding_window=11, num_queries=3)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 33"):
        decode_ring(cache, sliding_window=12, num_queries=3)


@pytest.mark.parametrize("make", [PagedCache, RingCache])
def test_caches_are_told_apart_by_identity_not_by_values(
    make: type[PagedCache | RingCache],
) -> None:
    k, v = pages(2)
    one, other = (make(k, v, ints(0)[None], ints(1)) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2

"""New tokens land at the end of each request, and nowhere else."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import splitkv
from splitkv import DenseCache, PackedCache, PagedCache, RingCache, append_kv
from splitkv.backends.append import _slots

K, D, DV, P = 2, 4, 6, 4
LAYOUTS = ["BSND", "BNSD", "packed", "NHD", "HND", "ring"]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def rows(
    batch: int, steps: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, steps, K, D, generator=random).to(dtype)
    return k, torch.randn(batch, steps, K, DV, generator=random).to(dtype)


def empty_cache(
    layout: str, lengths: list[int], *, capacity: int = 24, dtype: torch.dtype = torch.float32
) -> Any:
    """A cache of NaN (or of ones, in a dtype without it); pages lie in reverse order."""
    fill = math.nan if dtype.is_floating_point else 1.0

    def filled(*shape: int) -> tuple[Tensor, Tensor]:
        k, v = (torch.full((*shape, dim), fill, dtype=torch.float32) for dim in (D, DV))
        return k.to(dtype), v.to(dtype)

    batch, seq_lens = len(lengths), ints(*lengths)
    if layout in ("BSND", "BNSD"):
        shape = (batch, capacity, K) if layout == "BSND" else (batch, K, capacity)
        return DenseCache(*filled(*shape), seq_lens, splitkv.Layout(layout))
    if layout == "packed":
        offsets = ints(*np.concatenate(([0], np.cumsum(lengths))).tolist())
        return PackedCache(*filled(sum(lengths), K), offsets)
    columns = capacity // P
    table = torch.arange(batch * columns, dtype=torch.int32).flip(0).reshape(batch, columns)
    shape = (batch * columns, K, P) if layout == "HND" else (batch * columns, P, K)
    if layout == "ring":
        return RingCache(*filled(*shape), table, seq_lens, splitkv.Layout.NHD, anchor_blocks=1)
    return PagedCache(*filled(*shape), table, seq_lens, splitkv.Layout(layout))


def read(cache: Any, request: int) -> tuple[Tensor, Tensor]:
    """All positions of a request by plain indexing, [L, K, D] and [L, K, Dv]."""
    length = int(cache.seq_lens[request])
    if isinstance(cache, PackedCache):
        low, high = cache.cu_seqlens_k[request : request + 2].tolist()
        return cache.k[low:high], cache.v[low:high]
    if isinstance(cache, DenseCache):
        k, v = cache.bnsd()
        return k[request, :, :length].transpose(0, 1), v[request, :, :length].transpose(0, 1)
    paged = cache.as_paged() if isinstance(cache, RingCache) else cache
    k, v = paged.nhd()
    places = [
        (int(paged.block_table[request, j // paged.page_size]), j % paged.page_size)
        for j in range(length)
    ]
    return (
        torch.stack([k[page, slot] for page, slot in places]) if places else k.new_zeros(0, K, D),
        torch.stack([v[page, slot] for page, slot in places]) if places else v.new_zeros(0, K, DV),
    )


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def changed(before: Tensor, after: Tensor) -> int:
    """How many rows [.., D] have other bits than before."""
    width = before.shape[-1] * before.element_size()
    differs = as_bits(before).view(-1, width) != as_bits(after).view(-1, width)
    return int(differs.any(-1).sum())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_land_at_the_end_of_each_request_and_nothing_else_changes(
    layout: str, steps: int
) -> None:
    cache = empty_cache(layout, [5, 3, 17])
    k, v = rows(3, steps)
    before = cache.k.clone(), cache.v.clone()
    append_kv(cache, k, v)
    for request in range(3):
        got_k, got_v = read(cache, request)
        assert torch.equal(got_k[-steps:], k[request])
        assert torch.equal(got_v[-steps:], v[request])
    assert changed(before[0], cache.k) == changed(before[1], cache.v) == 3 * steps * K


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_needs_no_axis_for_it(layout: str) -> None:
    one, other = empty_cache(layout, [5, 3]), empty_cache(layout, [5, 3])
    k, v = rows(2, 1)
    append_kv(one, k, v)
    append_kv(other, k[:, 0], v[:, 0])
    assert torch.equal(as_bits(one.k), as_bits(other.k))
    assert torch.equal(as_bits(one.v), as_bits(other.v))


@pytest.mark.parametrize("layout", ["BSND", "NHD", "HND"])
def test_tokens_one_by_one_are_tokens_at_once(layout: str) -> None:
    k, v = rows(2, 7)
    at_once, stepwise = empty_cache(layout, [11, 7]), empty_cache(layout, [11, 7])
    append_kv(at_once, k, v)
    for step in range(7):
        stepwise.seq_lens.copy_(ints(4, 0) + step + 1)
        append_kv(stepwise, k[:, step], v[:, step])
    assert torch.equal(as_bits(at_once.k), as_bits(stepwise.k))
    assert torch.equal(as_bits(at_once.v), as_bits(stepwise.v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c03_padding_rows_of_length_0_write_nothing(layout: str) -> None:
    cache, alone = empty_cache(layout, [0, 5, 0, 9]), empty_cache(layout, [0, 5, 0, 9])
    k, v = rows(4, 2)
    k[[0, 2]] = v[[0, 2]] = math.nan
    before = cache.k.clone()
    append_kv(cache, k, v)
    assert changed(before, cache.k) == 2 * 2 * K
    k[[0, 2]] = v[[0, 2]] = 7.0
    append_kv(alone, k, v)
    assert torch.equal(as_bits(cache.k), as_bits(alone.k))
    assert torch.equal(as_bits(cache.v), as_bits(alone.v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_if_no_row_counts_no_bit_changes(layout: str) -> None:
    cache = empty_cache(layout, [0, 0])
    before = cache.k.clone(), cache.v.clone()
    append_kv(cache, *rows(2, 3))
    assert torch.equal(as_bits(before[0]), as_bits(cache.k))
    assert torch.equal(as_bits(before[1]), as_bits(cache.v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_tokens_than_a_request_has_positions_fill_it_from_its_start(layout: str) -> None:
    cache = empty_cache(layout, [2, 5])
    k, v = rows(2, 4)
    append_kv(cache, k, v)
    assert torch.equal(read(cache, 0)[0], k[0, 2:])
    assert torch.equal(read(cache, 1)[0][1:], k[1])


@pytest.mark.parametrize("page", [-1, -(2**31)])
def test_a_negative_page_id_is_skipped_like_a_negative_position(page: int) -> None:
    cache = empty_cache("NHD", [6, 6])
    cache.block_table[0, 1] = page
    k, v = rows(2, 3)
    before = cache.k.clone()
    append_kv(cache, k, v)
    # position 3 lies on the page before
    assert torch.equal(cache.k[int(cache.block_table[0, 0]), 3], k[0, 0])
    assert torch.equal(read(cache, 1)[0][-3:], k[1])
    assert changed(before, cache.k) == (1 + 3) * K


def test_no_request_and_no_token_are_legal() -> None:
    for layout in LAYOUTS:
        append_kv(empty_cache(layout, []), *rows(0, 2))
        cache = empty_cache(layout, [5])
        before = cache.k.clone()
        append_kv(cache, *rows(1, 0))
        assert torch.equal(as_bits(before), as_bits(cache.k))


def test_a_pool_without_pages_takes_padding_rows() -> None:
    k, v = torch.zeros(0, P, K, D), torch.zeros(0, P, K, DV)
    append_kv(PagedCache(k, v, torch.zeros(2, 0, dtype=torch.int32), ints(0, 0)), *rows(2, 1))


@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.integers(1, 6),
    st.data(),
)
@settings(deadline=None, max_examples=80)
def test_property_append_is_plain_assignment(
    layout: str, lengths: list[int], steps: int, data: st.DataObject
) -> None:
    cache = empty_cache(layout, lengths)
    before = cache.k.clone()
    k, v = rows(len(lengths), steps, seed=data.draw(st.integers(0, 100)))
    append_kv(cache, k, v)
    written = 0
    for request, length in enumerate(lengths):
        new = min(steps, length)
        got = read(cache, request)
        assert torch.equal(got[0][length - new :], k[request, steps - new :])
        assert torch.equal(got[1][length - new :], v[request, steps - new :])
        written += new
    assert changed(before, cache.k) == written * K


# Rings


def test_a_ring_keeps_its_anchors_and_goes_round() -> None:
    cache = empty_cache("ring", [1, 1], capacity=12)  # one pinned page and two that go round
    k, v = rows(2, 30)
    for step in range(30):
        cache.seq_lens.fill_(step + 1)
        append_kv(cache, k[:, step], v[:, step])
    for request in range(2):
        got = read(cache, request)[0]
        assert torch.equal(got[:4], k[request, :4])
        assert torch.equal(got[24:], k[request, 24:])  # the ring holds the blocks 6 and 7


def test_of_more_tokens_than_a_ring_holds_the_newest_stay() -> None:
    stepwise, at_once = (
        empty_cache("ring", [1], capacity=12),
        empty_cache("ring", [30], capacity=12),
    )
    k, v = rows(1, 30)
    for step in range(30):
        stepwise.seq_lens.fill_(step + 1)
        append_kv(stepwise, k[:, step], v[:, step])
    append_kv(at_once, k, v)
    resident = [*range(4), *range(24, 30)]
    assert torch.equal(read(at_once, 0)[0][resident], read(stepwise, 0)[0][resident])
    assert torch.equal(read(at_once, 0)[1][resident], v[0, resident])


def test_of_rows_that_go_to_one_place_of_a_ring_one_counts() -> None:
    # which of two writes to one place wins is not defined on a GPU
    slots = _slots(empty_cache("ring", [30, 7], capacity=12), *rows(2, 30))
    places = torch.stack([slots.outer, slots.inner])[:, slots.counts]
    assert places.unique(dim=1).shape == places.shape == (2, 4 + 6 + 7)


def test_a_ring_is_not_unrolled_to_its_length() -> None:
    cache = empty_cache("ring", [2_000_000_000], capacity=12)
    k, v = rows(1, 2)
    append_kv(cache, k, v)
    block = (2_000_000_000 - 1) // P
    page = int(cache.block_table[0, 1 + (block - 1) % 2])
    assert torch.equal(cache.k[page, 2:], k[0])


# Dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_are_rounded_to_the_caches_dtype(dtype: torch.dtype) -> None:
    cache = empty_cache("NHD", [5, 3], dtype=dtype)
    k, v = rows(2, 1)
    append_kv(cache, k, v)
    assert torch.equal(read(cache, 0)[0][-1], k[0, 0].to(dtype))
    assert torch.equal(read(cache, 1)[1][-1], v[1, 0].to(dtype))


def test_a_nan_keeps_its_payload() -> None:
    cache = empty_cache("HND", [3])
    payload = torch.tensor([0x7FC12345, -1, 0x7F800001, 0], dtype=torch.int32).view(torch.float32)
    append_kv(cache, payload.expand(1, K, D).contiguous(), torch.zeros(1, K, DV))
    assert torch.equal(
        read(cache, 0)[0][-1].contiguous().view(torch.int32)[0], payload.view(torch.int32)
    )


L07 = [
    447.0,
    448.0,
    449.0,
    464.0,
    465.0,
    10000.0,
    -10000.0,
    math.inf,
    math.nan,
    0.001953125,
    0.0009,
]


def fp8_cache(dtype: torch.dtype, lengths: list[int]) -> PagedCache:
    k, v = torch.zeros(8, P, K, D).to(dtype), torch.zeros(8, P, K, D).to(dtype)
    table = torch.arange(4 * len(lengths), dtype=torch.int32).reshape(-1, 4)
    return PagedCache(k, v, table, ints(*lengths))


def test_l07_values_beyond_e4m3_saturate_and_nan_stays() -> None:
    k, v = (torch.zeros(1, 1, 1, 16).to(torch.float8_e4m3fn) for _ in range(2))
    cache = PagedCache(k, v, ints(0)[None], ints(1))
    values = torch.tensor([*L07, -math.inf, -448.0, -449.0, 0.0, -0.0]).expand(1, 1, 16)
    append_kv(cache, values, values)
    # 0.001953125 is the smallest subnormal; 0.0009 is nearer to 0
    expected = [448.0] * 6 + [-448.0, 448.0, math.nan, 0.001953125, 0.0] + [-448.0] * 3 + [0.0, 0.0]
    for part in (k, v):
        got = part.float().flatten()
        torch.testing.assert_close(got, torch.tensor(expected), rtol=0.0, atol=0.0, equal_nan=True)


def test_values_beyond_e5m2_saturate_too_although_it_has_infinities() -> None:
    k, v = (torch.zeros(1, 1, 1, 6).to(torch.float8_e5m2) for _ in range(2))
    values = torch.tensor([57344.0, 65536.0, -1e6, math.inf, -math.inf, math.nan]).expand(1, 1, 6)
    append_kv(PagedCache(k, v, ints(0)[None], ints(1)), values, values)
    expected = torch.tensor([57344.0, 57344.0, -57344.0, 57344.0, -57344.0, math.nan])
    for part in (k, v):
        got = part.float().flatten()
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_8_bit_codes_are_the_rows_over_their_scale(dtype: torch.dtype, source: torch.dtype) -> None:
    k, v = rows(2, 2, dtype=source)
    v = v[..., :D]
    scales = {
        "tensor": torch.tensor([0.25]),
        "head": torch.tensor([0.25, 4.0]),
        "request and head": torch.tensor([[0.25, 4.0], [1.0, 0.125]]),
    }
    for scale in scales.values():
        cache = fp8_cache(dtype, [5, 3])
        append_kv(cache, k, v, k_scale=scale, v_scale=scale)
        for request, length in enumerate((5, 3)):
            divisor = (scale[request] if scale.ndim == 2 else scale)[:, None]
            for part, new in ((cache.k, k), (cache.v, v)):
                expected = (new[request].float() / divisor).to(dtype)
                for step, position in enumerate((length - 2, length - 1)):
                    page = int(cache.block_table[request, position // P])
                    assert torch.equal(as_bits(part[page, position % P]), as_bits(expected[step]))


def test_rows_that_are_codes_already_are_stored_as_they_are() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 1, K, D)
    k, v = torch.zeros(8, P, K, D, dtype=torch.int8), torch.zeros(8, P, K, D, dtype=torch.int8)
    cache = PagedCache(k, v, torch.arange(8, dtype=torch.int32).reshape(2, 4), ints(1, 6))
    append_kv(cache, codes, codes)
    assert torch.equal(k[0, 0], codes[0, 0])
    assert torch.equal(v[5, 1], codes[1, 0])
    assert int((k != 0).any(-1).sum()) == 2 * K


def test_an_int8_cache_takes_codes_only() -> None:
    k, v = torch.zeros(8, P, K, D, dtype=torch.int8), torch.zeros(8, P, K, D, dtype=torch.int8)
    cache = PagedCache(k, v, torch.arange(8, dtype=torch.int32).reshape(2, 4), ints(1, 6))
    floats = torch.ones(2, 1, K, D)
    with pytest.raises(
        splitkv.UnsupportedError, match=r"does not quantise to int8.*append the codes"
    ):
        append_kv(cache, floats, floats)
    assert not k.any()


# Strides and widths


def test_strided_views_of_a_larger_pool_are_written_in_place() -> None:
    pool = torch.zeros(2, 6, P, K, 2 * D)
    cache = PagedCache(
        pool[0, ..., ::2],
        pool[1, ..., D:],
        torch.arange(6, dtype=torch.int32).reshape(2, 3),
        ints(5, 9),
    )
    k, v = rows(2, 1)
    append_kv(cache, k, v[..., :D])
    assert torch.equal(pool[0, 1, 0, :, ::2], k[0, 0])
    assert torch.equal(pool[1, 5, 0, :, D:], v[1, 0, :, :D])
    assert int((pool != 0).sum()) == 2 * 2 * K * D


def test_e06_slots_past_the_last_int32_byte() -> None:
    # 576 bytes a slot, 4 million slots: only the touched part of the 2.3 GB comes to exist
    slots, ids = 4_000_001, [0, 3_728_269, 3_728_271, 4_000_000]
    k = torch.from_numpy(np.zeros((slots, 1, 1, 512), dtype=np.int8))
    v = torch.from_numpy(np.zeros((slots, 1, 1, 64), dtype=np.int8))
    cache = PagedCache(k, v, ints(*ids)[:, None], ints(1, 1, 1, 1))
    random = torch.Generator().manual_seed(0)
    new_k = torch.randint(1, 128, (4, 1, 512), generator=random).to(torch.int8)
    new_v = torch.randint(1, 128, (4, 1, 64), generator=random).to(torch.int8)
    append_kv(cache, new_k, new_v)
    for row, slot in enumerate(ids):
        assert torch.equal(k[slot, 0], new_k[row])
        assert torch.equal(v[slot, 0], new_v[row])
    for slot in (1, 2, 3_728_268, 3_728_270, 3_728_272, 3_999_999):
        assert not k[slot].any()
        assert not v[slot].any()
    out, lse = splitkv.decode_attention(
        torch.zeros(4, 1, 512),
        k,
        v,
        block_table=cache.block_table,
        seq_lens=cache.seq_lens,
        layout="NHD",
        k_scale=1.0,
        v_scale=1.0,
        return_lse=True,
    )
    assert torch.equal(out, new_v.float())
    assert torch.equal(lse, torch.zeros(4, 1))


# Without reading a device's data


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_device_nothing_is_read_back(layout: str) -> None:
    # a meta tensor has no data: whoever reads it gets an exception
    cache = empty_cache(layout, [5, 3])
    parts = [part.to("meta") for part in rows(2, 2)]
    lengths = cache.seq_lens.to("meta")
    elsewhere: Any
    if isinstance(cache, DenseCache):
        elsewhere = DenseCache(cache.k.to("meta"), cache.v.to("meta"), lengths, cache.layout)
    elif isinstance(cache, PackedCache):
        elsewhere = PackedCache(
            cache.k.to("meta"), cache.v.to("meta"), cache.cu_seqlens_k.to("meta")
        )
    else:
        elsewhere = type(cache)(
            cache.k.to("meta"),
            cache.v.to("meta"),
            cache.block_table.to("meta"),
            lengths,
            cache.layout,
        )
    append_kv(elsewhere, *parts)


# Malformed requests


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "another batch": (
        {"k": torch.zeros(3, 1, K, D)},
        r"k must be \[2, S, 2, 4\] or \[2, 2, 4\].*got \[3, 1, 2, 4\]",
    ),
    "another head count": (
        {"v": torch.zeros(2, 1, 1, DV)},
        r"v must be \[2, S, 2, 6\].*got \[2, 1, 1, 6\]",
    ),
    "another head dim": (
        {"k": torch.zeros(2, 1, K, DV)},
        r"k must be \[2, S, 2, 4\].*got \[2, 1, 2, 6\]",
    ),
    "two dimensions": ({"k": torch.zeros(2, D)}, r"k must be .*got \[2, 4\]"),
    "k with S and v without": ({"v": torch.zeros(2, K, DV)}, r"v must be .*got \[2, 2, 6\]"),
    "two S": ({"v": torch.zeros(2, 3, K, DV)}, r"k and v must bring one S, got 1 and 3 tokens"),
    "another device": (
        {"k": torch.zeros(2, 1, K, D, device="meta")},
        r"k must be on cpu like the cache, got meta",
    ),
    "integers": (
        {"v": torch.zeros(2, 1, K, DV, dtype=torch.int32)},
        r"v must be of a float dtype.*got torch.int32",
    ),
    "grad": ({"k": torch.zeros(2, 1, K, D, requires_grad=True)}, r"k requires grad"),
    "scale of a float cache": (
        {"v_scale": torch.ones(1)},
        r"v_scale needs an 8-bit float cache, the cache is float32",
    ),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_malformed_rows_are_refused_and_nothing_is_written(
    layout: str, case: tuple[dict[str, Any], str]
) -> None:
    arguments, message = case
    cache = empty_cache(layout, [5, 3])
    before = cache.k.clone(), cache.v.clone()
    k, v = rows(2, 1)
    with pytest.raises(ValueError, match=message):
        append_kv(**{"cache": cache, "k": k, "v": v, **arguments})
    assert torch.equal(as_bits(before[0]), as_bits(cache.k))
    assert torch.equal(as_bits(before[1]), as_bits(cache.v))


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "NHD", "HND"])
def test_lengths_beyond_the_cache_are_refused(layout: str) -> None:
    cache = empty_cache(layout, [5, 25])
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 25, the cache holds 24 tokens"):
        append_kv(cache, *rows(2, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expanded_cache_is_refused_and_nothing_is_written(layout: str) -> None:
    cache = empty_cache(layout, [5, 3])
    v = cache.v[:1].expand(cache.v.shape)
    before = v.clone()
    with pytest.raises(ValueError, match=r"the cache's v is expanded \(strides \(0, .*contiguous"):
        append_kv(replace(cache, v=v), *rows(2, 1))
    assert torch.equal(as_bits(before), as_bits(v))


def test_offsets_beyond_a_packed_cache_are_refused() -> None:
    cache = PackedCache(torch.zeros(8, K, D), torch.zeros(8, K, DV), ints(0, 5, 9))
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\] must be the row count 8, got 9"):
        append_kv(cache, *rows(2, 1))


def test_a_page_id_above_the_pool_is_refused_where_it_would_be_written() -> None:
    cache = empty_cache("NHD", [5, 9])
    cache.block_table[0, 2] = 99  # not where a new token goes
    append_kv(cache, *rows(2, 1))
    cache.block_table[1, 2] = 12
    with pytest.raises(
        ValueError, match="token 0 of request 1 to page 12, the pool has pages 0 to 11"
    ):
        append_kv(cache, *rows(2, 1))


@pytest.mark.parametrize(
    "scale", [torch.ones(3), torch.ones(2, 1, K), torch.ones(1, device="meta")]
)
def test_a_scale_that_does_not_fit_is_refused(scale: Tensor) -> None:
    k, v = rows(2, 1)
    with pytest.raises(
        ValueError, match=r"k_scale must be \[1\], \[K\] = \[2\] or \[B, K\] = \[2, 2\] on cpu"
    ):
        append_kv(fp8_cache(torch.float8_e4m3fn, [5, 3]), k, v[..., :D], k_scale=scale)


SCALES: dict[str, tuple[Any, str]] = {
    "a number": (0.5, r"must be a float tensor, got float; give torch.tensor\(\[scale\]"),
    "a list": ([0.5], "must be a float tensor, got list"),
    "complex": (torch.ones(1, dtype=torch.complex64), "must be a float tensor, got a torch.compl"),
    "integers": (torch.ones(1, dtype=torch.int32), "must be a float tensor, got a torch.int32"),
    "grad": (torch.ones(1, requires_grad=True), "requires grad"),
    "nan": (torch.tensor([1.0, math.nan]), r"\[1\] is nan, a scale must be finite and above 0"),
    "inf": (torch.tensor([math.inf]), r"\[0\] is inf"),
    "zero": (torch.tensor([[1.0, 1.0], [0.0, 1.0]]), r"\[1, 0\] is 0\.0"),
    "negative": (torch.tensor([-0.5]), r"\[0\] is -0\.5"),
    "zero in float32": (torch.tensor([1e-300], dtype=torch.float64), r"\[0\] is 0\.0"),
}


@pytest.mark.parametrize("case", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_scale_nothing_are_refused_and_nothing_is_written(
    name: str, case: tuple[Any, str]
) -> None:
    scale, message = case
    cache = fp8_cache(torch.float8_e4m3fn, [5, 3])
    k, v = rows(2, 1)
    with pytest.raises(ValueError, match=f"{name}.*{message}|{name}{message}"):
        append_kv(cache, k, v[..., :D], **{name: scale})
    assert not as_bits(cache.k).any()
    assert not as_bits(cache.v).any()


@pytest.mark.parametrize("given", [None, [1.0], np.zeros((2, 1, K, D))], ids=["None", "list", "np"])
@pytest.mark.parametrize("name", ["cache", "k", "v"])
def test_arguments_of_another_type_are_named(name: str, given: Any) -> None:
    k, v = rows(2, 1)
    arguments = {"cache": empty_cache("NHD", [5, 3]), "k": k, "v": v, name: given}
    with pytest.raises(ValueError, match=f"^{name} must be a .*got {type(given).__name__}"):
        append_kv(**arguments)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_that_requires_grad_is_written_only_without_it(layout: str, name: str) -> None:
    cache = empty_cache(layout, [5, 3])
    before = cache.k.clone()
    cache = replace(cache, **{name: getattr(cache, name).requires_grad_()})
    with pytest.raises(ValueError, match=f"the cache's {name} requires grad.*no_grad"):
        append_kv(cache, *rows(2, 1))
    assert torch.equal(as_bits(before), as_bits(cache.k.detach()))
    with torch.no_grad():
        append_kv(cache, *rows(2, 1))
        assert torch.equal(read(cache, 0)[0][-1], rows(2, 1)[0][0, 0])


def test_a_cache_of_inference_mode_is_written_only_there() -> None:
    with torch.inference_mode():
        inner = empty_cache("NHD", [5, 3])
    cache = replace(empty_cache("NHD", [5, 3]), v=inner.v)
    before = cache.k.clone()
    with pytest.raises(ValueError, match="the cache's v was made in inference mode"):
        append_kv(cache, *rows(2, 1))
    assert torch.equal(as_bits(before), as_bits(cache.k))
    with torch.inference_mode():
        append_kv(cache, *rows(2, 1))
    assert torch.equal(read(cache, 1)[1][-1], rows(2, 1)[1][1, 0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_v_in_the_memory_of_k_is_written_as_for_mla(layout: str) -> None:
    cache = empty_cache(layout, [5, 3])
    cache = replace(cache, v=cache.k[..., : D - 1])
    k, _ = rows(2, 2)
    append_kv(cache, k, k[..., : D - 1])
    for request in range(2):
        assert torch.equal(read(cache, request)[0][-2:], k[request])


@pytest.mark.parametrize("wrapped_anew", [False, True])
def test_rows_that_lie_in_the_cache_are_what_they_were(wrapped_anew: bool) -> None:
    # position 1 of request 0 goes where row 0 of k lies, and v brings that row, too
    memory = torch.arange(2.0 * P * K * D).reshape(2, P, K, D)
    cache = PagedCache(memory, torch.zeros_like(memory), ints(0, 1)[:, None], ints(2, 1))
    source = torch.from_numpy(memory.numpy()) if wrapped_anew else memory
    new = source[:, 1:2]
    wanted = new.clone()
    append_kv(cache, torch.full_like(wanted, -1.0), new)
    assert torch.equal(cache.v[0, 1], wanted[0, 0])
    assert torch.equal(cache.v[1, 0], wanted[1, 0])
    assert bool((cache.k[0, 1] == -1).all())


@pytest.mark.parametrize("layout", ["NHD", "HND", "ring"])
def test_two_requests_that_write_one_slot_are_refused(layout: str) -> None:
    cache = empty_cache(layout, [7, 6])
    cache.block_table[1, 1] = cache.block_table[0, 1]
    page, before = int(cache.block_table[0, 1]), cache.k.clone()
    with pytest.raises(
        ValueError,
        match=f"token 0 of request 0 and token 1 of request 1 to page {page}, offset 1",
    ):
        append_kv(cache, *rows(2, 2))
    assert torch.equal(as_bits(before), as_bits(cache.k))
    append_kv(cache, *rows(2, 1))  # one page, two slots
    cache.seq_lens.copy_(ints(7, 0))
    append_kv(cache, *rows(2, 2))  # a padding row writes nothing
    cache.seq_lens.copy_(ints(12, 12))
    append_kv(cache, *rows(2, 2))  # a page that both read, as a common prefix


def test_a_ring_without_blocks_holds_no_token() -> None:
    k, v = torch.zeros(1, P, K, D), torch.zeros(1, P, K, DV)
    table = torch.zeros(2, 0, dtype=torch.int32)
    append_kv(RingCache(k, v, table, ints(0, 0)), *rows(2, 1))
    with pytest.raises(ValueError, match="a request of 3 tokens, the ring's block_table has 0"):
        append_kv(RingCache(k, v, table, ints(0, 3)), *rows(2, 1))

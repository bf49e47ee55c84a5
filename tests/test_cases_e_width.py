"""Faults that users met elsewhere: offsets past 2**31 and launch limits.

The buffers are gigabytes of address space; memory goes to the pages touched only.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from backends_in_reach import IN_REACH, INTERPRETED, InReach, backends, every_backend
from histories import (
    assert_rounded,
    lengths32,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import DecodeSpec, Layout, PagedCache, append_kv, plan_splits

PAST_INT32 = 2**31


def zeros_untouched(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written."""
    raw = np.zeros(elements * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype)


@pytest.mark.parametrize(
    ("kv_dtype", "width", "width_v"),
    [
        (torch.float8_e4m3fn, 576, 512),
        (torch.bfloat16, 576, 512),
        (torch.bfloat16, 256, 256),
    ],
)
@backends(slow=INTERPRETED)
def test_E01_page_offset_past_int32_reads_the_right_page(
    on: InReach, kv_dtype: torch.dtype, width: int, width_v: int
) -> None:
    page = 480
    low = PAST_INT32 // (page * width)  # this page straddles 2**31 elements, the next lies beyond
    high = low + 1
    pool = zeros_untouched((high + 32) * page * width, kv_dtype).view(-1, page, 1, width)
    content = random_history([2 * page], 1, width, dtype=kv_dtype).k[0].unflatten(0, (2, page))
    q = random_queries(1, 16, width, dtype=torch.bfloat16)
    results = []
    for first, second in ((0, 1), (high, low)):
        pool[first], pool[second] = content[0], content[1]
        table = torch.tensor([[first, second]], dtype=torch.int32)
        with on.may_refuse("has fewer than 2**31 elements"):
            result = on.decode(
                q,
                pool,
                pool[..., :width_v],
                block_table=table,
                seq_lens=lengths32([2 * page]),
                layout="NHD",
            )
        results.append(result)
    assert bool(results[0][0].any())
    assert same_bits(results[0], results[1])


def assert_last_row_sees_its_key(on: InReach, rows: int, stride: int) -> None:
    heads, dim = 64, 128
    assert (rows - 1) * stride >= PAST_INT32
    buffer = zeros_untouched(rows * stride, torch.float16)
    q = buffer.as_strided((rows, heads, dim), (stride, dim, 1))
    q[-1] = 1.0
    history = random_history([1], 1, dim, dtype=torch.float16)
    cache = history.paged(16)
    out, _ = on.decode(
        q,
        cache["k"],
        cache["v"],
        block_table=cache["block_table"].expand(rows, 1),
        seq_lens=torch.ones(rows, dtype=torch.int32),
        layout="NHD",
    )
    value = history.v[0][0].expand(heads, dim)
    assert torch.equal(out[-1], value)
    assert torch.equal(out[0], value)


@backends(without=INTERPRETED)
def test_E03_query_row_offset_past_int32_by_many_rows(on: InReach) -> None:
    assert_last_row_sees_its_key(on, 2100, 2**20)


@every_backend
def test_E03_query_row_offset_past_int32_by_a_wide_stride(on: InReach) -> None:
    assert_last_row_sees_its_key(on, 18, 2**27)


@pytest.mark.parametrize(
    ("dtype", "window_left"),
    [
        (torch.int8, 4095),
        (torch.float16, 4095),
        pytest.param(torch.int8, None, marks=pytest.mark.slow),
    ],
)
@backends(slow=INTERPRETED)
def test_E04_strided_view_past_int32_sees_its_tail(
    on: InReach, dtype: torch.dtype, window_left: int | None
) -> None:
    tokens, heads, dim = 233100, 24, 128
    fused = zeros_untouched(tokens * 3 * heads * dim, dtype).view(1, tokens, 3 * heads, dim)
    k, v = fused[:, :, heads : 2 * heads], fused[:, :, 2 * heads :]
    assert (tokens - 1) * k.stride(1) >= PAST_INT32 > k.numel()
    k[0, -1, :, 0], v[0, -1] = 20, 7
    quantised = dtype is torch.int8
    q = torch.zeros(1, heads, dim, dtype=torch.float32 if quantised else dtype)
    q[..., 0] = 1.0
    scale = torch.ones(heads) if quantised else None
    with on.may_refuse("is not a multiple of 16"):
        out, _ = on.decode(
            q,
            k,
            v,
            seq_lens=lengths32([tokens]),
            layout="BSND",
            sm_scale=1.0,
            k_scale=scale,
            v_scale=scale,
            window_left=window_left,
        )
    others = tokens - 1 if window_left is None else window_left
    assert_rounded(out, 7 * float(np.exp(20.0) / (np.exp(20.0) + others)))


@pytest.mark.parametrize("on", IN_REACH, ids=lambda on: on.name)
def test_E05_split_scratch_past_int32_is_counted_exactly(on: InReach) -> None:
    batch, heads, dim, splits = 65, 1024, 512, 64
    spec = DecodeSpec(
        num_q_heads=heads, num_kv_heads=8, head_dim=dim, layout=Layout.NHD, page_size=16
    )
    plan = on.plan(spec, [splits * 1024] * batch, tile=16, num_splits=splits)
    rows = batch * splits * heads
    assert rows * dim > PAST_INT32
    assert plan.num_splits == batch * splits
    assert plan.partial_bytes == rows * (dim + 2) * 4
    with pytest.raises(
        ValueError, match=rf"capacity {batch * splits - 1} is below the {batch * splits}"
    ):
        plan_splits(
            spec,
            [splits * 1024] * batch,
            profile=plan.profile,
            num_splits=splits,
            capacity=batch * splits - 1,
        )


@backends(slow=INTERPRETED)
def test_E06_append_to_slots_past_int32_round_trips(on: InReach) -> None:
    slots, width = [0, 3728269, 3728271, 4000000], 576
    assert slots[1] * width < PAST_INT32 <= slots[2] * width
    pool = zeros_untouched((slots[-1] + 1) * width, torch.float8_e4m3fn).view(-1, 1, 1, width)
    new = random_history([4], 1, width, dtype=torch.float8_e4m3fn).k[0].unsqueeze(1)
    table = torch.tensor(slots, dtype=torch.int32)[:, None]
    cache = PagedCache(pool, pool, table, lengths32([1, 1, 1, 1]))
    append_kv(cache, new, new)
    assert same_bits((pool[slots],), (new,))
    neighbours = [1, 2, 3728268, 3728270, 3728272, 3999999]
    assert not pool[neighbours].view(torch.uint8).any()
    out, _ = on.decode(
        torch.zeros(4, 1, width),
        pool,
        pool,
        block_table=table,
        seq_lens=lengths32([1, 1, 1, 1]),
        layout="NHD",
    )
    assert torch.equal(out[:, 0], new[:, 0, 0].float())


@backends(without=INTERPRETED)
def test_E08_batch_times_heads_past_the_grid_limit(on: InReach) -> None:
    batch, heads = 2050, 32
    assert batch * heads > 65535
    history = random_history([1] * batch, heads, 16, dtype=torch.float16)
    q = random_queries(batch, heads, 16, dtype=torch.float16)
    cache = history.dense()
    half = batch // 2
    for num_splits in (1, 2):
        out, lse = on.decode(q, **cache, num_splits=num_splits)
        assert torch.equal(out[-1], history.v[-1][0])
        for part in (slice(0, half), slice(half, batch)):
            rows = {key: x if key == "layout" else x[part] for key, x in cache.items()}
            alone = on.decode(q[part], **rows, num_splits=num_splits)
            assert same_bits((out[part], lse[part]), alone)

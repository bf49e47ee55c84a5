"""Faults that users met elsewhere: heads, head dims, strides and dtypes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from backends_in_reach import INTERPRETED, InReach, backends, every_backend, spec_of
from histories import (
    History,
    assert_near,
    assert_near_lse,
    attend,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import DecodeSpec, Layout, decode_attention, partial_attention

ONLY_CONTIGUOUS = "the operator reads contiguous tensors"


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2), (0, 2), (4, 0), (2, 4)])
def test_K01_heads_that_do_not_divide_are_refused_with_both_numbers(
    heads: int, kv_heads: int
) -> None:
    message = rf"num_q_heads {heads} .*num_kv_heads {kv_heads}"
    with pytest.raises(ValueError, match=message):
        DecodeSpec(num_q_heads=heads, num_kv_heads=kv_heads, head_dim=64, layout=Layout.BSND)
    q, k = torch.zeros(1, heads, 64), torch.zeros(1, 8, kv_heads, 64)
    for entry in (decode_attention, partial_attention):
        with pytest.raises(ValueError, match=message):
            entry(q, k, k, layout="BSND")


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (24, 1)])
@every_backend
def test_K02_group_need_not_be_a_multiple_of_the_tile(
    on: InReach, heads: int, kv_heads: int, num_splits: int
) -> None:
    history = random_history([70], kv_heads, 64, dtype=torch.bfloat16)
    history.v[0].copy_(torch.arange(kv_heads)[None, :, None])
    q = random_queries(1, heads, 64, dtype=torch.bfloat16)
    out, _ = on.decode(q, **history.paged(16), tile=16, num_splits=num_splits)
    index = torch.arange(heads) // (heads // kv_heads)
    assert torch.equal(out[0], index[:, None].expand(heads, 64).bfloat16())


@backends(slow=INTERPRETED)
def test_K04_all_sixteen_heads_of_a_group_are_right_first_and_with_a_bound_plan(
    on: InReach,
) -> None:
    # What a graph adds (stale partials of the capture) needs a device.
    history = random_history([3000], 4, 128, dtype=torch.bfloat16)
    q = random_queries(1, 64, 128, dtype=torch.bfloat16)
    cache = history.paged(16)
    plan = on.plan(spec_of(q, **cache), [3000], tile=16, num_splits=16)
    first = on.decode(q, **cache, plan=plan)
    other = random_queries(1, 64, 128, dtype=torch.bfloat16, seed=9)
    on.decode(other, **cache, plan=plan)
    assert same_bits(on.decode(q, **cache, plan=plan), first)
    wanted, wanted_lse = attend([q], history)
    assert_near(first[0], wanted[0])
    assert_near_lse(first[1], wanted_lse[0])


HEAD_DIMS = [16, 40, 56, 59, 72, 80, 96, 112, 160, 192, 256]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@backends(slow=INTERPRETED)
def test_K05_head_dim_need_not_be_a_power_of_two(on: InReach, dim: int, dtype: torch.dtype) -> None:
    history = random_history([1, 100], 2, dim, dtype=dtype)
    q = random_queries(2, 6, dim, dtype=dtype)
    cache = history.paged(16)
    wanted, wanted_lse = attend(q[:, None], history)
    # Rows end where their allocation ends; then every row is followed by NaN.
    beside = {**cache, **{name: beside_nan(cache[name]) for name in ("k", "v")}}
    for queries, arguments in ((q, cache), (beside_nan(q), beside)):
        with on.may_refuse(ONLY_CONTIGUOUS):
            out, lse = on.decode(queries, **arguments)
        assert_near(out, torch.cat(wanted))
        assert_near_lse(lse, torch.cat(wanted_lse))


def beside_nan(tensor: Tensor) -> Tensor:
    """The same values in rows of twice the width, the other half NaN."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


@every_backend
def test_K07_output_takes_its_heads_from_q_and_its_width_from_v(on: InReach) -> None:
    shards = [
        random_history([length], 4, 192, head_dim_v=128, dtype=torch.float16, seed=length)
        for length in (10, 7)
    ]
    q = random_queries(1, 2, 64, 192, dtype=torch.float16)
    states = [
        on.partial(q, **shards[0].dense(), causal=False),
        on.partial(q, **shards[1].dense()),
    ]
    merged = on.merge(states)
    assert merged.out.shape == (1, 2, 64, 128)
    assert merged.lse.shape == (1, 2, 64)
    whole = History([torch.cat([s.k[0] for s in shards])], [torch.cat([s.v[0] for s in shards])])
    wanted, wanted_lse = attend(q, whole)
    assert_near(merged.out, wanted[0][None], bound=2e-3)
    assert_near_lse(merged.lse, wanted_lse[0][None])


def interleaved_views(k: Tensor, v: Tensor) -> dict[str, tuple[Tensor, Tensor, str]]:
    """The same pages as three kinds of views; ``k``, ``v``: [pages, P, K, D]."""
    both = torch.stack([k, v], 1)
    side_by_side = torch.cat([k, v], -1).transpose(1, 2).contiguous()
    pages, size = k.shape[0], k[0].numel()
    padded = torch.full((5 + pages * (2 * size + 24),), math.nan, dtype=k.dtype)
    with_gaps = padded[5:].view(pages, 2 * size + 24)
    gap_k, gap_v = (with_gaps[:, part * size : (part + 1) * size].view(k.shape) for part in (0, 1))
    gap_k.copy_(k)
    gap_v.copy_(v)
    return {
        "unbound": (both[:, 0], both[:, 1], "NHD"),
        "split": (side_by_side[..., : k.shape[-1]], side_by_side[..., k.shape[-1] :], "HND"),
        "gaps and offset": (gap_k, gap_v, "NHD"),
    }


@pytest.mark.parametrize("kind", ["unbound", "split", "gaps and offset"])
@every_backend
def test_K08_interleaved_cache_is_read_through_its_strides(on: InReach, kind: str) -> None:
    history = random_history([33, 100], 2, 64, dtype=torch.float16)
    q = random_queries(2, 8, 64, dtype=torch.float16)
    cache = history.paged(16)
    plain = on.decode(q, **cache)
    k, v, layout = interleaved_views(cache["k"], cache["v"])[kind]
    assert not k.is_contiguous()
    rest = {name: cache[name] for name in ("block_table", "seq_lens")}
    with on.may_refuse(ONLY_CONTIGUOUS):
        out, lse = on.decode(q, k, v, **rest, layout=layout)
    assert_near(out, plain[0].double())
    assert_near(lse, plain[1].double(), bound=1e-4)
    wanted, wanted_lse = attend(q[:, None], history)
    assert_near(out, torch.cat(wanted))
    assert_near_lse(lse, torch.cat(wanted_lse))


@pytest.mark.parametrize("kind", ["unbound", "split", "gaps and offset"])
@every_backend
def test_K08_interleaved_pool_is_never_copied(on: InReach, kind: str) -> None:
    history = random_history([33, 100], 2, 64, dtype=torch.float16)
    q = random_queries(2, 8, 64, dtype=torch.float16)
    cache = history.paged(16, spare_pages=2000, fill=0.0)
    k, v, layout = interleaved_views(cache["k"], cache["v"])[kind]
    rest = {name: cache[name] for name in ("block_table", "seq_lens")}
    with (
        on.may_refuse(ONLY_CONTIGUOUS),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory,
    ):
        on.decode(q, k, v, **rest, layout=layout)
    largest = max((abs(event.self_cpu_memory_usage) for event in memory.events() or ()), default=0)
    assert 0 < largest < k.numel() * k.element_size() / 4


MIXES = [
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), MIXES)
@every_backend
def test_K11_queries_and_cache_of_different_float_types(
    on: InReach, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    history = random_history([20], 2, 64, dtype=kv_dtype)
    q = random_queries(1, 4, 64, dtype=q_dtype)
    out, lse = on.decode(q, **history.dense())
    wanted, wanted_lse = attend([q], history)
    assert out.dtype == q_dtype
    assert_near(out, wanted[0])
    assert_near_lse(lse, wanted_lse[0])


def test_K11_keys_and_values_of_different_types_are_refused_by_name() -> None:
    arguments: dict[str, Any] = random_history([20], 2, 64, dtype=torch.bfloat16).dense()
    arguments["v"] = arguments["v"].half()
    with pytest.raises(ValueError, match=r"one dtype, got torch\.bfloat16 and torch\.float16"):
        decode_attention(random_queries(1, 4, 64, dtype=torch.bfloat16), **arguments)

"""The CPU stand-in for torch_npu: each documented quirk, and that the first adapter one would write
trips over it.

Per entry of ``QUIRKS`` there is ``test_contract_<name>``, which states the behaviour, and
``test_naive_<name>``, in which the obvious code is compared with a dense float64 computation and
found wrong, or is refused.
"""

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from splitkv.kernels_ascend import standin
from splitkv.kernels_ascend.standin.schemas import SCHEMAS

FOLDER = Path(__file__).parent.parent / "kernels_ascend" / "standin"
P = 128


@pytest.fixture(scope="module", autouse=True)
def torch_npu() -> Iterator[ModuleType]:
    """The stand-in, for this file only: other tests must not find a torch_npu."""
    yield standin.install()
    standin.uninstall()


def refused(pattern: str) -> "pytest.RaisesExc[RuntimeError]":
    return pytest.raises(RuntimeError, match=f"561002: .*{pattern}")


class Dense(NamedTuple):
    """One request: q [S, H, D], k and v [L, K, D], float16."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def sm_scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def request(
    keys: int, *, queries: int = 1, heads: int = 4, kv_heads: int = 2, D: int = 64, seed: int = 0
) -> Dense:
    generator = torch.Generator().manual_seed(seed + 1000 * keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).half()

    return Dense(
        normal(queries, heads, D), normal(keys, kv_heads, D), normal(keys, kv_heads, D) + 1
    )


def attend(
    request: Dense,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    causal: bool = True,
    sink: Tensor | None = None,
    sm_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention in ``dtype``: out [S, H, D] and lse [S, H]; the last query sits at the last
    key.
    """
    q, k, v = (tensor.to(dtype) for tensor in request)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("shd,thd->sht", q, k) * (sm_scale or request.sm_scale)
    position = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))[None]
    visible = (key <= position) if causal else torch.ones(len(q), len(k), dtype=torch.bool)
    if window is not None:
        visible = visible & (position - key < window)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    if sink is not None:
        column = sink.to(dtype)[None, :, None].expand(len(q), -1, 1)
        scores = torch.cat([scores, column], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("sht,thd->shd", weights, v), scores.logsumexp(-1)


def right(out: Tensor, lse: Tensor | None, request: Dense, **options: object) -> bool:
    """Whether out [S, H, D] and lse [S, H] are within twice the error of plain float16 PyTorch."""
    want = attend(request, torch.float64, **options)  # type: ignore[arg-type]
    plain = attend(request, torch.float16, **options)  # type: ignore[arg-type]
    got = [out] if lse is None else [out, lse]
    for result, reference, eager in zip(got, want, plain, strict=False):
        if result.shape != reference.shape or not result.isfinite().all():
            return False
        bound = 2 * (eager.double() - reference).abs().max()
        if (result.double() - reference).abs().max() > bound:
            return False
    return True


def fused(torch_npu: ModuleType, query: Tensor, key: Tensor, value: Tensor, **options: object):
    """npu_fused_infer_attention_score on copies of host tensors; results on the host."""
    return tuple(
        result.cpu()
        for result in torch_npu.npu_fused_infer_attention_score(
            *(to_npu(tensor) for tensor in (query, key, value)),
            **{name: to_npu(option) for name, option in options.items()},
        )
    )


def to_npu(value: object) -> object:
    return value.npu() if isinstance(value, Tensor) else value


def heads_of(request: Dense) -> dict[str, object]:
    return {"num_heads": request.q.shape[1], "num_key_value_heads": request.k.shape[1]}


def bsnd(torch_npu: ModuleType, request: Dense, **options: object) -> tuple[Tensor, Tensor]:
    """A dense single request: out [S, H, D], lse [S, H]."""
    options = {"scale": request.sm_scale, "softmax_lse_flag": True, **heads_of(request), **options}
    batched = (tensor[None] for tensor in request)
    out, lse = fused(torch_npu, *batched, input_layout="BSND", **options)
    return out[0], lse[0, :, :, 0].T


def tnd(torch_npu: ModuleType, request: Dense, **options: object) -> tuple[Tensor, Tensor]:
    """The same, packed."""
    options = {
        "scale": request.sm_scale,
        "softmax_lse_flag": True,
        "actual_seq_lengths": [len(request.q)],
        "actual_seq_lengths_kv": [len(request.k)],
        **heads_of(request),
        **options,
    }
    out, lse = fused(torch_npu, *request, input_layout="TND", **options)
    return out, lse[..., 0]


class Paged(NamedTuple):
    """Requests of one query whose keys lie in shuffled pages: pools [pages, P, K, D]."""

    requests: list[Dense]
    k: Tensor
    v: Tensor
    table: Tensor

    @property
    def q(self) -> Tensor:
        return torch.cat([request.q for request in self.requests])

    @property
    def lengths(self) -> list[int]:
        return [len(request.k) for request in self.requests]


def paged(lengths: list[int], *, page: int = P, **sizes: int) -> Paged:
    requests = [request(keys, seed=index, **sizes) for index, keys in enumerate(lengths)]
    blocks = [-(-keys // page) for keys in lengths]
    order = torch.randperm(sum(blocks) + 1, generator=torch.Generator().manual_seed(5)).tolist()
    kv_heads, D = requests[0].k.shape[1:]
    pools = [torch.full((sum(blocks) + 1, page, kv_heads, D), math.nan).half() for _ in "kv"]
    table = torch.full((len(lengths), max(blocks)), order.pop(), dtype=torch.int32)
    for row, one in enumerate(requests):
        for block in range(blocks[row]):
            table[row, block] = order.pop()
            for pool, tokens in zip(pools, (one.k, one.v), strict=True):
                part = tokens[block * page : (block + 1) * page]
                pool[table[row, block], : len(part)] = part
    return Paged(requests, *pools, table)


def paged_tnd(torch_npu: ModuleType, batch: Paged, **options: object) -> tuple[Tensor, Tensor]:
    """Out [B, H, D] and lse [B, H] over the 3-D form of the pools."""
    options = {
        "scale": batch.requests[0].sm_scale,
        "softmax_lse_flag": True,
        "actual_seq_lengths": list(range(1, len(batch.requests) + 1)),
        "actual_seq_lengths_kv": batch.lengths,
        "block_table": batch.table,
        "block_size": batch.k.shape[1],
        **heads_of(batch.requests[0]),
        **options,
    }
    pools = (batch.k.flatten(2), batch.v.flatten(2))
    out, lse = fused(torch_npu, batch.q, *pools, input_layout="TND", **options)
    return out, lse[..., 0]


def all_right(out: Tensor, lse: Tensor | None, batch: Paged, **options: object) -> bool:
    return all(
        right(out[row][None], None if lse is None else lse[row][None], one, **options)
        for row, one in enumerate(batch.requests)
    )


def compressed_mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


# --- defaults ----------------------------------------------------------------------------------


def test_contract_scale_default(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = bsnd(torch_npu, one, scale=1.0)
    named = bsnd(torch_npu, one)
    batched = [tensor[None] for tensor in one]
    unnamed, _ = fused(torch_npu, *batched, input_layout="BSND", **heads_of(one))
    assert torch.equal(unnamed[0], out)
    assert right(out, lse, one, sm_scale=1.0)
    assert right(*named, one)


def test_naive_scale_default(torch_npu: ModuleType) -> None:
    one = request(40)
    batched = [tensor[None] for tensor in one]
    out, _ = fused(torch_npu, *batched, input_layout="BSND", **heads_of(one))
    assert not right(out[0], None, one)


def test_contract_num_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, kv_heads=4)
    flat = [tensor.flatten(1)[None] for tensor in one]
    out, lse = fused(torch_npu, *flat, scale=1.0, softmax_lse_flag=True)
    wide = Dense(*(tensor.flatten(1)[:, None] for tensor in one))
    assert lse.shape == (1, 1, 1, 1)
    assert right(out[0][:, None], lse[0, :, :, 0].T, wide, sm_scale=1.0)


def test_naive_num_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, kv_heads=4)
    flat = [tensor.flatten(1)[None] for tensor in one]
    out, _ = fused(torch_npu, *flat, scale=one.sm_scale)
    assert not right(out[0].view(1, 4, 64), None, one)


def test_contract_num_kv_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, heads=4, kv_heads=4)
    assert right(*bsnd(torch_npu, one, num_key_value_heads=0), one)


def test_naive_num_kv_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, heads=4, kv_heads=2)
    with refused("key has 2 heads, num_key_value_heads is 4"):
        bsnd(torch_npu, one, num_key_value_heads=0)


# --- what comes back ---------------------------------------------------------------------------


def test_contract_lse_shape(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    batched = [tensor[None] for tensor in one]
    options = {"softmax_lse_flag": True, "scale": one.sm_scale, **heads_of(one)}
    for layout, tensors in (
        ("BSH", [tensor.flatten(2) for tensor in batched]),
        ("BSND", batched),
        ("BNSD", [tensor.transpose(1, 2).contiguous() for tensor in batched]),
        ("BNSD_BSND", [tensor.transpose(1, 2).contiguous() for tensor in batched]),
    ):
        _, lse = fused(torch_npu, *tensors, input_layout=layout, **options)
        assert lse.shape == (1, 4, 3, 1)
        assert lse.dtype == torch.float32
        assert right(
            attend(one, torch.float64, causal=False)[0], lse[0, :, :, 0].T, one, causal=False
        )
    lengths = {"actual_seq_lengths": [3], "actual_seq_lengths_kv": [40]}
    _, lse = fused(torch_npu, *one, input_layout="TND", **lengths, **options)
    assert lse.shape == (3, 4, 1)
    by_head = [tensor.transpose(0, 1).contiguous() for tensor in one]
    for layout, out_shape in (("NTD", (4, 3, 64)), ("NTD_TND", (3, 4, 64))):
        out, lse = fused(torch_npu, *by_head, input_layout=layout, **lengths, **options)
        assert out.shape == out_shape
        assert lse.shape == (3, 4, 1)


def test_naive_lse_shape(torch_npu: ModuleType) -> None:
    one = request(40, queries=4)
    batched = (tensor[None] for tensor in one)
    options = {"scale": one.sm_scale, "softmax_lse_flag": True, **heads_of(one)}
    out, lse = fused(torch_npu, *batched, input_layout="BSND", **options)
    by_layout_of_the_query = lse.reshape(1, 4, 4)[0]
    assert not right(out[0], by_layout_of_the_query, one, causal=False)
    assert right(out[0], by_layout_of_the_query.T, one, causal=False)


def test_contract_lse_flag_off(torch_npu: ModuleType) -> None:
    one = request(8)
    batched = (tensor[None] for tensor in one)
    _, lse = fused(torch_npu, *batched, input_layout="BSND", **heads_of(one))
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32


def test_naive_lse_flag_off(torch_npu: ModuleType) -> None:
    one = request(8)
    with pytest.raises(IndexError):
        bsnd(torch_npu, one, softmax_lse_flag=False)


def test_contract_output_is_rounded(torch_npu: ModuleType) -> None:
    one = request(300)
    out, lse = bsnd(torch_npu, one)
    assert out.dtype == torch.float16
    assert lse.dtype == torch.float32
    exact, exact_lse = attend(one, torch.float64)
    # float32 arithmetic, then half a unit in the last place of float16
    assert 2.0**-16 < ((out.double() - exact) / exact).abs().max() < 2.0**-10
    assert (lse.double() - exact_lse).abs().max() < 2.0**-20 * exact_lse.abs().max()


def test_naive_output_is_rounded(torch_npu: ModuleType) -> None:
    one = request(300)
    parts = [Dense(one.q, one.k[part], one.v[part]) for part in (slice(0, 150), slice(150, 300))]
    states = [bsnd(torch_npu, part) for part in parts]
    exact = [attend(part, torch.float64) for part in parts]
    merged = _merge(states)
    better = _merge(exact)
    reference = attend(one, torch.float64)[0]
    # taken for exact, the partials are wrong by a 16-bit rounding: an error bound must carry it
    assert (merged - reference).abs().max() > 1000 * (better - reference).abs().max()


def _merge(states: list[tuple[Tensor, Tensor]]) -> Tensor:
    lse = torch.stack([lse.double() for _, lse in states])
    weights = torch.exp(lse - lse.logsumexp(0))
    return (torch.stack([out.double() for out, _ in states]) * weights[..., None]).sum(0)


# --- nothing attended --------------------------------------------------------------------------


def test_contract_empty_kv(torch_npu: ModuleType) -> None:
    one = request(0)
    for out, lse in (
        bsnd(torch_npu, one, actual_seq_lengths_kv=[0]),
        tnd(torch_npu, one, actual_seq_lengths_kv=[0]),
    ):
        assert not out.any()
        assert torch.all(lse == math.inf)


def _naive_merge(states: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The merge somebody would write first: a plain logsumexp over what the operator returned."""
    lse = torch.stack([lse for _, lse in states])
    weights = torch.exp(lse - lse.logsumexp(0))
    return (torch.stack([out.float() for out, _ in states]) * weights[..., None]).sum(0)


def test_naive_empty_kv(torch_npu: ModuleType) -> None:
    one, empty = request(40), request(0)
    states = [
        bsnd(torch_npu, one),
        bsnd(torch_npu, empty._replace(q=one.q), actual_seq_lengths_kv=[0]),
    ]
    assert not right(_naive_merge(states), None, one)


def test_contract_empty_row(torch_npu: ModuleType) -> None:
    batch = paged([200, 0])
    out, lse = paged_tnd(torch_npu, batch)
    assert right(out[0][None], lse[0][None], batch.requests[0])
    assert not out[1].any()
    assert torch.all(lse[1] == math.inf)


def test_naive_empty_row(torch_npu: ModuleType) -> None:
    batch = paged([200, 0])
    out, lse = paged_tnd(torch_npu, batch)
    one = batch.requests[0]
    merged = _naive_merge([(out[0][None], lse[0][None]), (out[1][None], lse[1][None])])
    assert not right(merged, None, one)  # +inf - +inf is NaN


def test_contract_empty_row_legacy(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = bsnd(torch_npu, one, actual_seq_lengths_kv=[0])
    assert not out.any()
    assert lse.isfinite().all()
    assert torch.all(lse == torch.tensor(-3.4e38))
    tensors = [tensor[None].transpose(1, 2).contiguous() for tensor in one]
    options = {"softmax_lse_flag": True, **heads_of(one), "actual_seq_lengths_kv": [0]}
    _, lse = fused(torch_npu, *tensors, input_layout="BNSD_BSND", **options)
    assert torch.all(lse == math.inf)  # the same data, not on the legacy path


def test_naive_empty_row_legacy(torch_npu: ModuleType) -> None:
    """A guard for infinities alone takes the finite sentinel for a state."""
    one = request(40)
    _, lse = bsnd(torch_npu, one, actual_seq_lengths_kv=[0])
    guarded = torch.where(torch.isinf(lse), -math.inf, lse)
    assert not torch.equal(guarded, torch.full_like(lse, -math.inf))


def test_contract_invalid_row(torch_npu: ModuleType) -> None:
    one = request(2, queries=4)
    out, lse = tnd(torch_npu, one, sparse_mode=3, atten_mask=compressed_mask())
    assert not out[:2].any()
    assert torch.all(lse[:2] == math.inf)
    seen = Dense(one.q[2:], one.k, one.v)
    assert right(out[2:], lse[2:], seen)


def test_naive_invalid_row(torch_npu: ModuleType) -> None:
    one, other = request(2, queries=3), request(30, queries=3, seed=1)
    causal = {"sparse_mode": 3, "atten_mask": compressed_mask()}
    both = Dense(one.q, torch.cat([other.k, one.k]), torch.cat([other.v, one.v]))
    first = tnd(torch_npu, Dense(one.q, other.k, other.v))
    last = tnd(torch_npu, one, **causal)
    assert not right(_naive_merge([first, last]), None, both)
    mended = (last[0], torch.where(last[1] == math.inf, -math.inf, last[1]))
    assert right(_naive_merge([first, mended]), None, both)


def test_contract_full_mask_row(torch_npu: ModuleType) -> None:
    one = request(40, queries=2)
    mask = torch.zeros(1, 2, 40, dtype=torch.bool)
    mask[:, 0] = True
    out, lse = bsnd(torch_npu, one, atten_mask=mask)
    average = one.v.double().mean(0).repeat_interleave(2, 0)
    assert (out[0].double() - average).abs().max() <= 2.0**-10 * average.abs().max()
    assert torch.all(lse[0] == torch.tensor(-1e12) + math.log(40))
    out, lse = bsnd(torch_npu, one, atten_mask=mask, inner_precise=2)
    assert not out[0].any()
    assert torch.all(lse[0] == math.inf)


def test_naive_full_mask_row(torch_npu: ModuleType) -> None:
    """A mask that hides everything is not 'nothing seen': out holds an average, lse is finite."""
    one = request(40, queries=2)
    out, lse = bsnd(torch_npu, one, atten_mask=torch.ones(1, 2, 40, dtype=torch.bool))
    nothing_seen = torch.isinf(lse).all() and not out.any()
    assert not nothing_seen


# --- masks and windows -------------------------------------------------------------------------


def test_contract_softmax_mask_true_hides(torch_npu: ModuleType) -> None:
    one = request(40, queries=2)
    hidden = torch.zeros(1, 2, 40, dtype=torch.bool)
    hidden[..., 25:] = True
    out, lse = bsnd(torch_npu, one, atten_mask=hidden)
    assert right(out, lse, Dense(one.q, one.k[:25], one.v[:25]), causal=False)


def test_naive_softmax_mask_true_hides(torch_npu: ModuleType) -> None:
    one = request(40, queries=2)
    may_be_seen = torch.zeros(1, 2, 40, dtype=torch.bool)
    may_be_seen[..., :25] = True
    out, lse = bsnd(torch_npu, one, atten_mask=may_be_seen)
    assert not right(out, lse, Dense(one.q, one.k[:25], one.v[:25]), causal=False)


def test_contract_legacy_drops_window(torch_npu: ModuleType) -> None:
    one = request(40)
    band = {
        "sparse_mode": 4,
        "pre_tokens": 7,
        "next_tokens": 0,
        "atten_mask": compressed_mask(),
    }
    assert right(*bsnd(torch_npu, one, **band), one)
    assert right(*tnd(torch_npu, one, **band), one, window=8)


def test_naive_legacy_drops_window(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = bsnd(
        torch_npu, one, sparse_mode=4, pre_tokens=7, next_tokens=0, atten_mask=compressed_mask()
    )
    assert not right(out, lse, one, window=8)


def test_contract_legacy_drops_query_lengths(torch_npu: ModuleType) -> None:
    one = request(40)
    assert right(*bsnd(torch_npu, one, actual_seq_lengths=[0]), one)


def test_naive_legacy_drops_query_lengths(torch_npu: ModuleType) -> None:
    """Query length 0 does not blank a padded row."""
    one = request(40)
    out, _ = bsnd(torch_npu, one, actual_seq_lengths=[0])
    assert out.any()


def _band(window: int) -> dict[str, object]:
    return {
        "sparse_mode": 4,
        "pre_tokens": window,
        "next_tokens": 0,
        "atten_mask": compressed_mask(),
    }


@pytest.mark.parametrize("queries", [1, 3])
def test_contract_band_inclusive(torch_npu: ModuleType, queries: int) -> None:
    one = request(40, queries=queries)
    assert right(*tnd(torch_npu, one, **_band(7)), one, window=8)
    batch = paged([200, 40, 129])
    assert all_right(*paged_tnd(torch_npu, batch, **_band(7)), batch, window=8)


def test_naive_band_inclusive(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    out, lse = tnd(torch_npu, one, **_band(8))
    assert not right(out, lse, one, window=8)
    assert right(out, lse, one, window=9)


def test_contract_compressed_mask(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    for shape in ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)):
        mask = compressed_mask().view(shape)
        assert right(*tnd(torch_npu, one, sparse_mode=3, atten_mask=mask), one)
    out, lse = tnd(torch_npu, one, sparse_mode=2, atten_mask=compressed_mask())
    first = Dense(one.q[:1], one.k[:1], one.v[:1])  # mode 2 is left-aligned
    assert right(out[:1], lse[:1], first)


def test_naive_compressed_mask(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    with refused("needs a 2048 x 2048 mask, got None"):
        tnd(torch_npu, one, sparse_mode=3)
    with refused(r"needs a 2048 x 2048 mask, got \[3, 40\]"):
        tnd(torch_npu, one, sparse_mode=3, atten_mask=torch.ones(3, 40).bool().triu(38))
    with pytest.raises(standin.StandinGapError, match="not strictly upper triangular"):
        tnd(torch_npu, one, sparse_mode=3, atten_mask=compressed_mask().logical_not())


def _masked_by_length(batch: Paged) -> dict[str, object]:
    """Length given by a mask over the whole table, instead of by the length list."""
    room = batch.table.shape[1] * P
    mask = (torch.arange(room) >= batch.lengths[0]).view(1, 1, 1, room)
    return {"atten_mask": mask, "actual_seq_lengths_kv": [room]}


def _paged_bnsd(torch_npu: ModuleType, batch: Paged, **options: object) -> tuple[Tensor, Tensor]:
    one = batch.requests[0]
    options = {
        "scale": one.sm_scale,
        "softmax_lse_flag": True,
        "block_table": batch.table,
        "block_size": batch.k.shape[1],
        "actual_seq_lengths_kv": batch.lengths,
        **heads_of(one),
        **options,
    }
    pools = [pool.transpose(1, 2).contiguous() for pool in (batch.k, batch.v)]
    out, lse = fused(torch_npu, batch.q[:, :, None], *pools, input_layout="BNSD", **options)
    return out[:, :, 0], lse[:, :, 0, 0]


def _finite(batch: Paged) -> Paged:
    return batch._replace(k=batch.k.nan_to_num(1.0), v=batch.v.nan_to_num(1.0))


def test_contract_mask_under_ranked(torch_npu: ModuleType) -> None:
    short, long = _finite(paged([300])), _finite(paged([600]))
    # room for 384 positions: all of the mask is read
    assert all_right(*_paged_bnsd(torch_npu, short, **_masked_by_length(short)), short)
    whole = long._replace(requests=[_whole_table(long)])
    assert all_right(*_paged_bnsd(torch_npu, long, **_masked_by_length(long)), whole)


def _whole_table(batch: Paged) -> Dense:
    pages = batch.table[0].long()
    return Dense(batch.q, batch.k[pages].flatten(0, 1), batch.v[pages].flatten(0, 1))


def test_naive_mask_under_ranked(torch_npu: ModuleType) -> None:
    batch = _finite(paged([600]))
    assert not all_right(*_paged_bnsd(torch_npu, batch, **_masked_by_length(batch)), batch)
    assert all_right(*_paged_bnsd(torch_npu, batch), batch)


def test_contract_hidden_nan_leaks(torch_npu: ModuleType) -> None:
    one = request(40)
    one.v[0] = math.nan
    out, _ = tnd(torch_npu, one, **_band(7))
    assert out.isnan().all()
    # past the length nothing is read: the pool's unused slots hold NaN
    batch = paged([200, 3])
    assert all_right(*paged_tnd(torch_npu, batch), batch)


def test_naive_hidden_nan_leaks(torch_npu: ModuleType) -> None:
    one = request(40)
    clean = Dense(*(tensor.clone() for tensor in one))
    one.v[0] = math.nan
    assert not right(*tnd(torch_npu, one, **_band(7)), clean, window=8)


# --- lengths -----------------------------------------------------------------------------------


def test_contract_host_lengths(torch_npu: ModuleType) -> None:
    one = request(40)
    for lengths in ([20], (20,), torch.tensor([20])):
        out, lse = bsnd(torch_npu, one, actual_seq_lengths_kv=[20])
        again = torch_npu.npu_fused_infer_attention_score(
            *(tensor[None].npu() for tensor in one),
            input_layout="BSND",
            scale=one.sm_scale,
            actual_seq_lengths_kv=lengths,
            **heads_of(one),
        )[0].cpu()
        assert torch.equal(again[0], out)
        assert right(out, lse, Dense(one.q, one.k[:20], one.v[:20]))


def test_naive_host_lengths(torch_npu: ModuleType) -> None:
    one = request(40)
    for lengths in (torch.tensor([20]).npu(), [torch.tensor(20).npu()]):
        with refused("must be host integers"):
            bsnd(torch_npu, one, actual_seq_lengths_kv=lengths)


def _two_packed() -> tuple[Dense, list[Dense]]:
    requests = [request(20, queries=2), request(33, queries=2, seed=1)]
    return Dense(*(torch.cat(parts) for parts in zip(*requests, strict=True))), requests


def test_contract_query_lengths_cumulative(torch_npu: ModuleType) -> None:
    packed, requests = _two_packed()
    lengths = {"actual_seq_lengths": [2, 4], "actual_seq_lengths_kv": [20, 53]}
    out, lse = tnd(torch_npu, packed, **lengths)
    for index, one in enumerate(requests):
        rows = slice(2 * index, 2 * index + 2)
        assert right(out[rows], lse[rows], one, causal=False)


def test_naive_query_lengths_cumulative(torch_npu: ModuleType) -> None:
    packed, _ = _two_packed()
    with refused("T 4 differs from the last query length 2"):
        tnd(torch_npu, packed, actual_seq_lengths=[2, 2], actual_seq_lengths_kv=[20, 53])
    with refused("2 key lengths"):  # a leading zero, as in cu_seqlens
        tnd(torch_npu, packed, actual_seq_lengths=[0, 2, 4], actual_seq_lengths_kv=[20, 53])


def test_contract_query_lengths_end_at_t(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    assert right(*tnd(torch_npu, one, actual_seq_lengths=[3]), one, causal=False)


def test_naive_query_lengths_end_at_t(torch_npu: ModuleType) -> None:
    one = request(40, queries=4)  # the last row is padding
    with refused("T 4 differs from the last query length 3"):
        tnd(torch_npu, one, actual_seq_lengths=[3])


def test_contract_kv_lengths_per_request_when_paged(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    assert all_right(*paged_tnd(torch_npu, batch, actual_seq_lengths_kv=[200, 130]), batch)


def test_naive_kv_lengths_per_request_when_paged(torch_npu: ModuleType) -> None:
    batch = _finite(paged([100, 130]))
    out, lse = paged_tnd(torch_npu, batch, actual_seq_lengths_kv=[100, 230])
    assert not all_right(out, lse, batch)
    packed, requests = _two_packed()
    with refused("key lengths of layout TND are running sums"):
        swapped = {"actual_seq_lengths": [2, 4], "actual_seq_lengths_kv": [33, 20]}
        tnd(torch_npu, packed, **swapped)
    out, lse = tnd(torch_npu, packed, actual_seq_lengths=[2, 4], actual_seq_lengths_kv=[20, 33])
    assert not right(out[2:], lse[2:], requests[1], causal=False)


def test_contract_length_list_size(torch_npu: ModuleType) -> None:
    one = request(40)
    both = Dense(*(torch.stack([tensor, tensor]) for tensor in one))
    options = {"scale": one.sm_scale, "input_layout": "BSND", **heads_of(one)}
    for lengths in ([20], [20, 20], [20, 20, 7]):
        out, _ = fused(torch_npu, *both, actual_seq_lengths_kv=lengths, **options)
        for row in out:
            assert right(row, None, Dense(one.q, one.k[:20], one.v[:20]))


def test_naive_length_list_size(torch_npu: ModuleType) -> None:
    one = request(40)
    three = Dense(*(torch.stack([tensor] * 3) for tensor in one))
    with refused("2 key lengths for a batch of 3"):
        fused(
            torch_npu, *three, input_layout="BSND", actual_seq_lengths_kv=[20, 7], **heads_of(one)
        )


def test_contract_paged_needs_lengths(torch_npu: ModuleType) -> None:
    batch = paged([200])
    with refused("block_table is given without key lengths"):
        _paged_bnsd(torch_npu, batch, actual_seq_lengths_kv=None)


test_naive_paged_needs_lengths = test_contract_paged_needs_lengths


# --- pages -------------------------------------------------------------------------------------


def test_contract_block_table_unchecked(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    swapped = batch._replace(table=batch.table.flip(0))
    out, lse = paged_tnd(torch_npu, swapped, actual_seq_lengths_kv=[130, 200])
    assert right(out[1][None], lse[1][None], Dense(batch.requests[1].q, *batch.requests[0][1:]))


def test_naive_block_table_unchecked(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    batch.table[0, 1] = 10**6
    with pytest.raises(IndexError):
        paged_tnd(torch_npu, batch)
    batch.table[0, 1] = batch.table[1, 0]  # somebody else's page: no error, another answer
    assert not all_right(*paged_tnd(torch_npu, batch), batch)


def test_contract_cache_forms(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    assert all_right(*paged_tnd(torch_npu, batch), batch)
    assert all_right(*_paged_bnsd(torch_npu, batch), batch)
    one = batch.requests[0]
    by_head = [pool.transpose(1, 2).contiguous() for pool in (batch.k, batch.v)]
    options = {
        "scale": one.sm_scale,
        "block_table": batch.table,
        "block_size": P,
        "actual_seq_lengths_kv": batch.lengths,
        **heads_of(one),
    }
    out, _ = fused(
        torch_npu,
        batch.q,
        *by_head,
        input_layout="TND",
        actual_seq_lengths=[1, 2],
        **options,
    )
    assert all_right(out, None, batch)
    with refused("4-D .* does not go with layout BSND"):
        fused(torch_npu, batch.q[:, None], *by_head, input_layout="BSND", **options)


def test_naive_cache_forms(torch_npu: ModuleType) -> None:
    """NHD pages handed over as they are: read the wrong way round when P = K, refused otherwise."""
    batch = paged([40], page=16, heads=16, kv_heads=16)
    one = batch.requests[0]
    options = {
        "scale": one.sm_scale,
        "block_table": batch.table,
        "actual_seq_lengths_kv": batch.lengths,
        **heads_of(one),
    }
    finite = _finite(batch)
    out, _ = fused(
        torch_npu,
        batch.q[:, :, None],
        finite.k,
        finite.v,
        input_layout="BNSD",
        block_size=16,
        **options,
    )
    assert not right(out[:, :, 0], None, one)
    batch = paged([200])
    options |= {"block_table": batch.table, "actual_seq_lengths_kv": [200], "block_size": P}
    options |= heads_of(batch.requests[0])
    with refused("cache has 128 heads"):
        fused(torch_npu, batch.q[:, :, None], batch.k, batch.v, input_layout="BNSD", **options)


def test_contract_head_dim(torch_npu: ModuleType) -> None:
    for D in (16, 80, 512):
        one = request(20, D=D)
        assert right(*bsnd(torch_npu, one), one)
    with refused("must be multiples of 16 up to 512"):
        bsnd(torch_npu, request(20, D=528))


def test_naive_head_dim(torch_npu: ModuleType) -> None:
    with refused("head dims 72, 72 must be multiples of 16"):
        bsnd(torch_npu, request(20, D=72))


def test_contract_head_dim_by_cache_form(torch_npu: ModuleType) -> None:
    for D in (80, 96, 256):
        batch = paged([200, 130], D=D)
        assert all_right(*paged_tnd(torch_npu, batch), batch)
        one = request(40, D=D)
        assert right(*tnd(torch_npu, one), one)
    with refused("is not 64, 128 or 192"):
        paged_tnd(torch_npu, paged([200], D=272))


def test_naive_head_dim_by_cache_form(torch_npu: ModuleType) -> None:
    batch = paged([200], D=96)
    one = batch.requests[0]
    by_head = [pool.transpose(1, 2).contiguous() for pool in (batch.k, batch.v)]
    with refused("head dim 96, 96 is not 64, 128 or 192"):
        fused(
            torch_npu,
            batch.q,
            *by_head,
            input_layout="TND",
            block_table=batch.table,
            block_size=P,
            actual_seq_lengths=[1],
            actual_seq_lengths_kv=[200],
            **heads_of(one),
        )


def test_contract_group_64(torch_npu: ModuleType) -> None:
    one = request(20, heads=64, kv_heads=1)
    assert right(*bsnd(torch_npu, one), one)


def test_naive_group_64(torch_npu: ModuleType) -> None:
    with refused("num_heads / num_key_value_heads is 65, the limit is 64"):
        bsnd(torch_npu, request(20, heads=65, kv_heads=1))


def test_contract_page_size(torch_npu: ModuleType) -> None:
    for page in (16, 48, 512):
        batch = paged([70, 30], page=page)
        assert all_right(*paged_tnd(torch_npu, batch), batch)


def test_naive_page_size(torch_npu: ModuleType) -> None:
    for page in (1, 8, 24, 528):
        with refused(f"block_size {page} with 1 queries is not a multiple of 16 up to 512"):
            paged_tnd(torch_npu, paged([70], page=page))
    batch = paged([70], page=16)
    batch = batch._replace(requests=[request(70, queries=2)])
    with refused("block_size 16 with 2 queries is not a multiple of 128"):
        paged_tnd(torch_npu, batch, actual_seq_lengths=[2])


# --- dtypes, strides, devices ------------------------------------------------------------------


def test_contract_sixteen_bit_only(torch_npu: ModuleType) -> None:
    one = request(20)
    mixed = Dense(one.q, one.k.bfloat16(), one.v.bfloat16())
    with refused("differs from the query's"):
        bsnd(torch_npu, mixed)
    out, _ = bsnd(torch_npu, Dense(*(tensor.bfloat16() for tensor in one)))
    assert out.dtype == torch.bfloat16


def test_naive_sixteen_bit_only(torch_npu: ModuleType) -> None:
    with refused("query dtype torch.float32 is not float16 or bfloat16"):
        bsnd(torch_npu, Dense(*(tensor.float() for tensor in request(20))))


def test_contract_contiguous(torch_npu: ModuleType) -> None:
    one = request(20)
    narrowed = torch.cat([one.k, one.k], -1).npu()[..., :64]
    with refused("key is not contiguous"):
        bsnd(torch_npu, one._replace(k=narrowed))


def test_naive_contiguous(torch_npu: ModuleType) -> None:
    batch = paged([200])
    viewed = [pool.npu().transpose(1, 2) for pool in (batch.k, batch.v)]
    with refused("key is not contiguous"):
        torch_npu.npu_fused_infer_attention_score(
            batch.q[:, :, None].npu(),
            *viewed,
            input_layout="BNSD",
            block_table=batch.table.npu(),
            block_size=P,
            actual_seq_lengths_kv=[200],
            **heads_of(batch.requests[0]),
        )


def test_contract_one_device(torch_npu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"npu:0 and cpu"):
        torch.ones(2).npu() + torch.ones(2)
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        torch.ones(2).npu().numpy()
    with pytest.raises(RuntimeError, match="no float64"):
        torch.ones(2, 2).npu().double() @ torch.ones(2, 2).npu().double()


def test_naive_one_device(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    with pytest.raises(RuntimeError, match=r"npu:0 and cpu"):
        torch_npu.npu_fused_infer_attention_score(
            *(tensor.npu() for tensor in one),
            input_layout="TND",
            sparse_mode=3,
            atten_mask=compressed_mask(),
            actual_seq_lengths=[3],
            actual_seq_lengths_kv=[40],
            **heads_of(one),
        )


# --- sinks -------------------------------------------------------------------------------------


def _with_sink(torch_npu: ModuleType, one: Dense, sink: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *(tensor.npu() for tensor in one),
        input_layout="TND",
        learnable_sink=sink.npu(),
        softmax_scale=one.sm_scale,
        num_query_heads=one.q.shape[1],
        num_key_value_heads=one.k.shape[1],
        actual_seq_qlen=[len(one.q)],
        actual_seq_kvlen=[len(one.k)],
        return_softmax_lse=True,
    )
    return out.cpu(), lse.cpu()[..., 0]


def test_contract_sink_v2_only(torch_npu: ModuleType) -> None:
    assert "learnable_sink" not in SCHEMAS["npu_fused_infer_attention_score"]
    one = request(40)
    with refused("learnable_sink needs layout TND"):
        torch_npu.npu_fused_infer_attention_score_v2(
            *(tensor[None].npu() for tensor in one),
            input_layout="BSND",
            learnable_sink=torch.zeros(4).half().npu(),
            num_query_heads=4,
            num_key_value_heads=2,
        )
    with refused(r"must be \[4\] torch.float16"):
        _with_sink(torch_npu, one, torch.zeros(4))


def test_naive_sink_v2_only(torch_npu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'learnable_sink'"):
        tnd(torch_npu, request(40), learnable_sink=torch.zeros(4).half())


SINK = torch.tensor([0.5, 1.0, 2.0, 4.0]).half()


def test_contract_sink_in_lse(torch_npu: ModuleType) -> None:
    one = request(40)
    assert right(*_with_sink(torch_npu, one, SINK), one, sink=SINK)


def test_naive_sink_in_lse(torch_npu: ModuleType) -> None:
    one = request(40)
    parts = [Dense(one.q, one.k[part], one.v[part]) for part in (slice(0, 20), slice(20, 40))]
    to_every_split = [_with_sink(torch_npu, part, SINK) for part in parts]
    assert not right(_naive_merge(to_every_split), None, one, sink=SINK)
    to_one_split = [_with_sink(torch_npu, parts[0], SINK), tnd(torch_npu, parts[1])]
    assert right(_naive_merge(to_one_split), None, one, sink=SINK)


# --- the incremental operator ------------------------------------------------------------------


def _incre(torch_npu: ModuleType, one: Dense, **options: object) -> Tensor:
    options = {"scale_value": one.sm_scale, "input_layout": "BSND", **heads_of(one), **options}
    batched = (tensor[None].npu() for tensor in one)
    return torch_npu.npu_incre_flash_attention(*batched, **options).cpu()[0]


def test_contract_incre_lengths_are_keys(torch_npu: ModuleType) -> None:
    one = request(40)
    out = _incre(torch_npu, one, actual_seq_lengths=[20])
    assert right(out, None, Dense(one.q, one.k[:20], one.v[:20]))


def test_naive_incre_lengths_are_keys(torch_npu: ModuleType) -> None:
    one = request(40)
    out = _incre(torch_npu, one, actual_seq_lengths=[1])  # taken for the query's length
    assert not right(out, None, one)


def test_contract_incre_no_lse(torch_npu: ModuleType) -> None:
    assert "inner_precise=1)" in SCHEMAS["npu_incre_flash_attention"]
    assert isinstance(_incre(torch_npu, request(40)), Tensor)
    with refused("one query per request, got 2"):
        _incre(torch_npu, request(40, queries=2))


def test_naive_incre_no_lse(torch_npu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'softmax_lse_flag'"):
        _incre(torch_npu, request(40), softmax_lse_flag=True)


# --- the merge operator ------------------------------------------------------------------------


def _update(
    torch_npu: ModuleType, states: list[tuple[Tensor, Tensor]], update_type: int = 1
) -> tuple[Tensor, Tensor]:
    """States as out [S, H, D], lse [S, H]."""
    shape = states[0][0].shape
    out, lse = torch_npu.npu_attention_update(
        [lse.reshape(-1).npu() for _, lse in states],
        [out.reshape(-1, shape[-1]).npu() for out, _ in states],
        update_type,
    )
    return out.cpu().view(shape), lse.cpu()


def _halves(torch_npu: ModuleType, one: Dense) -> list[tuple[Tensor, Tensor]]:
    middle = len(one.k) // 2
    parts = (slice(0, middle), slice(middle, None))
    return [bsnd(torch_npu, Dense(one.q, one.k[part], one.v[part])) for part in parts]


def test_contract_update_flat(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    out, lse = _update(torch_npu, _halves(torch_npu, one))
    assert right(out, lse.view(3, 4), one, causal=False)
    (first, first_lse), *_ = _halves(torch_npu, one)
    with refused(r"lse must be float32 \[R\]"):
        torch_npu.npu_attention_update([first_lse.npu()], [first.flatten(0, 1).npu()], 1)


def test_naive_update_flat(torch_npu: ModuleType) -> None:
    """(B, N, S, 1) LSEs flattened beside (B, S, N, D) outputs."""
    one = request(40, queries=3)
    states = [(out, lse.T.contiguous()) for out, lse in _halves(torch_npu, one)]
    out, _ = _update(torch_npu, states)
    assert not right(out, None, one, causal=False)


def test_contract_update_plus_inf(torch_npu: ModuleType) -> None:
    one = request(40)
    empty = bsnd(torch_npu, request(0)._replace(q=one.q))
    assert torch.all(empty[1] == math.inf)
    out, lse = _update(torch_npu, [*_halves(torch_npu, one), empty])
    assert right(out, lse.view(1, 4), one)


def test_naive_update_plus_inf(torch_npu: ModuleType) -> None:
    """The finite sentinel is a number: two of them merge to a finite LSE, not to 'nothing'."""
    empty = bsnd(torch_npu, request(40), actual_seq_lengths_kv=[0])
    _, lse = _update(torch_npu, [empty, empty])
    assert not torch.isinf(lse).any()


def test_contract_update_all_invalid(torch_npu: ModuleType) -> None:
    empty = bsnd(torch_npu, request(0))
    out, lse = _update(torch_npu, [empty, empty])
    assert out.isnan().all()
    assert lse.isnan().all()


def test_naive_update_all_invalid(torch_npu: ModuleType) -> None:
    nothing = (torch.zeros(1, 4, 64), torch.full((1, 4), -math.inf))
    out, _ = _update(torch_npu, [nothing, nothing])
    assert not torch.equal(out, torch.zeros(1, 4, 64))


def test_contract_update_shards(torch_npu: ModuleType) -> None:
    one = request(64)
    quarter = [Dense(one.q, one.k[i : i + 4], one.v[i : i + 4]) for i in range(0, 64, 4)]
    out, lse = _update(torch_npu, [bsnd(torch_npu, part) for part in quarter])
    assert right(out, lse.view(1, 4), one)
    for D in (4, 12, 520):
        with refused(f"D {D} is not a multiple of 8 from 8 to 512"):
            _update(torch_npu, [(torch.zeros(1, 4, D), torch.zeros(1, 4))])
    with refused("update_type 7"):
        _update(torch_npu, _halves(torch_npu, one), 7)


def test_naive_update_shards(torch_npu: ModuleType) -> None:
    one = request(17)
    states = [bsnd(torch_npu, Dense(one.q, one.k[i : i + 1], one.v[i : i + 1])) for i in range(17)]
    with refused("17 shards, the limit is 16"):
        _update(torch_npu, states)


def test_contract_update_type_0(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = _update(torch_npu, _halves(torch_npu, one), 0)
    assert right(out, None, one)
    assert lse.numel() == 0


def test_naive_update_type_0(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = _update(torch_npu, _halves(torch_npu, one), 0)
    assert not right(out, lse, one)


# --- cache writes ------------------------------------------------------------------------------


def _write(torch_npu: ModuleType, slots: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Two tokens (all 1, all 2) written to a cache of zeros [3, 4, 2, 16]."""
    tokens = torch.stack([torch.full((2, 16), value) for value in (1.0, 2.0)]).half().npu()
    caches = [torch.zeros(3, 4, 2, 16).half().npu() for _ in "kv"]
    torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, *caches, slots.npu(), **options)
    return caches[0].cpu(), caches[1].cpu()


def test_contract_scatter_default_is_nz(torch_npu: ModuleType) -> None:
    assert "cache_mode='PA_NZ'" in SCHEMAS["npu_scatter_pa_kv_cache"]
    for dtype in (torch.int32, torch.int64):
        k, v = _write(torch_npu, torch.tensor([9, 2], dtype=dtype), cache_mode="Norm")
        assert torch.equal(k, v)
        assert torch.all(k[2, 1] == 1)
        assert torch.all(k[0, 2] == 2)
        assert k.sum() == 3 * 2 * 16


def test_naive_scatter_default_is_nz(torch_npu: ModuleType) -> None:
    tokens = torch.ones(1, 2, 64).half().npu()
    caches = [torch.zeros(3, 4, 2, 64).half().npu() for _ in "kv"]
    with refused("pass 'Norm'"):
        torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, *caches, torch.tensor([9]).npu())


def test_contract_scatter_negative_slot(torch_npu: ModuleType) -> None:
    k, _ = _write(torch_npu, torch.tensor([-1, 2]), cache_mode="Norm")
    assert k.sum() == 2 * 2 * 16


def test_naive_scatter_negative_slot(torch_npu: ModuleType) -> None:
    """-1 is not the last slot, as it is in torch; and nothing checks the other end."""
    k, _ = _write(torch_npu, torch.tensor([-1, 2]), cache_mode="Norm")
    assert not k[2, 3].any()
    with pytest.raises(IndexError):
        _write(torch_npu, torch.tensor([12, 2]), cache_mode="Norm")


def test_contract_scatter_duplicate_slot(torch_npu: ModuleType) -> None:
    k, _ = _write(torch_npu, torch.tensor([-1, -1]), cache_mode="Norm")
    assert not k.any()


def test_naive_scatter_duplicate_slot(torch_npu: ModuleType) -> None:
    with refused("slots repeat"):
        _write(torch_npu, torch.tensor([5, 5]), cache_mode="Norm")


def _reshape_and_cache(torch_npu: ModuleType, slots: Tensor) -> Tensor:
    tokens = torch.ones(1, 2, 16).half().npu()
    caches = [torch.zeros(3, 4, 2, 16).half().npu() for _ in "kv"]
    torch_npu._npu_reshape_and_cache(tokens, tokens, *caches, slots.npu())
    return caches[0].cpu()


def test_contract_reshape_slots_int32(torch_npu: ModuleType) -> None:
    cache = _reshape_and_cache(torch_npu, torch.tensor([7], dtype=torch.int32))
    assert torch.all(cache[1, 3] == 1)
    assert cache.sum() == 2 * 16


def test_naive_reshape_slots_int32(torch_npu: ModuleType) -> None:
    with refused("slots must be one of"):
        _reshape_and_cache(torch_npu, torch.tensor([7]))


# --- the stand-in itself -----------------------------------------------------------------------


def test_every_quirk_has_its_line_its_contract_test_and_its_naive_test() -> None:
    source = "\n".join(path.read_text() for path in FOLDER.glob("*.py"))
    modelled = {
        name.strip()
        for line in source.splitlines()
        if "quirk: " in line and "<name>" not in line
        for name in line.split("quirk: ")[1].split(" (")[0].split(",")
    }
    elsewhere = {"num-heads-default", "one-device"}  # a schema's default; the device's own rule
    assert modelled == set(standin.QUIRKS) - elsewhere
    names = {
        f"test_{kind}_{name.replace('-', '_').lower()}"
        for name in standin.QUIRKS
        for kind in ("contract", "naive")
    }
    assert names <= set(globals())


def test_schemas_parse_and_refuse_unknown_keywords(torch_npu: ModuleType) -> None:
    for name, schema in SCHEMAS.items():
        assert torch._C.parse_schema(f"npu::{schema}").name == f"npu::{name}"
        operator: Callable[..., object] = getattr(torch_npu, name)
        with pytest.raises(RuntimeError, match=r"Unknown keyword argument|missing value"):
            operator(no_such_keyword=1)


def test_host_tensors_do_not_reach_the_operators(torch_npu: ModuleType) -> None:
    one = request(8)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        torch_npu.npu_fused_infer_attention_score(*(tensor[None] for tensor in one))


def test_recording_tells_operators_and_waits(torch_npu: ModuleType) -> None:
    one = request(8)
    with standin.recording() as calls:
        bsnd(torch_npu, one)
        torch.ones(2).npu().sum().item()
    names = [call.name for call in calls]
    assert names.count("npu::npu_fused_infer_attention_score") == 1
    fused_call = next(call for call in calls if call.name.startswith("npu::"))
    assert fused_call.arguments["input_layout"] == "BSND"
    assert fused_call.arguments["block_size"] == 0
    assert calls[-1].syncs


def test_device_keeps_views_and_factories_honest(torch_npu: ModuleType) -> None:
    base = torch.zeros(2, 3, device="npu")
    base.view(6)[1] = 5
    assert base.cpu().tolist() == [[0, 5, 0], [0, 0, 0]]
    base.cpu().fill_(9)
    assert base.cpu().sum() == 5
    assert torch.arange(4, device="npu").shape == (4,)
    assert base.is_npu
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device="npu:1")
    with pytest.raises(RuntimeError, match="resized"):
        torch.add(base, base, out=torch.empty(0, device="npu"))


def test_uninstalling_leaves_no_torch_npu_behind(torch_npu: ModuleType) -> None:
    standin.uninstall()
    with pytest.raises(ImportError):
        import torch_npu as gone  # noqa: F401
    assert not torch.npu.is_available()
    assert not torch.accelerator.is_available()
    assert standin.install() is not torch_npu
    assert standin.is_standin(standin.install())
    assert torch.npu.is_available()


def test_cpu_autograd_survives_the_stand_in() -> None:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_the_package_says_what_it_is() -> None:
    documentation = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text())) or ""
    assert "Nothing here is Huawei's code" in documentation
    assert "proves nothing about a device" in documentation.replace("\n", " ")

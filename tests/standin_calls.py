"""Calls of the stand-in's operators, and the dense float64 computation to compare them with."""

import math
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

P = 128


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


def naive_merge(states: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The merge somebody would write first: a plain logsumexp over what the operator returned."""
    lse = torch.stack([lse for _, lse in states])
    weights = torch.exp(lse - lse.logsumexp(0))
    return (torch.stack([out.float() for out, _ in states]) * weights[..., None]).sum(0)


def paged_bnsd(torch_npu: ModuleType, batch: Paged, **options: object) -> tuple[Tensor, Tensor]:
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


def finite(batch: Paged) -> Paged:
    return batch._replace(k=batch.k.nan_to_num(1.0), v=batch.v.nan_to_num(1.0))

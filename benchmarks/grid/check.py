"""Whether an answer is right, before it is timed."""

import math

import torch
from torch import Tensor

from splitkv.cli.bench_shapes import Step
from splitkv.common.cache import Cache, DenseCache, PackedCache

MOST_ERROR = 1e-2
"""|a - b| / |b|: bfloat16 attention is off by 2e-3 to 3e-3, a missing split by far more."""


def relative_error(answer: Tensor, wanted: Tensor) -> float:
    """|answer - wanted| / |wanted| in float32; infinite where shapes differ or NaN is in it."""
    if answer.shape != wanted.shape:
        return math.inf
    error = float((answer.float() - wanted.float()).norm() / wanted.float().norm())
    return math.inf if math.isnan(error) else error


def reference_error(step: Step, out: Tensor) -> float:
    """Error of ``out`` [B, H, D] against float32 attention, at the first and the last request that
    are not empty.
    """
    filled = [row for row, length in enumerate(step.shape.lengths) if length]
    requests = sorted({filled[0], filled[-1]})
    wanted = torch.stack([_attention(step, row) for row in requests])
    return relative_error(out[requests], wanted)


def _attention(step: Step, request: int) -> Tensor:
    """[H, D] of one request, float32."""
    k, v = _rows(step.caches[0], request, step.shape.lengths[request])
    q = step.q[request].float().unflatten(0, (step.shape.kv_heads, -1))
    scores = torch.einsum("kgd,tkd->kgt", q, k.float()) * step.shape.dim**-0.5
    return torch.einsum("kgt,tkd->kgd", scores.softmax(-1), v.float()).flatten(0, 1)


def _rows(cache: Cache, request: int, length: int) -> tuple[Tensor, Tensor]:
    """K and V of one request, [L, K, D]."""
    if isinstance(cache, DenseCache):
        return cache.k[request, :length], cache.v[request, :length]
    if isinstance(cache, PackedCache):
        start = int(cache.cu_seqlens_k[request])
        return cache.k[start : start + length], cache.v[start : start + length]
    pages = cache.block_table[request, : -(-length // cache.page_size)].long()
    k, v = (tensor[pages].flatten(0, 1)[:length] for tensor in (cache.k, cache.v))
    return k, v

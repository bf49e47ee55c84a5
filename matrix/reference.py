"""The answer that backends are measured against: dense, one request at a time, as plain as can be.

Shares no code with the backends or with ``common.visibility``. In float64 it is the reference, in a
call's own dtype it is plain eager PyTorch, whose error says what is to be expected (``closeness``).
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind


@dataclass(frozen=True, slots=True)
class Answer:
    """Float64. out: [B, S, H, Dv] or packed [sum of S, H, Dv]; lse: without Dv, natural log."""

    out: Tensor
    lse: Tensor


def reference(
    call: DecodeCall, sinks: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Answer:
    """Attention of ``call`` (host tensors) computed in ``dtype``, sinks [H] included."""
    parts = []
    for request in range(call.batch):
        parts.append(_attend(call, request, sinks, dtype))
    rows = (0, call.spec.num_q_heads)
    outs = [out for out, _ in parts] or [torch.empty(*rows, call.spec.head_dim_v)]
    lses = [lse for _, lse in parts] or [torch.empty(rows)]
    out, lse = torch.cat(outs).double(), torch.cat(lses).double()
    return Answer(out.reshape(*call.rows, call.spec.head_dim_v), lse.reshape(call.rows))


def visible(
    spec: DecodeSpec,
    length: int,
    queries: int,
    mask: Tensor | None = None,
    start: Tensor | int | None = None,
) -> Tensor:
    """Which of a request's ``length`` keys each of its queries sees, bool [queries, length].

    mask: bool [at least queries, n], of the last n positions. start: the first position of all that
    are seen.
    """
    i = torch.arange(length - queries, length)[:, None]
    j = torch.arange(length)[None, :]
    not_later = (j <= i) | (not spec.causal)
    near = torch.tensor(True)
    if spec.sliding_window is not None:  # blocks are compared, not positions: a token is its own
        blocks = spec.sliding_window // spec.window_block
        near = i // spec.window_block - j // spec.window_block < blocks
    seen = (not_later & (near | (j < spec.anchor_tokens))).expand(queries, length).clone()
    if mask is not None:
        n = min(mask.shape[-1], length)
        seen[:, length - n :] &= mask[:queries, mask.shape[-1] - n :]
    if start is not None:
        seen[:, : int(start)] = False
    return seen


def gather(cache: Cache, request: int) -> tuple[Tensor, Tensor]:
    """K and V of one request in logical order, [L, K, D] and [L, K, Dv], one token at a time."""
    length = int(cache.seq_lens[request])
    if isinstance(cache, PackedCache):
        first = int(cache.cu_seqlens_k[request])
        return cache.k[first : first + length], cache.v[first : first + length]
    if isinstance(cache, DenseCache):
        k, v = cache.k[request], cache.v[request]
        if cache.layout is Layout.BNSD:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return k[:length], v[:length]
    keys, values = [], []
    for j in range(length):
        page = int(cache.block_table[request, j // cache.page_size])
        slot = j % cache.page_size
        at = (page, slot) if cache.layout is Layout.NHD else (page, slice(None), slot)
        keys.append(cache.k[at])
        values.append(cache.v[at])
    if not keys:
        heads = cache.num_kv_heads
        return cache.k.new_empty(0, heads, cache.k.shape[-1]), cache.v.new_empty(
            0, heads, cache.v.shape[-1]
        )
    return torch.stack(keys), torch.stack(values)


def _attend(
    call: DecodeCall, request: int, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(out [S, H, Dv], lse [S, H])`` of one request."""
    spec = call.spec
    q = _queries(call, request).to(dtype)
    k, v = gather(call.cache, request)
    if spec.k_scale is ScaleKind.GROUP:
        k, v = _nibbles(k), _nibbles(v)
    k = _values(k, call.k_scale, call.k_zero, spec.k_scale, call.cache, request)
    v = _values(v, call.v_scale, call.v_zero, spec.v_scale, call.cache, request)
    k, v = (x.to(dtype).repeat_interleave(spec.group, 1) for x in (k, v))
    mask, starts = call.attn_mask, call.kv_start
    seen = visible(
        spec,
        len(k),
        len(q),
        None if mask is None else mask[request],
        None if starts is None else starts[request],
    )

    scores = torch.einsum("shd,jhd->hsj", q, k)
    scores = scores.to(torch.promote_types(dtype, torch.float32)) * spec.scale
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    if call.alibi_slopes is not None:
        scores = scores + _alibi(call.alibi_slopes, request, len(q), len(k)).to(scores.dtype)
    if call.attn_bias is not None:
        scores = scores + _bias(call.attn_bias, request, len(q), len(k)).to(scores.dtype)
    scores = scores.masked_fill(~seen, -math.inf)

    logits = scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat([scores, column], -1)
    lse = torch.logsumexp(logits, -1)
    nothing = lse == -math.inf
    weights = torch.exp(scores - torch.where(nothing, 0.0, lse)[..., None])
    return _weighted(weights.to(dtype), v, seen), lse.transpose(0, 1)


def _weighted(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Sum of the values that each query sees, [S, H, Dv]; others are left out, not times 0."""
    if torch.isfinite(v).all():
        return torch.einsum("hsj,jhd->shd", weights, v)
    rows = [
        torch.einsum("hj,jhd->hd", weights[:, t, seen[t]], v[seen[t]]) for t in range(len(seen))
    ]
    return torch.stack(rows)


def _queries(call: DecodeCall, request: int) -> Tensor:
    if call.cu_seqlens_q is None:
        return call.q[request]
    first, last = call.cu_seqlens_q[request : request + 2].tolist()
    return call.q[first:last]


def _nibbles(packed: Tensor) -> Tensor:
    """int4 codes [L, K, D] of bytes [L, K, D / 2]: element d is the half d % 2 of byte d // 2."""
    d = torch.arange(2 * packed.shape[-1])
    return (packed.int()[..., d // 2] >> (4 * (d % 2))) % 16


def _values(
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    kind: ScaleKind | None,
    cache: Cache,
    request: int,
) -> Tensor:
    """(code - zero) * scale of one request, [L, K, D]."""
    if scale is None:
        return codes
    values = codes.double()
    if zero is not None:
        values = values - _of_request(zero, kind, cache, request, codes.shape[-1])
    elif kind is ScaleKind.GROUP:
        values = values - 8
    return values * _of_request(scale, kind, cache, request, codes.shape[-1])


def _of_request(
    numbers: Tensor, kind: ScaleKind | None, cache: Cache, request: int, dim: int
) -> Tensor:
    """Scales or zero points as float64 that broadcasts to [L, K, D], D being ``dim``."""
    if kind is ScaleKind.GROUP:
        groups = gather(replace(cache, k=numbers, v=numbers), request)[0].double()
        return groups.repeat_interleave(dim // max(numbers.shape[-1], 1), -1)
    if kind is ScaleKind.TOKEN:
        column = numbers[..., None]  # laid out like k with a head dim of 1
        return gather(replace(cache, k=column, v=column), request)[0].double()
    if kind is ScaleKind.REQUEST_HEAD:
        numbers = numbers[request]
    return numbers.double() if kind is ScaleKind.CHANNEL else numbers.double()[:, None]


def _alibi(slopes: Tensor, request: int, queries: int, length: int) -> Tensor:
    """slope_h * (j - i), float64 [H, S, L]."""
    of_request = slopes[request] if slopes.ndim == 2 else slopes
    i = length - queries + torch.arange(queries)
    distance = torch.arange(length)[None, :] - i[:, None]
    return of_request.double()[:, None, None] * distance


def _bias(bias: Tensor, request: int, queries: int, length: int) -> Tensor:
    """The bias of the last n positions, 0 before them, float64 [H or 1, S, L]."""
    of_request = bias[request if bias.shape[0] > 1 else 0]
    wide = torch.zeros(of_request.shape[0], queries, length, dtype=torch.float64)
    n = min(of_request.shape[-1], length)
    if n:
        wide[..., length - n :] = of_request[:, :queries, of_request.shape[-1] - n :].double()
    return wide

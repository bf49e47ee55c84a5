"""What other libraries' decode attention computes, written from their documentation in plain
float64 and sharing no code with the library.

Each function takes one request: q [S, H, D], k [T, K, D], v [T, K, Dv]; it returns out [S, H, Dv]
and the natural lse [S, H].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor]


def flashinfer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
) -> Result:
    """variants.cuh: kv_idx + qo_len + window_left >= kv_len + qo_idx; bias before the cap, from
    query index 0.
    """
    qo_len, kv_len = len(q), len(k)
    logits = _dots(q, k) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    kv_idx, qo_idx = torch.arange(kv_len), torch.arange(qo_len)[:, None]
    if alibi:
        heads = q.shape[1]
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
        logits = logits + slopes.double()[:, None, None] * kv_idx
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    visible = kv_idx <= kv_len - qo_len + qo_idx
    if window_left >= 0:
        visible &= kv_idx + qo_len + window_left >= kv_len + qo_idx
    return _attend(logits, visible, v, sinks)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Result:
    """Keys [i + Sk - Sq - left, i + Sk - Sq + right], both ends; bias -slope * |i + Sk - Sq - j|
    after the cap.
    """
    scores = _dots(q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (i - j).abs()
    left, right = window_size
    visible = torch.ones(len(q), len(k), dtype=torch.bool)
    if left >= 0:
        visible &= j >= i - left
    if causal:
        right = 0
    if right >= 0:
        visible &= j <= i + right
    return _attend(scores, visible, v)


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Result:
    """vLLM's Triton kernel: context_len + query_pos - seq_offset < 1 + window_size[0]; ALiBi counts
    from context_len; qq_bias over the new tokens.
    """
    context = len(k) - len(q)
    scores = softmax_scale * _dots(q, k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    offset, query = torch.arange(len(k)), torch.arange(len(q))[:, None]
    visible = offset < context + query + 1
    if window_size[0] >= 0:
        visible &= context + query - offset < 1 + window_size[0]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.double()[:, None, None] * (offset - context)
    if qq_bias is not None:
        scores = scores.clone()
        scores[:, :, context:] += qq_bias.double()
    return _attend(scores, visible, v, sinks)


def fused_infer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    sparse_mode: int = 0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    atten_mask: Tensor | None = None,
    sink: Tensor | None = None,
) -> Result:
    """FIA: True in ``atten_mask`` [S, T] hides; mode 3 aligns a causal mask to the bottom right;
    mode 4 shows i + Skv - Sq - pre <= j <= i + Skv - Sq + next.
    """
    i = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))
    visible = torch.ones(len(q), len(k), dtype=torch.bool)
    if sparse_mode in (0, 1) and atten_mask is not None:
        visible &= ~atten_mask[:, : len(k)]
    if sparse_mode == 3:
        visible &= j <= i
    if sparse_mode == 4:
        visible &= (i - pre_tokens <= j) & (j <= i + next_tokens)
    return _attend(scale * _dots(q, k), visible, v, sink)


def stacked(results: Sequence[Result], *, packed: bool = False) -> Result:
    """[B, S, ...] of all requests, or [T, ...]."""
    join = torch.cat if packed else torch.stack
    outs, lses = zip(*results, strict=True)
    return join(outs), join(lses)


def _dots(q: Tensor, k: Tensor) -> Tensor:
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("shd,thd->hst", q.double(), keys)


def _attend(scores: Tensor, visible: Tensor, v: Tensor, sinks: Tensor | None = None) -> Result:
    heads, steps, _ = scores.shape
    out = torch.zeros(steps, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((steps, heads), -math.inf, dtype=torch.float64)
    values = v.double().repeat_interleave(heads // v.shape[1], 1)
    for h in range(heads):
        for s in range(steps):
            terms = scores[h, s][visible[s]].exp()
            total = terms.sum() + (0.0 if sinks is None else sinks[h].double().exp())
            if total > 0:
                lse[s, h] = total.log()
                out[s, h] = terms @ values[visible[s], h] / total
    return out, lse

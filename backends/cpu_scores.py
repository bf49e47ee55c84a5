"""Scores of one tile: soft cap, ALiBi, bias, and what may be seen."""

import math

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.cpu_work import Strands
from splitkv.common.call import DecodeCall
from splitkv.common.visibility import visible_mask, window_start


def adjust(scores: Tensor, call: DecodeCall, strands: Strands, offset: int) -> Tensor | None:
    """Apply cap, ALiBi, bias and masks to ``scores`` [g, K, S, G, C] in place.

    Returns what may be seen, bool [g, K or 1, S, G or 1, C]; None where every row sees every token.
    """
    spec = call.spec
    if spec.logits_soft_cap is not None:
        scores.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
    tokens = scores.shape[-1]
    seen = None
    if _needs_mask(call, strands, offset, tokens):
        seen = _visible(call, strands, offset, tokens)[:, None, :, None]
    if call.alibi_slopes is not None:
        scores.add_(_alibi(call.alibi_slopes, strands, offset, scores))
    if call.attn_bias is not None:
        bias = _bias(call.attn_bias, strands, offset, scores)
        scores.add_(bias)
        open_ = bias != -math.inf  # a bias of -inf hides: nobody sees that slot, whatever it holds
        seen = open_ if seen is None else seen & open_
    if seen is not None:
        scores.masked_fill_(~seen, -math.inf)
    return seen


def _needs_mask(call: DecodeCall, strands: Strands, offset: int, tokens: int) -> bool:
    """Whether some query of the strands misses some token of this tile; decided on the host."""
    spec = call.spec
    low = strands.start + offset
    high = low + tokens
    masked = high > strands.end
    if call.attn_mask is not None:
        masked = masked | (high > strands.lengths - call.attn_mask.shape[-1])
    if spec.causal and spec.num_queries > 1:
        masked = masked | (high - 1 > strands.position)
    if spec.sliding_window is not None:
        last = strands.position + strands.queries - 1
        masked = masked | (low < window_start(last, spec))
    return bool(masked.any())


def _visible(call: DecodeCall, strands: Strands, offset: int, tokens: int) -> Tensor:
    """bool [g, S, C]."""
    key, query = _positions(strands, offset, tokens)
    seen = (key < torch.from_numpy(strands.end)[:, None]).unsqueeze(1)
    rule = visible_mask(query[:, :, None], key[:, None, :], call.spec)
    if rule is not None:
        seen = seen & rule
    if call.attn_mask is not None:
        n = call.attn_mask.shape[-1]
        column = key - torch.from_numpy(strands.lengths)[:, None] + n
        earlier = (column < 0)[:, None]
        if n:
            step = torch.from_numpy(strands.query)[:, None] + torch.arange(strands.queries)
            request = torch.from_numpy(strands.request)[:, None, None]
            given = call.attn_mask[request, step[:, :, None], column.clamp(0, n - 1)[:, None]]
            seen = seen & (given | earlier)
        else:
            seen = seen & earlier
    return seen.expand(-1, strands.queries, -1)


def _positions(strands: Strands, offset: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Positions of keys [g, C] and queries [g, S]."""
    key = torch.from_numpy(strands.start + offset)[:, None] + torch.arange(tokens)
    query = torch.from_numpy(strands.position)[:, None] + torch.arange(strands.queries)
    return key, query


def _alibi(slopes: Tensor, strands: Strands, offset: int, scores: Tensor) -> Tensor:
    """slope_h * (j - i), [g, K, S, G, C]."""
    _, heads, _, group, tokens = scores.shape
    key, query = _positions(strands, offset, tokens)
    distance = (key[:, None, :] - query[:, :, None]).to(scores.dtype)
    chosen = slopes[torch.from_numpy(strands.request)] if slopes.ndim == 2 else slopes[None]
    chosen = chosen.to(scores.dtype).reshape(-1, heads, group)
    return chosen[:, :, None, :, None] * distance[:, None, :, None, :]


def _bias(bias: Tensor, strands: Strands, offset: int, scores: Tensor) -> Tensor:
    """[g, K or 1, S, G or 1, C]: the bias of each pair, 0 for positions before its columns."""
    _, heads, _, group, tokens = scores.shape
    n = bias.shape[-1]
    column = _positions(strands, offset, tokens)[0] - torch.from_numpy(strands.lengths)[:, None] + n
    request = strands.request if bias.shape[0] > 1 else np.zeros_like(strands.request)
    step = torch.from_numpy(strands.query)[:, None] + torch.arange(strands.queries)
    if not n:
        return scores.new_zeros(len(strands), 1, strands.queries, 1, tokens)
    nearest = column.clamp(0, n - 1)[:, None]
    # indices on both sides of the heads put the heads last: [g, S, C, H or 1]
    picked = bias.transpose(1, 2)[
        torch.from_numpy(request)[:, None, None], step[..., None], :, nearest
    ]
    inside = ((column >= 0) & (column < n))[:, None, :, None]
    picked = torch.where(inside, picked, 0.0).to(scores.dtype)
    shape = (heads, group) if bias.shape[1] > 1 else (1, 1)
    return picked.view(*picked.shape[:3], *shape).permute(0, 3, 1, 4, 2)

"""The published skeleton of a varlen split decode, in plain float64 with its hazards as switches.

A packed batch is cut into a fixed number of splits per request, each split is read in tiles, each
tile serves a block of query heads, and the partial outputs are merged by their LSE. Switched off,
it is right; each switch plants one of the mistakes that such kernels have been seen to make.
"""

import math
from enum import Enum

import torch
from torch import Tensor

from histories import History

TILE = 16
HEAD_BLOCK = 4


class Hazard(Enum):
    NEIGHBOUR = "a tile is read to its end, past the request's last row"
    MULTIPLIED_MASK = "rows past the end get weight 0 and are still multiplied"
    LSE_16_BITS = "the LSE of a partial is stored in 16 bits"
    HEAD_BLOCK = "a block of heads reads the kv head of its first one"
    UNGUARDED = "a split without tokens divides 0 by 0"
    DROPPED_TAIL = "every split has length // splits tokens"


def skeleton(q: Tensor, history: History, splits: int, hazard: Hazard | None = None) -> Tensor:
    """q: [B, H, D]. Returns out [B, H, Dv] in float64."""
    k, v = torch.cat(history.k).double(), torch.cat(history.v).double()
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    start = 0
    for b, length in enumerate(history.lengths):
        for h in range(heads):
            first = h // HEAD_BLOCK * HEAD_BLOCK if hazard is Hazard.HEAD_BLOCK else h
            keys, values = (x[:, first // group] for x in (k, v))
            scale = q.shape[-1] ** -0.5
            parts = [
                _split(q[b, h].double() * scale, keys, values, start, low, high, length, hazard)
                for low, high in _cut(length, splits, hazard)
            ]
            out[b, h] = _merged(parts, hazard)
        start += length
    return out


def _cut(length: int, splits: int, hazard: Hazard | None) -> list[tuple[int, int]]:
    each = length // splits if hazard is Hazard.DROPPED_TAIL else -(-length // splits)
    return [(min(n * each, length), min((n + 1) * each, length)) for n in range(splits)]


def _split(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    low: int,
    high: int,
    length: int,
    hazard: Hazard | None,
) -> tuple[Tensor, Tensor]:
    rows = torch.arange(low, high)
    if hazard in (Hazard.NEIGHBOUR, Hazard.MULTIPLIED_MASK) and high == length and high > low:
        rows = torch.arange(low, low + -(-(high - low) // TILE) * TILE)
    rows = rows[start + rows < len(keys)]
    scores = keys[start + rows] @ q
    if hazard is not Hazard.NEIGHBOUR:
        scores = torch.where(rows < length, scores, -math.inf)
    top = scores.max() if len(rows) else torch.tensor(-math.inf, dtype=torch.float64)
    weights = (scores - top).exp()
    total = weights.sum()
    if total == 0 and hazard is not Hazard.UNGUARDED:
        return torch.zeros(values.shape[-1], dtype=torch.float64), top
    return weights @ values[start + rows] / total, top + total.log()


def _merged(parts: list[tuple[Tensor, Tensor]], hazard: Hazard | None) -> Tensor:
    outs = torch.stack([out for out, _ in parts])
    lse = torch.stack([lse for _, lse in parts])
    if hazard is Hazard.LSE_16_BITS:
        lse = lse.half().double()
    if bool((lse == -math.inf).all()) and hazard is not Hazard.UNGUARDED:
        return torch.zeros_like(outs[0])
    return torch.softmax(lse, 0) @ outs

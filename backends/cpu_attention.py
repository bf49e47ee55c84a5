"""Attention on the CPU: the strands of a plan through matrix products, tile by tile, into states.

Scratch is bounded by the tiles (``cpu_work.OPERAND_BYTES``, ``SCORE_BYTES``), whatever the history.
GQA is never expanded: the query heads of a kv head are rows of one product.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.cpu_scores import adjust
from splitkv.backends.cpu_tiles import SCRATCH, Tiles
from splitkv.backends.cpu_work import SCORE_BYTES, Strands, Work, work_of
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.state import PartialState, merge_states_torch

ROW_STEP = 4
"""More rows than this are padded to its multiple: MKL 2024.2 cuts a lone product of 5 to 7 or 10
rows among threads, but not a batch of them, and then the bits differ."""


def attend(call: DecodeCall, plan: SplitPlan) -> PartialState:
    """The state of all queries, [B, S, H] or [sum of S, H]: the plan's splits, merged in order."""
    spec = call.spec
    wide = torch.float64 in (spec.dtype, spec.cache_dtype)
    dtype = torch.float64 if wide else torch.float32
    work = work_of(call, plan)
    splits = _empty(
        int(work.bounds[-1]) + 1, call, dtype
    )  # the last row stays the state of nothing
    queries = _scaled_queries(call, work, dtype)
    tiles = Tiles.of(call.cache, dtype)
    for strands in work.strands:
        state = _attend(call, strands, queries, tiles)
        for whole, part in zip(_fields(splits), _fields(state), strict=True):
            # [g, K, S, G, ...] to [g * S, H, ...]
            rows = part.transpose(1, 2).reshape(-1, spec.num_q_heads, *part.shape[4:])
            whole.index_copy_(0, strands.state_rows, rows)
    state = _merged(splits, plan, work)
    out = state.out if call.v_scale is None else _scale_values(state.out, call, work)
    result = torch.float64 if spec.dtype is torch.float64 else torch.float32
    return PartialState(
        state.max.to(result).view(call.rows),
        state.lse.to(result).view(call.rows),
        out.to(result).view(*call.rows, spec.head_dim_v),
    )


def _fields(state: PartialState) -> tuple[Tensor, Tensor, Tensor]:
    return state.max, state.lse, state.out


def _empty(rows: int, call: DecodeCall, dtype: torch.dtype) -> PartialState:
    return PartialState.empty((rows, call.spec.num_q_heads), call.spec.head_dim_v, dtype=dtype)


def _scaled_queries(call: DecodeCall, work: Work, dtype: torch.dtype) -> Tensor:
    """Queries times sm_scale and k_scale, [rows, K, G, D]: codes then score like values."""
    spec = call.spec
    shape = (-1, spec.num_kv_heads, spec.group, spec.head_dim)
    q = call.q.to(dtype).mul(spec.scale).reshape(shape)
    return q if call.k_scale is None else q * _row_scale(call.k_scale, work, dtype)


def _scale_values(out: Tensor, call: DecodeCall, work: Work) -> Tensor:
    """``out`` [rows, H, Dv] of codes turned into that of values."""
    assert call.v_scale is not None
    by_head = out.view(-1, call.spec.num_kv_heads, call.spec.group, call.spec.head_dim_v)
    return (by_head * _row_scale(call.v_scale, work, out.dtype)).view_as(out)


def _row_scale(scale: Tensor, work: Work, dtype: torch.dtype) -> Tensor:
    """[1 or rows, 1 or K, 1, 1]."""
    rows = scale[torch.from_numpy(work.request)] if scale.ndim == 2 else scale[None]
    return rows.to(dtype)[..., None, None]


def _merged(splits: PartialState, plan: SplitPlan, work: Work) -> PartialState:
    """Splits merged in their order; the state of nothing fills up what a request has fewer."""
    count = np.diff(plan.indptr)
    if (count == 1).all():
        return splits[:-1]
    parts = []
    for index in range(max(plan.max_splits, 1)):
        split = np.minimum(plan.indptr[:-1] + index, plan.num_splits)[work.request]
        there = index < count[work.request]
        row = torch.from_numpy(np.where(there, work.bounds[split] + work.step, work.bounds[-1]))
        parts.append(PartialState(splits.max[row], splits.lse[row], splits.out[row]))
    return merge_states_torch(parts)


def _attend(call: DecodeCall, strands: Strands, queries: Tensor, tiles: Tiles) -> PartialState:
    """The states of the strands, [g, K, S, G]."""
    spec, steps = call.spec, strands.queries
    q = queries[strands.query_rows].unflatten(0, (-1, steps)).transpose(1, 2)  # [g, K, S, G, D]
    q = _pad_rows(q.flatten(2, 3))
    pile = _Pile.empty(q, strands, spec.head_dim_v)
    for offset in range(0, strands.padded, strands.tile):
        _attend_tile(call, strands, offset, q, tiles, pile)
    state = pile.folded()
    rows, shape = steps * spec.group, (steps, spec.group)
    return PartialState(*(x[:, :, :rows].unflatten(2, shape) for x in _fields(state)))


def _attend_tile(
    call: DecodeCall, strands: Strands, offset: int, q: Tensor, tiles: Tiles, pile: "_Pile"
) -> None:
    """Adds the state of the tile at ``offset`` to ``pile``. q: [g, K, R, D] with R rows padded."""
    tokens = min(strands.tile, strands.padded - offset)
    shape = (strands.queries, call.spec.group)
    rows = shape[0] * shape[1]
    places = tiles.locate(strands, offset, tokens)
    scores = SCRATCH.take("scores", (*q.shape[:3], tokens), q.dtype)
    _product(q, tiles.read_key(places).transpose(2, 3), scores)
    seen = adjust(scores[:, :, :rows].unflatten(2, shape), call, strands, offset)
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    weight = scores.amax(-1)  # of the largest score: exp(0) / sum
    if seen is not None:
        nothing = top == -math.inf
        scores.masked_fill_(nothing[..., None], 0.0)
        weight.masked_fill_(nothing, 1.0)
    value = tiles.read_value(places)
    if seen is not None:
        _clear_unseen(value, seen)
    out = pile.push(top, top - weight.log_())
    _product(scores, value, out)
    if seen is not None and rows > 1 and not bool(torch.isfinite(out).all()):
        _keep_apart(out, scores, value, seen, shape)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left @ right`` for [g, K, R, X] and [g, K, X, Y] into contiguous ``out``; no copies."""
    count, heads = left.shape[:2]
    if count == 1 or heads == 1 or right.stride(0) == heads * right.stride(1):
        torch.bmm(_joined(left), _joined(right), out=_joined(out))
    elif count <= heads:
        for index in range(count):
            torch.bmm(left[index], right[index], out=out[index])
    else:
        for head in range(heads):
            torch.bmm(left[:, head], right[:, head], out=out[:, head])


def _joined(x: Tensor) -> Tensor:
    """The two leading dimensions as one; a view."""
    return x.view(-1, *x.shape[2:])


def _pad_rows(q: Tensor) -> Tensor:
    """q [g, K, R, D] with zero rows up to a multiple of ``ROW_STEP``, contiguous."""
    rows = q.shape[2]
    if rows <= ROW_STEP or rows % ROW_STEP == 0:
        return q.contiguous()
    return torch.nn.functional.pad(q, (0, 0, 0, -rows % ROW_STEP))


def _clear_unseen(value: Tensor, seen: Tensor) -> None:
    """Zero the rows of ``value`` [g, K, C, Dv] that no query sees: 0 does not hide NaN or inf."""
    hidden = ~seen.flatten(1, 3).any(1)
    strand, token = torch.nonzero(hidden, as_tuple=True)
    if strand.numel():
        value[strand, :, token] = 0.0


def _keep_apart(
    out: Tensor, weights: Tensor, value: Tensor, seen: Tensor, shape: tuple[int, int]
) -> None:
    """Redo ``out`` where a weight of 0 met a value that is not finite: only rows that see its token
    take it."""
    rows = shape[0] * shape[1]
    finite = torch.isfinite(value)
    _product(weights, torch.where(finite, value, 0.0), out)
    by_query = out[:, :, :rows].unflatten(2, shape)  # [g, K, S, G, Dv]
    weight = weights[:, :, :rows].unflatten(2, shape)
    seen = seen.expand(-1, value.shape[1], -1, shape[1], -1)
    for strand, token in torch.nonzero(~finite.all(-1).all(1)).tolist():
        row = torch.where(finite[strand, :, token], 0.0, value[strand, :, token])
        part = weight[strand, ..., token, None] * row[:, None, None]
        by_query[strand] += torch.where(seen[strand, ..., token, None], part, 0.0)


@dataclass(slots=True)
class _Pile:
    """States of successive tiles, merged when it is full and at the end.

    max, lse: [slots, g, K, R]; out: [slots, g, K, R, Dv].
    """

    max: Tensor
    lse: Tensor
    out: Tensor
    used: int = 0

    @classmethod
    def empty(cls, q: Tensor, strands: Strands, head_dim_v: int) -> "_Pile":
        shape = q.shape[:3]
        tiles = -(-strands.padded // strands.tile)
        fitting = SCORE_BYTES // (math.prod(shape) * head_dim_v * q.itemsize)
        slots = min(tiles, max(fitting, 2))
        return cls(
            q.new_empty(slots, *shape),
            q.new_empty(slots, *shape),
            q.new_empty(slots, *shape, head_dim_v),
        )

    def push(self, top: Tensor, lse: Tensor) -> Tensor:
        """Takes max and lse of the next tile; returns where its output goes."""
        if self.used == len(self.max):
            state = self.folded()
            for whole, part in zip((self.max, self.lse, self.out), _fields(state), strict=True):
                whole[0] = part
            self.used = 1
        self.max[self.used], self.lse[self.used] = top, lse
        self.used += 1
        return self.out[self.used - 1]

    def folded(self) -> PartialState:
        """The state of all tiles so far."""
        if self.used == 1:
            return PartialState(self.max[0], self.lse[0], self.out[0])
        lse = self.lse[: self.used]
        top = lse.amax(0)
        nothing = top == -math.inf
        weights = torch.exp(lse - torch.where(nothing, 0.0, top))
        total = weights.sum(0)
        out = (self.out[: self.used] * weights[..., None]).sum(0)
        return PartialState(
            self.max[: self.used].amax(0),
            torch.where(nothing, top, top + torch.log(total)),
            out / torch.where(nothing, 1.0, total)[..., None],
        )

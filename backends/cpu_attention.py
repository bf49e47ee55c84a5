"""Attention on the CPU: the strands of a plan through matrix products, tile by tile, into states.

Scratch is bounded by the tiles (``cpu_work.OPERAND_BYTES``, ``SCORE_BYTES``), whatever the history.
GQA is never expanded: the query heads of a kv head are rows of one product.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.cpu_scores import adjust
from splitkv.backends.cpu_sums import Pile, Sums, log_sum
from splitkv.backends.cpu_tiles import SCRATCH, Tiles
from splitkv.backends.cpu_whole import attend_whole
from splitkv.backends.cpu_work import PIECE_TOKENS, Strands, Work, work_of
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.state import PartialState, merge_states_torch

ROW_STEP = 4
"""Rows are padded to its multiple. MKL 2024.2 cuts a lone product of 5 to 7 or 10 rows among
threads but not a batch of them, and torch's kernel takes 1 or 3 rows differently thread by thread:
the bits would depend on the batch."""


def attend(call: DecodeCall, plan: SplitPlan) -> PartialState:
    """The state of all queries, [B, S, H] or [sum of S, H]: the plan's splits, merged in order."""
    spec = call.spec
    wide = torch.float64 in (spec.dtype, spec.cache_dtype)
    tiles = Tiles.of(call, torch.float64 if wide else torch.float32)
    work = work_of(call, plan)
    queries = _queries(call, work, tiles)
    if work.direct:
        top, total, out = _attend(call, work.strands[0], queries, tiles).parts
        lse = log_sum(top, total)
    else:
        # the last row stays the state of nothing
        splits = Sums.nothing((work.state_rows + 1, spec.num_q_heads), spec.head_dim_v, tiles.dtype)
        for strands in work.strands:
            sums = _attend(call, strands, queries, tiles)
            for whole, part in zip(splits.parts, sums.parts, strict=True):
                whole[strands.state_rows] = part
        state = splits.state()[:-1] if work.single else _merged(splits.state(), plan, work)
        top, lse, out = state.max, state.lse, state.out
    if call.v_scale is not None and tiles.value_codes is None:
        out = _scale_values(out, call, work)
    dtype = torch.float64 if spec.dtype is torch.float64 else torch.float32
    shape = call.rows
    return PartialState(
        top.to(dtype).view(shape),
        lse.to(dtype).view(shape),
        out.to(dtype).view(*shape, spec.head_dim_v),
    )


def _queries(call: DecodeCall, work: Work, tiles: Tiles) -> Tensor:
    """Queries, times k_scale where tiles of K are codes, which then score like values; [rows, K, G,
    D]."""
    spec, dtype = call.spec, tiles.dtype
    shape = (-1, spec.num_kv_heads, spec.group, spec.head_dim)
    q = call.q.to(dtype).reshape(shape)
    if call.k_scale is None or tiles.key_codes is not None:
        return q
    return q * _row_scale(call.k_scale, work, dtype)


def _scale_values(out: Tensor, call: DecodeCall, work: Work) -> Tensor:
    """``out`` [rows, H, Dv] of codes turned into that of values."""
    assert call.v_scale is not None
    by_head = out.view(-1, call.spec.num_kv_heads, call.spec.group, call.spec.head_dim_v)
    return (by_head * _row_scale(call.v_scale, work, out.dtype)).view_as(out)


def _row_scale(scale: Tensor, work: Work, dtype: torch.dtype) -> Tensor:
    """[1 or rows, 1 or K, 1, 1]."""
    rows = scale[torch.from_numpy(work.request)] if scale.ndim == 2 else scale[None]
    return rows.to(dtype)[..., None, None]


def _merged(states: PartialState, plan: SplitPlan, work: Work) -> PartialState:
    """Splits merged in their order; the state of nothing fills up what a request has fewer."""
    count = np.diff(plan.indptr)
    parts = []
    for index in range(max(plan.max_splits, 1)):
        split = np.minimum(plan.indptr[:-1] + index, plan.num_splits)[work.request]
        there = index < count[work.request]
        row = torch.from_numpy(np.where(there, work.bounds[split] + work.step, work.bounds[-1]))
        parts.append(PartialState(states.max[row], states.lse[row], states.out[row]))
    return merge_states_torch(parts)


def _attend(call: DecodeCall, strands: Strands, queries: Tensor, tiles: Tiles) -> Sums:
    """What the strands leave behind, [g * S, H]."""
    spec = call.spec
    q = _rows_of_heads(queries[strands.query_rows], strands.queries)
    pile = Pile()
    for cut in strands.cuts:
        for offset in range(cut.offset, cut.offset + cut.tokens, strands.tile):
            tokens = min(strands.tile, cut.offset + cut.tokens - offset)
            if not cut.whole:
                places = tiles.locate(strands, offset, tokens)
                key, value = tiles.read(places, strands.request)
                pile.add(_attend_seen(call, strands, offset, q, key, value))
                continue
            for first, pieces, length in _pieces(strands, offset, tokens):
                places = tiles.locate(strands, first, length, pieces)
                key, value = tiles.read(places, strands.request)
                pile.add(attend_whole(q, key, value, spec.scale))
    return pile.merged().map(lambda part: _heads_of_rows(part, strands.queries, spec.group))


def _pieces(strands: Strands, offset: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(offset, pieces, tokens of each): a long run in even pieces and a rest, a short one whole."""
    even = 0 if strands.short else tokens // PIECE_TOKENS
    rest = tokens - even * PIECE_TOKENS
    if even:
        yield offset, even, PIECE_TOKENS
    if rest:
        yield offset + even * PIECE_TOKENS, 1, rest


def _rows_of_heads(queries: Tensor, steps: int) -> Tensor:
    """[g * S, K, G, D] as [g, K, R, D], contiguous: rows are the queries and their heads of a kv
    head, then zeros up to a multiple of ``ROW_STEP``."""
    _, heads, group, dim = queries.shape
    if steps > 1:
        queries = queries.view(-1, steps, heads, group, dim).transpose(1, 2)
        queries = queries.reshape(-1, heads, steps * group, dim)
    missing = -queries.shape[2] % ROW_STEP
    padded = torch.nn.functional.pad(queries, (0, 0, 0, missing)) if missing else queries
    return padded.contiguous()  # pad keeps the order of strides


def _heads_of_rows(part: Tensor, steps: int, group: int) -> Tensor:
    """[g, K, R, ...] as [g * S, H, ...]."""
    count, heads, _, *rest = part.shape
    part = part[:, :, : steps * group]
    if steps > 1:
        part = part.unflatten(2, (steps, group)).transpose(1, 2)
    return part.reshape(count * steps, heads * group, *rest)


def _attend_seen(
    call: DecodeCall, strands: Strands, offset: int, q: Tensor, key: Tensor, value: Tensor
) -> Sums:
    """Every feature, [1, g, K, R]. q: [g, K, R, D] with R rows padded; key, value: scratch."""
    shape = (strands.queries, call.spec.group)
    rows = shape[0] * shape[1]
    scores = SCRATCH.take("scores", (*q.shape[:3], key.shape[2]), q.dtype)
    _product(q, key.transpose(2, 3), scores)
    scores.mul_(call.spec.scale)
    seen = adjust(scores[:, :, :rows].unflatten(2, shape), call, strands, offset)
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    total = scores.amax(-1).reciprocal_()  # the largest weight is exp(0) / sum
    if seen is not None:
        nothing = top == -math.inf
        scores.masked_fill_(nothing[..., None], 0.0)
        total.masked_fill_(nothing, 0.0)
        _clear_unseen(value, seen)
    out = q.new_empty(*q.shape[:3], value.shape[-1])
    _product(scores, value, out)
    # padded rows are not masked and may hold what an earlier call left in the scratch
    if seen is not None and rows > 1 and not bool(torch.isfinite(out[:, :, :rows]).all()):
        _keep_apart(out, scores, value, seen, shape)
    return Sums(top[None], total[None], out[None])


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
    given = value.clone()
    value.masked_fill_(~finite, 0.0)  # in place: in other memory the product has other bits
    _product(weights, value, out)
    by_query = out[:, :, :rows].unflatten(2, shape)  # [g, K, S, G, Dv]
    weight = weights[:, :, :rows].unflatten(2, shape)
    seen = seen.expand(-1, value.shape[1], -1, shape[1], -1)
    for strand, token in torch.nonzero(~finite.all(-1).all(1)).tolist():
        row = torch.where(finite[strand, :, token], 0.0, given[strand, :, token])
        part = weight[strand, ..., token, None] * row[:, None, None]
        by_query[strand] += torch.where(seen[strand, ..., token, None], part, 0.0)

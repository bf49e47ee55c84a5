"""What the CPU has to do for a plan: strands, and which tokens of each every query sees.

A strand is one split seen by a chunk of its request's queries. Long ones stand alone; short ones of
equal shape go together, so that one batched product serves many requests. How a strand is padded
and cut follows from itself, never from its neighbours: so a request's bits do not depend on its
batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import INT4, SMALLEST_GROUP, DecodeSpec, ScaleKind
from splitkv.common.visibility import IntArray, as_lengths, visible_bounds, window_start

ROW_PADDING = 16
"""Elements between token rows of a tile, so that the same column of each falls into another set."""
OPERAND_BYTES = 4 << 20
"""Scratch for one tile of K or V: small enough for the caches of two or more cores."""
SCORE_BYTES = 8 << 20
"""Scratch for the scores of one tile."""
QUERY_ROWS = 8192
"""Most (query, head) rows of a strand; longer query ranges are cut into chunks."""
PAD_TOKENS = 64
"""Short strands are padded to a multiple of this, so that similar ones share a product."""
SHORT_TOKENS = 512
"""Strands of more tokens than this stand alone. Also what torch's kernel blocks its keys by."""
PIECE_TOKENS = 256
"""Long runs of plain tokens are cut into such pieces, for threads to share: torch shares out both
the copy of a tile and the kernel by pieces first, so a thread computes with what it has copied
itself. On a machine whose two cores seemed to have no cache in common, anything else took up to
three times as long."""


class Cut(NamedTuple):
    """``tokens`` tokens of a strand from ``offset`` on; whole: every query sees each of them, and
    scores are plain."""

    offset: int
    tokens: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Strands:
    """One strand, or several short ones of one shape: ``queries`` queries each, read in ``cuts``
    and in tiles of at most ``tile`` tokens.

    request, start, end: int64 [g], positions [start, end) of that request. query: [g], index of the
    first query in its request; position: [g], its position; query_rows, state_rows: the g * queries
    rows among all queries and among all states. lengths: [g].
    """

    queries: int
    cuts: list[Cut]
    tile: int
    request: IntArray
    start: IntArray
    end: IntArray
    query: IntArray
    position: IntArray
    lengths: IntArray
    query_rows: slice | Tensor
    state_rows: slice | Tensor

    def __len__(self) -> int:
        return len(self.request)

    @property
    def short(self) -> bool:
        return int(self.end[0] - self.start[0]) <= SHORT_TOKENS


@dataclass(frozen=True, slots=True)
class Work:
    """All strands of a plan for given lengths (int64 [B]), query counts and ``kv_start`` ([B]).

    bounds: [N + 1], where each split's states begin when states lie split by split, state_rows in
    all. request, step: [rows], request and index within it of each query row. single: every request
    has one split; direct: besides, one group of strands gives the states of all rows.
    """

    lengths: IntArray
    counts: IntArray
    starts: IntArray
    strands: list[Strands]
    bounds: IntArray
    state_rows: int
    request: IntArray
    step: IntArray
    single: bool
    direct: bool


def work_of(call: DecodeCall, plan: SplitPlan) -> Work:
    """The work for ``call``; kept with the plan, so that the layers of a step share it."""
    lengths, counts = as_lengths("seq_lens", call.cache.seq_lens), _query_counts(call)
    starts = np.zeros_like(lengths)
    if call.kv_start is not None:
        starts = as_lengths("kv_start", call.kv_start)
    columns = 0 if call.attn_mask is None else call.attn_mask.shape[-1]
    key = ("work of the cpu backend", call.spec, columns)
    known = plan.bound.get(key)
    facts = (lengths, counts, starts)
    if isinstance(known, Work) and all(
        map(_same, (known.lengths, known.counts, known.starts), facts)
    ):
        return known
    request = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    bounds = np.concatenate(([0], np.cumsum(counts[plan.request[: plan.num_splits]])))
    groups = list(_strands(call.spec, plan, columns, *facts, first, bounds))
    step = np.arange(len(request)) - first[request]
    single = bool((np.diff(plan.indptr) == 1).all())
    direct = single and len(groups) == 1 and groups[0].state_rows == slice(0, len(request))
    rows = int(bounds[-1])
    work = Work(*facts, groups, bounds, rows, request, step, single, direct)
    plan.bound[key] = work
    return work


def tile_tokens(spec: DecodeSpec, queries: int) -> int:
    """Tokens of a tile: what the scratch holds, in whole pieces if one fits."""
    width = 8 if torch.float64 in (spec.dtype, spec.cache_dtype) else 4
    per_token = spec.num_kv_heads * max(spec.head_dim, spec.head_dim_v) * width
    scores = queries * spec.num_q_heads * width
    tokens = OPERAND_BYTES // per_token
    tokens = max(tokens, min(SHORT_TOKENS, 2 * tokens))
    tokens = min(tokens, SCORE_BYTES // scores)
    unit = PIECE_TOKENS if tokens >= PIECE_TOKENS else PAD_TOKENS
    return max(tokens // unit, 1) * unit


def scratch_bytes(spec: DecodeSpec) -> int:
    """Bytes that a thread keeps for calls with ``spec``, rounded up.

    Up to twice ``OPERAND_BYTES`` each for tiles of K and V and for gathered rows, and
    ``SCORE_BYTES``; more where ``PAD_TOKENS`` tokens of all heads are larger than that, and where
    scales and zero points of a tile's tokens are read beside it, and bytes of int4 codes.
    """
    steps = min(spec.num_queries, max(QUERY_ROWS // spec.num_q_heads, 1))
    width = 8 if torch.float64 in (spec.dtype, spec.cache_dtype) else 4
    tokens = tile_tokens(spec, 1)
    row = spec.num_kv_heads * max(spec.head_dim, spec.head_dim_v) * width
    scores = tile_tokens(spec, steps) * steps * spec.num_q_heads * width
    numbers = 0
    for kind, zero, dim in (
        (spec.k_scale, spec.k_zero, spec.head_dim),
        (spec.v_scale, spec.v_zero, spec.head_dim_v),
    ):
        if kind in (ScaleKind.TOKEN, ScaleKind.GROUP):
            each = 1 if kind is ScaleKind.TOKEN else dim // SMALLEST_GROUP
            numbers += (1 + zero) * tokens * (spec.num_kv_heads * each + ROW_PADDING) * width
        if spec.cache_dtype == INT4:
            numbers += tokens * (spec.num_kv_heads * dim // 2 + ROW_PADDING) * width
    return 3 * tokens * row + numbers + max(scores, SCORE_BYTES)


def _query_counts(call: DecodeCall) -> IntArray:
    if call.cu_seqlens_q is None:
        return np.full(call.batch, call.spec.num_queries)
    return np.diff(as_lengths("cu_seqlens_q", call.cu_seqlens_q))


def _same(left: IntArray, right: IntArray) -> bool:
    return bool(np.array_equal(left, right))


def _split_ranges(
    plan: SplitPlan, lengths: IntArray, starts: IntArray
) -> tuple[IntArray, IntArray]:
    """``(start, end)`` of every split for lengths that may be shorter than planned, and histories
    that begin at ``starts``; int64 [N].
    """
    count = plan.num_splits
    request = plan.request[:count]
    anchor_end, window_start = visible_bounds(lengths, plan.spec.num_queries, plan.spec)
    opens = plan.window_first[:count]
    start = plan.start[:count].astype(np.int64)
    start = np.where(opens, np.minimum(start, window_start[request]), start)
    end = np.minimum(plan.end[:count], lengths[request])
    anchor = ~opens & (np.arange(count) == plan.indptr[request])
    end = np.where(anchor, np.minimum(end, anchor_end[request]), end)
    start = np.maximum(start, starts[request])
    return start, np.maximum(end, start)


def _strands(
    spec: DecodeSpec,
    plan: SplitPlan,
    columns: int,
    lengths: IntArray,
    counts: IntArray,
    starts: IntArray,
    first: IntArray,
    bounds: IntArray,
) -> Iterator[Strands]:
    """All strands with something to read, alone or in groups whose tiles fit the scratch."""
    start, end = _split_ranges(plan, lengths, starts)
    request = plan.request[: plan.num_splits].astype(np.int64)
    chunk = max(QUERY_ROWS // spec.num_q_heads, 1)
    split, query = _query_chunks(counts[request], end > start, chunk)
    request, start, end = request[split], start[split], end[split]
    queries = np.minimum(counts[request] - query, chunk)
    position = lengths[request] - counts[request] + query
    low, high = _whole(spec, columns, start, end, position, queries, lengths[request])
    tokens = end - start
    padded = -(-tokens // PAD_TOKENS) * PAD_TOKENS
    tile = np.array([tile_tokens(spec, steps) for steps in queries.tolist()], dtype=np.int64)
    whole = (low == start) & (high == end)
    length = np.where(whole, tokens, padded)
    together = padded <= SHORT_TOKENS
    alone = np.where(together & (length <= tile), 0, np.arange(len(split)) + 1)
    phase = start % (spec.page_size or 1)
    for members in _equal(alone, queries, length, whole, phase):
        lead, steps = members[0], int(queries[members[0]])
        cuts = [Cut(0, int(length[lead]), bool(whole[lead]))]
        if alone[lead]:
            cuts = _cuts(int(tokens[lead]), *((x - start)[lead].item() for x in (low, high)))
        size = max(int(tile[lead] // length[lead]), 1)
        for pick in (members[at : at + size] for at in range(0, len(members), size)):
            yield Strands(
                steps,
                cuts,
                int(tile[lead]),
                request[pick],
                start[pick],
                end[pick],
                query[pick],
                position[pick],
                lengths[request[pick]],
                _rows(first[request[pick]] + query[pick], steps),
                _rows(bounds[split[pick]] + query[pick], steps),
            )


def _whole(
    spec: DecodeSpec,
    columns: int,
    start: IntArray,
    end: IntArray,
    position: IntArray,
    queries: IntArray,
    length: IntArray,
) -> tuple[IntArray, IntArray]:
    """Positions [low, high) that all queries of a strand see; none if scores are not plain."""
    low, high = start, end
    if spec.causal and spec.num_queries > 1:
        high = np.minimum(high, position + 1)
    if columns:
        high = np.minimum(high, length - columns)
    if spec.sliding_window is not None:
        nearest = np.maximum(low, window_start(position + queries - 1, spec))
        low = np.where(end <= spec.anchor_tokens, start, nearest)
    plain = not (spec.alibi or spec.attn_bias or spec.logits_soft_cap is not None)
    plain = plain and spec.head_dim == spec.head_dim_v
    plain = plain and torch.float64 not in (spec.dtype, spec.cache_dtype)
    usable = (high - low >= PAD_TOKENS) & plain
    return np.where(usable, low, start), np.where(usable, high, start)


def _cuts(tokens: int, low: int, high: int) -> list[Cut]:
    """Of a strand with whole tokens [low, high); none where these are equal."""
    if low == high:
        return [Cut(0, tokens, False)]
    cuts = [Cut(0, low, False), Cut(low, high - low, True), Cut(high, tokens - high, False)]
    return [cut for cut in cuts if cut.tokens]


def _rows(first: IntArray, steps: int) -> slice | Tensor:
    """Rows first, ..., first + steps - 1 of each strand: a slice where they follow each other."""
    if (np.diff(first) == steps).all():
        return slice(int(first[0]), int(first[-1]) + steps)
    return torch.from_numpy((first[:, None] + np.arange(steps)).reshape(-1))


def _query_chunks(
    counts: IntArray, busy: npt.NDArray[np.bool_], chunk: int
) -> tuple[IntArray, IntArray]:
    """Split and first query of each chunk of queries, for splits that have work."""
    pieces = np.where(busy, -(-counts // chunk), 0)
    split = np.repeat(np.arange(len(counts)), pieces)
    first = np.cumsum(pieces) - pieces
    return split, (np.arange(len(split)) - first[split]) * chunk


def _equal(*keys: IntArray) -> Iterator[IntArray]:
    """Indices of equal key tuples together, in rising order within each."""
    if len(keys[0]) == 0:
        return
    _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(group.reshape(-1)[order])) + 1)

"""What the CPU has to do for a plan: strands of equal shape, so that one batched product serves
many requests.

A strand is one split seen by a chunk of its request's queries. How it is cut and padded follows
from that strand alone, never from its neighbours: so a request's bits do not depend on its batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.visibility import IntArray, as_lengths, visible_bounds

OPERAND_BYTES = 4 << 20
"""Scratch for one tile of K or V: small enough for the caches of two or more cores."""
SCORE_BYTES = 8 << 20
"""Scratch for the scores of one tile."""
QUERY_ROWS = 8192
"""Most (query, head) rows of a strand; longer query ranges are cut into chunks."""
PAD_TOKENS = 64
"""Strands are padded to a multiple of this, so that those of similar length share a product."""


@dataclass(frozen=True, slots=True)
class Strands:
    """Strands of one shape: ``queries`` queries and at most ``padded`` tokens each, read in tiles
    of ``tile`` tokens.

    request, start, end: int64 [g], positions [start, end) of that request. query: [g], index of the
    first query in its request; position: [g], its position; query_rows, state_rows: [g * queries],
    rows among all queries and among all states. lengths: [g].
    """

    queries: int
    padded: int
    tile: int
    request: IntArray
    start: IntArray
    end: IntArray
    query: IntArray
    position: IntArray
    lengths: IntArray
    query_rows: Tensor
    state_rows: Tensor

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class Work:
    """All strands of a plan for given lengths (int64 [B]) and query counts ([B]).

    bounds: [N + 1], where each split's states begin when states lie split by split. request, step:
    [rows], request and index within it of each query row.
    """

    lengths: IntArray
    counts: IntArray
    strands: list[Strands]
    bounds: IntArray
    request: IntArray
    step: IntArray


def work_of(call: DecodeCall, plan: SplitPlan) -> Work:
    """The work for ``call``; kept with the plan, so that the layers of a step share it."""
    lengths, counts = as_lengths("seq_lens", call.cache.seq_lens), _query_counts(call)
    key = ("work of the cpu backend", call.spec.dtype)
    known = plan.bound.get(key)
    if isinstance(known, Work) and _same(known.lengths, lengths) and _same(known.counts, counts):
        return known
    request = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    bounds = np.concatenate(([0], np.cumsum(counts[plan.request[: plan.num_splits]])))
    groups = list(_strands(call.spec, plan, lengths, counts, first, bounds))
    work = Work(lengths, counts, groups, bounds, request, np.arange(len(request)) - first[request])
    plan.bound[key] = work
    return work


def tile_tokens(spec: DecodeSpec, queries: int) -> int:
    """Tokens of a tile: what the scratch holds, a multiple of ``PAD_TOKENS``."""
    width = 8 if torch.float64 in (spec.dtype, spec.cache_dtype) else 4
    per_token = spec.num_kv_heads * max(spec.head_dim, spec.head_dim_v) * width
    scores = queries * spec.num_q_heads * width
    tokens = min(OPERAND_BYTES // per_token, SCORE_BYTES // scores)
    return max(tokens // PAD_TOKENS, 1) * PAD_TOKENS


def scratch_bytes(spec: DecodeSpec) -> int:
    """Bytes that a thread keeps for calls with ``spec``, rounded up.

    ``OPERAND_BYTES`` each for a tile and for gathered rows, and ``SCORE_BYTES``; more where
    ``PAD_TOKENS`` tokens of all heads are larger than that.
    """
    steps = min(spec.num_queries, max(QUERY_ROWS // spec.num_q_heads, 1))
    width = 8 if torch.float64 in (spec.dtype, spec.cache_dtype) else 4
    tokens = tile_tokens(spec, 1)
    row = spec.num_kv_heads * max(spec.head_dim, spec.head_dim_v) * width
    scores = tile_tokens(spec, steps) * steps * spec.num_q_heads * width
    return 2 * tokens * row + max(scores, SCORE_BYTES)


def _query_counts(call: DecodeCall) -> IntArray:
    if call.cu_seqlens_q is None:
        return np.full(call.batch, call.spec.num_queries)
    return np.diff(as_lengths("cu_seqlens_q", call.cu_seqlens_q))


def _same(left: IntArray, right: IntArray) -> bool:
    return bool(np.array_equal(left, right))


def _split_ranges(plan: SplitPlan, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """``(start, end)`` of every split for lengths that may be shorter than planned; int64 [N]."""
    count = plan.num_splits
    request = plan.request[:count]
    anchor_end, window_start = visible_bounds(lengths, plan.spec.num_queries, plan.spec)
    opens = plan.window_first[:count]
    start = plan.start[:count].astype(np.int64)
    start = np.where(opens, np.minimum(start, window_start[request]), start)
    end = np.minimum(plan.end[:count], lengths[request])
    anchor = ~opens & (np.arange(count) == plan.indptr[request])
    end = np.where(anchor, np.minimum(end, anchor_end[request]), end)
    return start, np.maximum(end, start)


def _strands(
    spec: DecodeSpec,
    plan: SplitPlan,
    lengths: IntArray,
    counts: IntArray,
    first: IntArray,
    bounds: IntArray,
) -> Iterator[Strands]:
    """All strands with something to read, grouped by shape; a group's tiles fit the scratch."""
    start, end = _split_ranges(plan, lengths)
    request = plan.request[: plan.num_splits].astype(np.int64)
    chunk = max(QUERY_ROWS // spec.num_q_heads, 1)
    split, query = _query_chunks(counts[request], end > start, chunk)
    request, start, end = request[split], start[split], end[split]
    queries = np.minimum(counts[request] - query, chunk)
    padded = -(-(end - start) // PAD_TOKENS) * PAD_TOKENS
    phase = start % (spec.page_size or 1)
    for members in _equal(queries, padded, phase):
        steps, length = int(queries[members[0]]), int(padded[members[0]])
        tile = tile_tokens(spec, steps)
        size = max(tile // length, 1)
        for low in range(0, len(members), size):
            pick = members[low : low + size]
            mine = request[pick]
            yield Strands(
                steps,
                length,
                tile,
                mine,
                start[pick],
                end[pick],
                query[pick],
                lengths[mine] - counts[mine] + query[pick],
                lengths[mine],
                _rows(first[mine] + query[pick], steps),
                _rows(bounds[split[pick]] + query[pick], steps),
            )


def _rows(first: IntArray, steps: int) -> Tensor:
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

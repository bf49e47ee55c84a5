"""Masks turned into lengths: which queries see which whole ranges of keys.

The fused-infer operators take one mask mode per call, drop windows on some layouts, and multiply
hidden values by 0 (a NaN there would survive). So no mask is handed over: every split is cut into
pieces, and all queries of a piece see all keys of it.

    keys      0   1 | 2   3 | 4   5 | 6   7     window of 4, three queries at 5, 6 and 7, pages of 2
    query 0           h   h   m   m             h: head, one query, may start inside a page
    query 1               h   m   m   t         m: middle, shared by the queries, starts on a page
    query 2                   m   m   t   t     t: tail, one query, starts on a page

Heads start inside a page, where no block table can point; there are fewer than a page's tokens and
S of them per query, and they are copied out. Everything else is read where it lies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.visibility import IntArray, window_start


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries [first, first + count) of ``request`` see the keys [start, end), all of them."""

    request: int
    first: int
    count: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def whole_causal_pieces(lengths: Sequence[int], counts: Sequence[int]) -> list[Piece]:
    """One piece per request for the one case that does take the operator's own causal mask
    (bottom-right aligned).

    lengths, counts: [B] keys and queries. Queries in front of the first key see nothing and get no
        piece.
    """
    return [
        Piece(request, max(count - length, 0), min(count, length), 0, length)
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True))
        if length and count
    ]


def cut_pieces(
    plan: SplitPlan,
    lengths: Sequence[int],
    counts: Sequence[int],
    *,
    align: int,
    share: bool = True,
) -> list[Piece]:
    """Pieces of every split of ``plan``, in its order; each (query, visible key) is in exactly one
    of them.

    lengths: [B], at most those planned for. counts: [B], queries of each request. align: tokens per
    page, 1 where keys can be read from anywhere. share: whether one piece may hold several queries.
    """
    pieces: list[Piece] = []
    for request, start, end in _ranges(plan, lengths, counts):
        queries = np.arange(counts[request])
        for low, high in _visible(plan.spec, lengths[request], queries):
            low, high = np.maximum(low, start), np.minimum(high, end)
            seen = np.flatnonzero(low < high)  # a run of neighbours, in either direction of time
            if seen.size:
                pieces += _cut_run(request, seen, low[seen], high[seen], align, share)
    return pieces


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows over keys that an operator reads without a gap from the front.

    in_place: rows in the order of their keys, None for keys between them that nobody reads.
    lengths: keys of each of those. overlapping: rows whose keys are taken already.
    """

    in_place: list[int | None]
    lengths: list[int]
    overlapping: list[int]


def tile_rows(starts: Sequence[int], lengths: Sequence[int]) -> Tiling:
    """The tiling of rows with keys [start, start + length), by their place in the lists."""
    tiling = Tiling([], [], [])
    position = 0
    for row in sorted(range(len(starts)), key=starts.__getitem__):
        if starts[row] < position:
            tiling.overlapping.append(row)
            continue
        if starts[row] > position:
            tiling.in_place.append(None)
            tiling.lengths.append(starts[row] - position)
        tiling.in_place.append(row)
        tiling.lengths.append(lengths[row])
        position = starts[row] + lengths[row]
    return tiling


def _ranges(
    plan: SplitPlan, lengths: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """(request, start, end) of each split for the actual lengths; see ``SplitPlan`` on serving
    shorter requests.
    """
    spec = plan.spec
    for split in range(plan.num_splits):
        request = int(plan.request[split])
        start, end = int(plan.start[split]), min(int(plan.end[split]), lengths[request])
        if plan.window_first[split] and spec.sliding_window is not None:
            start = min(start, max(window_start(lengths[request] - counts[request], spec), 0))
            if split > plan.indptr[request]:  # an anchor range of its own comes first
                start = max(start, int(plan.end[split - 1]))
        if start < end:
            yield request, start, end


def _visible(spec: DecodeSpec, length: int, queries: IntArray) -> list[tuple[IntArray, IntArray]]:
    """Ranges [low, high) that each query sees: one, or anchors and window where they are apart."""
    position = length - len(queries) + queries
    high = np.maximum(position + 1, 0) if spec.causal else np.full_like(queries, length)
    if spec.sliding_window is None:
        return [(np.zeros_like(queries), high)]
    low = np.maximum(window_start(position, spec), 0)
    if (low <= spec.anchor_tokens).all():
        return [(np.zeros_like(queries), high)]
    anchors = np.minimum(high, spec.anchor_tokens)
    return [(np.zeros_like(queries), anchors), (np.maximum(low, spec.anchor_tokens), high)]


def _cut_run(
    request: int, queries: IntArray, low: IntArray, high: IntArray, align: int, share: bool
) -> list[Piece]:
    starts = int(low.max())
    if not (low == starts).all() or starts % align:
        starts = -(-starts // align) * align
    ends = int(high.min())
    if not (high == ends).all():
        ends = ends // align * align
    if share and len(queries) > 1 and starts < ends:
        middle = Piece(request, int(queries[0]), len(queries), starts, ends)
        heads = _per_query(request, queries, low, np.full_like(high, starts), align)
        tails = _per_query(request, queries, np.full_like(low, ends), high, align)
        return [*heads, middle, *tails]
    return _per_query(request, queries, low, high, align)


def _per_query(
    request: int, queries: IntArray, low: IntArray, high: IntArray, align: int
) -> list[Piece]:
    pieces = []
    for query, start, end in zip(queries.tolist(), low.tolist(), high.tolist(), strict=True):
        page = min(-(-start // align) * align, end)
        pieces += [Piece(request, query, 1, start, page)] if start < page else []
        pieces += [Piece(request, query, 1, page, end)] if page < end else []
    return pieces

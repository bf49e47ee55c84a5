"""Which shared prefixes pay: one formula per prefix, one per level of nesting.

A prefix that is kept, from the end of the kept one around it (or 0) to its own end, saves

    tokens * bytes per token * (reads without it - reads with it) / read_bandwidth

where one read serves ``queries_per_read`` queries, and more queries read again. It costs a state
per query row, written once. A level of nesting costs every row of the batch a state to be gathered
(read and written) and merged. All of it must save more than the launches that it adds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
import numpy.typing as npt

from splitkv.backends.cascade.prefixes import Trie
from splitkv.common.profile import DeviceProfile
from splitkv.common.spec import DecodeSpec
from splitkv.common.visibility import IntArray

EXTRA_LAUNCHES = 3
"""The groups' attention, the gather of their states, the merge."""
MOST_LEVELS = 8
"""Of nesting: the states of all rows on all levels are in memory when they merge."""
_PASSES_OF_A_LEVEL = 3
"""Times that a state crosses memory after it was written: gathered, which is two, and merged."""


@dataclass(frozen=True, slots=True)
class Choice:
    """begins: kept node of the trie to the column where its pages begin. levels: kept node to the
    number of kept ones around it. saved_seconds: predicted, what sharing costs taken off. why: a
    sentence where nothing is kept.
    """

    begins: dict[int, int]
    levels: dict[int, int]
    saved_seconds: float
    why: str | None = None


def reads_of(queries: IntArray, queries_per_read: int | None) -> IntArray:
    """Passes over the same K and V that so many queries take; None: one, however many they are."""
    if queries_per_read is None:
        return (queries > 0).astype(np.int64)
    return -(-queries // queries_per_read)


def choose_prefixes(
    trie: Trie,
    counts: IntArray,
    spec: DecodeSpec,
    profile: DeviceProfile,
    queries_per_read: int | None,
    *,
    always: bool,
) -> Choice:
    """The nodes worth keeping; always: all of them. counts: [B], queries of each request.

    One node at a time, the one that saves most beside those kept already, its own rows' share of a
    level taken off. Then as many levels as are fastest, where each costs the whole batch.
    """
    assert spec.page_size is not None
    costs = _costs(trie, counts, spec, profile, queries_per_read)
    kept = list(range(len(trie.nodes))) if always else _greedy(trie, costs)
    found, fixed = len(kept), EXTRA_LAUNCHES * profile.launch_seconds
    begins, levels = _placed(trie, kept)
    deepest = max(levels.values(), default=-1)
    best, saved = 0, 0.0
    for depth in (deepest,) if always else range(deepest + 1):
        outer = {index: begin for index, begin in begins.items() if levels[index] <= depth}
        total = _saved(trie, costs, outer) - (depth + 1) * int(counts.sum()) * costs.level
        if always or total > saved:
            best, saved = depth + 1, total
    if best == 0 or (saved <= fixed and not always):
        return Choice({}, {}, 0.0, _why_not(len(trie.nodes), found, saved, fixed))
    levels = {index: level for index, level in levels.items() if level < best}
    return Choice({index: begins[index] for index in levels}, levels, saved - fixed)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Of each node: apart, reads by its rows alone; together, reads as a group; own, seconds for
    its states and its share of a level. Of a row in the trie's order: alone, its reads. page:
    seconds of reading one; state, level: seconds of one query, written, and gathered and merged.
    """

    apart: IntArray
    together: IntArray
    own: npt.NDArray[np.float64]
    queries: IntArray
    alone: IntArray
    page: float
    state: float
    level: float


def _costs(
    trie: Trie,
    counts: IntArray,
    spec: DecodeSpec,
    profile: DeviceProfile,
    queries_per_read: int | None,
) -> _Costs:
    queries = _sums(trie, counts)
    alone = reads_of(counts, queries_per_read)
    state = spec.num_q_heads * (spec.head_dim_v + 2) * 4 / profile.read_bandwidth
    level = _PASSES_OF_A_LEVEL * state + spec.num_q_heads * profile.merge_seconds / profile.workers
    return _Costs(
        apart=_sums(trie, alone),
        together=reads_of(queries, queries_per_read),
        own=np.asarray(queries * (state + level), np.float64),
        queries=queries,
        alone=alone[trie.order],
        page=(spec.page_size or 1) * spec.kv_bytes_per_token / profile.read_bandwidth,
        state=state,
        level=level,
    )


def _sums(trie: Trie, values: IntArray) -> IntArray:
    """Sums of ``values`` [B] over the rows of each node."""
    sums = np.concatenate(([0], np.cumsum(values[trie.order])))
    low, high = (np.array([node[side] for node in trie.nodes]) for side in (0, 1))
    total: IntArray = sums[high] - sums[low]
    return total


def _greedy(trie: Trie, costs: _Costs) -> list[int]:
    """Nodes that pay, best first; nodes below one are those that follow it in the trie's list."""
    below = _below(trie)
    end = np.array([node.end for node in trie.nodes])
    begin = np.zeros_like(end)
    readers = costs.apart.copy()  # of a node's pages now: kept groups in it, and other rows
    worth = (readers - costs.together) * costs.page * end - costs.own
    nested = np.zeros_like(end)  # kept groups one in another, at most, within a node
    kept: set[int] = set()
    while worth.size and worth[best := int(worth.argmax())] > 0:
        way = list(_above(trie, best))
        if sum(node in kept for node in way) + 1 + nested[best] <= MOST_LEVELS:
            kept.add(best)
            inside = slice(best + 1, below[best])
            begin[inside] = np.maximum(begin[inside], end[best])
            around = list(takewhile(lambda node: node not in kept, way))
            readers[around] -= readers[best] - costs.together[best]
            for place in (inside, around):
                saved = (readers[place] - costs.together[place]) * (end[place] - begin[place])
                again = saved * costs.page - costs.own[place]
                worth[place] = np.where(np.isneginf(worth[place]), -np.inf, again)
            for inner, node in pairwise([best, *way]):
                nested[node] = max(nested[node], nested[inner] + (inner in kept))
        worth[best] = -np.inf
    return list(kept)


def _above(trie: Trie, index: int) -> Iterator[int]:
    """The nodes around this one, from the inside out."""
    while (index := trie.nodes[index].parent) >= 0:
        yield index


def _below(trie: Trie) -> list[int]:
    """For each node the index after its last descendant."""
    below = list(range(1, len(trie.nodes) + 1))
    for index in range(len(trie.nodes) - 1, -1, -1):
        if (parent := trie.nodes[index].parent) >= 0:
            below[parent] = max(below[parent], below[index])
    return below


def _placed(trie: Trie, kept: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Where each kept node's pages begin, and how many kept ones are around it."""
    begins: dict[int, int] = {}
    levels: dict[int, int] = {}
    for index in sorted(kept):
        above = next((node for node in _above(trie, index) if node in levels), None)
        begins[index] = 0 if above is None else trie.nodes[above].end
        levels[index] = 0 if above is None else levels[above] + 1
    return begins, levels


def _saved(trie: Trie, costs: _Costs, begins: dict[int, int]) -> float:
    """Seconds of reading that these groups save, the writing of their states taken off."""
    shared = np.zeros(len(trie.order), np.int64)
    together, states = 0, 0
    for index, begin in begins.items():
        node = trie.nodes[index]
        shared[node.low : node.high] = node.end  # inner ones come later
        together += int(costs.together[index]) * (node.end - begin)
        states += int(costs.queries[index])
    pages = int((shared * costs.alone).sum()) - together
    return pages * costs.page - states * costs.state


def _why_not(found: int, paying: int, saved: float, fixed: float) -> str:
    if not paying or saved <= 0:
        return f"none of {found} shared prefixes saves as much reading as its merge costs"
    return (
        f"{paying} of {found} shared prefixes would save {saved * 1e6:.2f} us, and "
        f"{EXTRA_LAUNCHES} more launches cost {fixed * 1e6:.2f} us"
    )

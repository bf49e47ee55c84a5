"""Which requests begin with the same pages: a trie of block tables, integers in and out.

Rows sorted as bytes lie beside those that begin alike. How many pages neighbours have in common is
then all there is to know: every run of neighbours that agree further than what surrounds them is a
node of the trie (the intervals of a longest-common-prefix array: Abouelhoda, Kurtz and Ohlebusch,
"Replacing suffix trees with enhanced suffix arrays", 2004). A page counts where it stands in the
same column of all its rows, and behind the same pages.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from splitkv.common.visibility import IntArray


class Node(NamedTuple):
    """Columns [first, end) hold the same pages in the rows ``order[low:high]``, two or more.

    parent: index of the node whose ``end`` is ``first`` and that has these rows and more; -1: none.
    """

    low: int
    high: int
    first: int
    end: int
    parent: int


@dataclass(frozen=True, slots=True)
class Trie:
    """order: int64, the rows that share anything. nodes: parents before their children."""

    order: IntArray
    nodes: list[Node]


def find_prefixes(table: IntArray, pages: IntArray) -> Trie:
    """The trie of the rows of ``table`` [B, columns], of which only the first pages[b] count.

    pages: int [B], at most the number of columns. Entries past them are not looked at.
    """
    rows = _candidates(table, pages)
    if len(rows) < 2:
        return Trie(np.empty(0, np.int64), [])
    limit = pages[rows].astype(np.int64)
    keys = np.ascontiguousarray(table[rows, : int(limit.max())])
    # past its pages a row agrees with no other; the limit below catches what should not be there
    past = np.arange(keys.shape[1]) >= limit[:, None]
    np.copyto(keys, -1 - np.arange(len(rows), dtype=keys.dtype)[:, None], where=past)
    sort = np.argsort(keys.view(f"V{keys.shape[1] * keys.itemsize}").reshape(-1), kind="stable")
    common = _common(keys[sort], limit[sort])
    return Trie(rows[sort], _nodes(common))


def _candidates(table: IntArray, pages: IntArray) -> IntArray:
    """Rows whose first page is that of another row too."""
    rows = np.flatnonzero(pages > 0)
    if len(rows) == 0:
        return rows
    _, which, count = np.unique(table[rows, 0], return_inverse=True, return_counts=True)
    return rows[count[which.reshape(-1)] > 1]


def _common(keys: IntArray, limit: IntArray) -> IntArray:
    """Pages that each sorted row has in common with the one before it; int64 [n], the first 0."""
    differ = keys[1:] != keys[:-1]
    same = np.where(differ.any(1), differ.argmax(1), keys.shape[1])
    return np.concatenate(([0], np.minimum(same, np.minimum(limit[1:], limit[:-1]))))


def _nodes(common: IntArray) -> list[Node]:
    closed: list[tuple[int, int, int, int]] = []  # children before their parents
    opened = [(0, 0)]  # (pages in common, first row), rising in both
    for row, pages in enumerate([*common.tolist()[1:], 0], 1):
        low = row - 1
        while opened[-1][0] > pages:
            end, low = opened.pop()
            closed.append((low, row, max(pages, opened[-1][0]), end))
        if opened[-1][0] < pages:
            opened.append((pages, low))
    nodes: list[Node] = []
    way: list[int] = []  # from a root down to the node before
    for low, high, first, end in reversed(closed):
        while way and not (nodes[way[-1]].low <= low and high <= nodes[way[-1]].high):
            way.pop()
        nodes.append(Node(low, high, first, end, way[-1] if way else -1))
        way.append(len(nodes) - 1)
    return nodes

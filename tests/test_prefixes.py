"""The trie of block tables against its definition, spelled out request by request."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splitkv.backends.cascade.prefixes import Trie, find_prefixes

Found = set[tuple[frozenset[int], int, int]]


def found(table: list[list[int]], pages: list[int], dtype: type = np.int32) -> Found:
    """(rows, first column, column after the last) of each node."""
    trie = find_prefixes(np.array(table, dtype).reshape(len(pages), -1), np.array(pages))
    _check_order(trie)
    return {(frozenset(trie.order[n.low : n.high].tolist()), n.first, n.end) for n in trie.nodes}


def _check_order(trie: Trie) -> None:
    for place, node in enumerate(trie.nodes):
        if node.parent < 0:
            assert node.first == 0
            continue
        above = trie.nodes[node.parent]
        assert node.parent < place
        assert above.end == node.first
        assert above.low <= node.low < node.high <= above.high


def by_definition(table: list[list[int]], pages: list[int]) -> Found:
    """Every set of two or more rows with one beginning, as far as exactly these rows share it."""
    sets: dict[frozenset[int], list[int]] = {}
    for columns in range(1, max(pages, default=0) + 1):
        beginnings: dict[tuple[int, ...], set[int]] = {}
        for row, own in enumerate(pages):
            if own >= columns:
                beginnings.setdefault(tuple(table[row][:columns]), set()).add(row)
        for rows in beginnings.values():
            if len(rows) > 1:
                sets.setdefault(frozenset(rows), []).append(columns)
    return {(rows, ends[0] - 1, ends[-1]) for rows, ends in sets.items()}


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    columns = draw(st.integers(1, 5))
    row = st.lists(st.integers(-2, 2), min_size=columns, max_size=columns)
    table = draw(st.lists(row, min_size=1, max_size=9))
    pages = st.lists(st.integers(0, columns), min_size=len(table), max_size=len(table))
    return table, draw(pages)


@given(tables())
def test_nodes_are_those_of_the_definition(case: tuple[list[list[int]], list[int]]) -> None:
    assert found(*case) == by_definition(*case)
    assert found(*case, dtype=np.int64) == by_definition(*case)


def test_nested_prefixes() -> None:
    table = [[1, 2, 3, 9], [5, 6, 0, 0], [1, 2, 4, 8], [1, 2, 3, 7], [5, 6, 1, 1], [8, 8, 8, 8]]
    assert found(table, [4] * 6) == {
        (frozenset({0, 2, 3}), 0, 2),
        (frozenset({0, 3}), 2, 3),
        (frozenset({1, 4}), 0, 2),
    }


def test_a_page_in_another_column_or_behind_other_pages_is_no_prefix() -> None:
    assert found([[7, 1], [1, 7]], [2, 2]) == set()
    assert found([[1, 7, 8], [2, 7, 8]], [3, 3]) == set()
    assert found([[1, 7, 8], [1, 7, 8]], [3, 3]) == {(frozenset({0, 1}), 0, 3)}  # the control


def test_only_the_pages_that_count_are_compared() -> None:
    assert found([[3, 4, 5], [3, 4, 5]], [1, 3]) == {(frozenset({0, 1}), 0, 1)}
    assert found([[3, 4, 5], [3, 4, 5]], [0, 3]) == set()
    # what stands past the end may look like the marks that the search puts there
    assert found([[3, -1], [3, -2], [3, -1]], [2, 2, 1]) == {(frozenset({0, 1, 2}), 0, 1)}


def test_nothing() -> None:
    assert find_prefixes(np.empty((0, 3), np.int32), np.empty(0, np.int64)).nodes == []
    assert find_prefixes(np.empty((4, 0), np.int32), np.zeros(4, np.int64)).nodes == []
    assert found([[1, 2]], [2]) == set()

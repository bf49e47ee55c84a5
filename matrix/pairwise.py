"""Covering arrays of strength 2: rows in which every allowed pair of axis values stands together.

Most faults of a system with many options need two of them to meet (D. R. Kuhn, D. R. Wallace,
A. M. Gallo, "Software Fault Interactions", IEEE TSE 30, 2004); that takes tens of rows where the
product has billions. Rows are found greedily (after D. M. Cohen et al., "The AETG System", IEEE TSE
23, 1997) and in a fixed order: the same rows in, the same rows out, on every host.

Rows extend: what is there stays, and rows are added for the pairs that are not yet covered.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

Row = Mapping[str, str]
"""A word for every axis, by the axis' name."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two axes, in their order, each with a word."""
Takes = Callable[[Row], bool]
"""Whether somebody runs a row, who may refuse it."""

_TURNS = 16
"""Uncovered pairs that a row is grown from; the best of these rows is kept."""
_SWEEPS = 4
"""How often a growing row goes through the axes, which is until nothing gets better."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Words of which a row has one; the first is what a row means that does not say."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Never:
    """Words of two axes that cannot meet, and the reason."""

    axis: str
    words: tuple[str, ...]
    other: str
    others: tuple[str, ...]
    reason: str

    @property
    def pairs(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """The pairs, in no particular order of axes."""
        for word in self.words:
            for other in self.others:
                yield (self.axis, word), (self.other, other)


@dataclass(frozen=True)
class Space:
    """Axes, in their order, and what cannot meet."""

    axes: tuple[Axis, ...]
    never: tuple[Never, ...]

    @cached_property
    def forbidden(self) -> frozenset[Pair]:
        """The pairs of ``never``."""
        order = {axis.name: index for index, axis in enumerate(self.axes)}
        return frozenset(
            (one, other) if order[one[0]] < order[other[0]] else (other, one)
            for entry in self.never
            for one, other in entry.pairs
        )

    @cached_property
    def allowed(self) -> tuple[Pair, ...]:
        """Every other pair, in order."""
        forbidden = self.forbidden
        return tuple(
            pair
            for one, other in combinations(self.axes, 2)
            for word in one.words
            for other_word in other.words
            if (pair := ((one.name, word), (other.name, other_word))) not in forbidden
        )

    def text(self, row: Row) -> str:
        """The words of ``row`` that are not the first of their axis."""
        words = (row[axis.name] for axis in self.axes if row[axis.name] != axis.words[0])
        return " ".join(words)

    def row(self, text: str) -> dict[str, str]:
        """The row that ``text`` stands for.

        Raises:
            ValueError: an unknown word, or two of one axis.
        """
        axis_of = {word: axis.name for axis in self.axes for word in axis.words}
        row: dict[str, str] = {}
        for word in text.split():
            if (name := axis_of.get(word)) is None:
                raise ValueError(f"{text!r}: no axis has {word!r}, known: {sorted(axis_of)}")
            if name in row:
                raise ValueError(f"{text!r}: {row[name]!r} and {word!r} are both of axis {name}")
            row[name] = word
        return {axis.name: row.get(axis.name, axis.words[0]) for axis in self.axes}

    def pairs(self, row: Row) -> Iterator[Pair]:
        """The pairs that ``row`` covers."""
        return combinations([(axis.name, row[axis.name]) for axis in self.axes], 2)

    def settled(self, row: Row, *pins: tuple[str, str]) -> dict[str, str] | None:
        """``row`` with ``pins``; other axes take their first word that goes with them, where theirs
        does not. None: the pins cannot meet.
        """
        settled, pinned = {**row, **dict(pins)}, [axis for axis, _ in pins]
        forbidden = self.forbidden
        waiting = list(pinned)
        while waiting:
            here = waiting.pop(0)
            for axis in self.axes:
                there = axis.name
                if there == here or _free(settled, here, there, forbidden):
                    continue
                if there in pinned:
                    return None
                fitting = (
                    word
                    for word in axis.words
                    if all(
                        _free({**settled, there: word}, there, other, forbidden) for other in pinned
                    )
                )
                if (found := next(fitting, None)) is None:
                    return None
                settled[there] = found
                pinned.append(there)
                waiting.append(there)
        return settled


def _free(row: Row, one: str, other: str, forbidden: frozenset[Pair]) -> bool:
    here, there = (one, row[one]), (other, row[other])
    return (here, there) not in forbidden and (there, here) not in forbidden


def runnable(space: Space, takes: Takes) -> dict[Pair, dict[str, str]]:
    """The pairs that stand in a row which is taken and plain in all else but the first axis: a row
    for each. What only a richer row could bring is left out.
    """
    found = {}
    first, plain = space.axes[0], space.row("")
    bases = [space.settled(plain, (first.name, word)) or plain for word in first.words]
    for pair in space.allowed:
        rows = (space.settled(base, *pair) for base in bases)
        taken = (row for row in rows if row is not None and takes(row))
        if (row := next(taken, None)) is not None:
            found[pair] = row
    return found


def uncovered(space: Space, rows: Iterable[Row], takes: Takes) -> dict[Pair, dict[str, str]]:
    """Of the pairs that can be run those that no row covers which is taken, as ``runnable``."""
    covered = {pair for row in rows if takes(row) for pair in space.pairs(row)}
    return {pair: row for pair, row in runnable(space, takes).items() if pair not in covered}


def extended(space: Space, rows: Sequence[Row], takers: Sequence[Takes]) -> list[Row]:
    """``rows``, and what they need to cover for each taker every pair that it can run.

    takers: narrowest first, so that what all can run is covered by rows that all take.
    """
    found = list(rows)
    for takes in takers:
        missing = uncovered(space, found, takes)
        while missing:
            row = _grown(space, missing, takes)
            found.append(row)
            for pair in space.pairs(row):
                missing.pop(pair, None)
    return _without_idle(space, found, takers, keep=len(rows))


def _grown(space: Space, missing: Mapping[Pair, Row], takes: Takes) -> Row:
    """The best of a few rows, each grown from an uncovered pair."""
    starts, best, most = list(missing.values()), {}, 0
    for turn in range(_TURNS):
        start = starts[turn * len(starts) // _TURNS]
        row = _climbed(space, start, missing, takes, f"{len(missing)}/{turn}")
        if (gain := _gain(space, row, missing)) > most:
            best, most = row, gain
    return best


def _climbed(
    space: Space, start: Row, missing: Mapping[Pair, Row], takes: Takes, key: str
) -> dict[str, str]:
    """``start`` with one axis changed after the other, as long as more pairs become covered; each
    ``key`` goes through the axes in an order of its own.
    """
    row, gain = dict(start), _gain(space, start, missing)
    for sweep in range(_SWEEPS):
        before = gain
        for axis in _shuffled(space.axes, f"{key}{sweep}"):
            better = []
            for word in axis.words:
                changed = space.settled(row, (axis.name, word))
                if changed is not None and (more := _gain(space, changed, missing)) > gain:
                    better.append((more, changed))
            for more, changed in sorted(better, key=lambda entry: -entry[0]):
                if takes(changed):
                    row, gain = changed, more
                    break
        if gain == before:
            break
    return row


def _shuffled(axes: Iterable[Axis], key: str) -> list[Axis]:
    """An order that only ``key`` and the names decide."""
    return sorted(axes, key=lambda axis: hashlib.sha256(f"{key}/{axis.name}".encode()).digest())


def _gain(space: Space, row: Row, missing: Mapping[Pair, Row]) -> int:
    return sum(pair in missing for pair in space.pairs(row))


def idle(space: Space, rows: Sequence[Row], takers: Sequence[Takes]) -> list[int]:
    """Which rows could go, each by itself: the others cover for every taker all that they do."""
    spare = set(range(len(rows)))
    for takes in takers:
        wanted = runnable(space, takes)
        taken = [index for index, row in enumerate(rows) if takes(row)]
        covers: dict[Pair, list[int]] = {}
        for index in taken:
            for pair in space.pairs(rows[index]):
                if pair in wanted:
                    covers.setdefault(pair, []).append(index)
        spare -= {by[0] for by in covers.values() if len(by) == 1}
    return sorted(spare)


def _without_idle(
    space: Space, rows: Sequence[Row], takers: Sequence[Takes], keep: int
) -> list[Row]:
    """``rows`` less those after the first ``keep`` that could go, last ones first."""
    found = list(rows)
    while spare := [index for index in idle(space, found, takers) if index >= keep]:
        found.pop(spare[-1])
    return found

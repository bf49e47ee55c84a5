"""The pairwise cases: what they cover, for whom, that nothing in them is idle, and who they are."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations, product

import pytest

from splitkv.backends.registry import backend_named
from splitkv.matrix.cases import CASES
from splitkv.matrix.cases_pairwise import NEVER, PAIRWISE, SPACE, case_of, takers
from splitkv.matrix.inputs import build
from splitkv.matrix.pairwise import (
    Axis,
    Never,
    Row,
    Space,
    extended,
    idle,
    runnable,
    uncovered,
)
from splitkv.matrix.pairwise_rows import ROWS
from splitkv.matrix.parity import Outcome, run_case

pytestmark = pytest.mark.filterwarnings("ignore:page size")
TAKERS = takers()
TABLE = [SPACE.row(text) for text in ROWS]
every_backend = pytest.mark.parametrize("name", TAKERS)


def everybody(row: Row) -> bool:
    return True


# --- the committed rows -------------------------------------------------------------------------


def test_every_pair_of_values_that_can_meet_meets_in_a_case() -> None:
    met = {pair for row in TABLE for pair in SPACE.pairs(row)}
    assert met == set(SPACE.allowed)
    everything = {
        ((one.name, word), (other.name, other_word))
        for one, other in combinations(SPACE.axes, 2)
        for word, other_word in product(one.words, other.words)
    }
    assert everything - met == SPACE.forbidden, "what cannot be is what is listed, and no more"


@every_backend
def test_each_backend_has_its_pairs_in_cases_that_it_takes(name: str) -> None:
    """A refusal of one value must not hide what the others do to each other."""
    takes = TAKERS[name]
    assert uncovered(SPACE, TABLE, takes) == {}
    at_least = {"ascend": 1300, "cuda": 1900, "cpu": len(SPACE.allowed)}
    assert len(runnable(SPACE, takes)) >= at_least[name]


def test_no_row_is_idle() -> None:
    assert idle(SPACE, TABLE, list(TAKERS.values())) == []
    assert idle(SPACE, [*TABLE, TABLE[3]], list(TAKERS.values())) == [3, len(TABLE)]


def test_a_row_less_is_seen_and_rows_are_found_for_it() -> None:
    takes = TAKERS["cpu"]
    fewer = TABLE[:-2]
    missing = uncovered(SPACE, fewer, takes)
    assert missing
    more = extended(SPACE, fewer, [takes])
    assert more[: len(fewer)] == fewer, "what is there stays"
    assert uncovered(SPACE, more, takes) == {}


def test_nothing_is_missing_so_nothing_is_added() -> None:
    assert extended(SPACE, TABLE, list(TAKERS.values())) == TABLE


def _cannot_be(row: Row) -> str | None:
    """Why the case is none, in the library's words; None where it runs."""
    try:
        case = case_of(row)
        build(case, 0)
    except ValueError as fault:
        return str(fault)
    result = run_case(backend_named("cpu"), case)
    return None if result.outcome is Outcome.PASSED else "; ".join(result.why)


@pytest.mark.parametrize("never", NEVER, ids=lambda never: f"{never.axis}-{never.other}")
def test_what_cannot_meet_fails_when_it_is_made_to(never: Never) -> None:
    assert len(never.reason.split()) >= 4
    for (axis, word), (other, other_word) in never.pairs:
        row = SPACE.settled(SPACE.row(""), (axis, word))
        assert row is not None
        assert _cannot_be(row) is None, row
        alone = Space(SPACE.axes, tuple(entry for entry in NEVER if entry is not never))
        met = alone.settled(row, (axis, word), (other, other_word)) or {**row, other: other_word}
        assert _cannot_be(met) is not None, met


# --- names --------------------------------------------------------------------------------------


def test_cases_are_known_by_their_words() -> None:
    assert {case.id: case.stands_for for case in PAIRWISE}["pair-e3b0c442"] == "plain"
    (one,) = (case for case in PAIRWISE if case.stands_for == PINNED[1])
    assert (one.id, one.digest) == (PINNED[0], PINNED[2])
    assert len({case.id for case in PAIRWISE}) == len(ROWS)
    assert [case for case in CASES if case.id.startswith("pair-")] == list(PAIRWISE)
    for text in ROWS:
        assert SPACE.text(SPACE.row(text)) == text


PINNED = (
    "pair-acb06e10",
    "p16, ring, ragged, anchored, sinks, d128, g1, fp16, whole, long, int64",
    "432636396cf6",
)


@pytest.mark.parametrize("text", ["hnd bsnd", "hnd wide"])
def test_words_that_make_no_row_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"both of axis layout|no axis has 'wide'"):
        SPACE.row(text)


# --- the generator, on a small space ------------------------------------------------------------

SMALL = Space(
    (
        Axis("a", ("a0", "a1", "a2")),
        Axis("b", ("b0", "b1", "b2")),
        Axis("c", ("c0", "c1")),
        Axis("d", ("d0", "d1")),
    ),
    (Never("a", ("a1",), "b", ("b0", "b1"), "a1 wants b2"), Never("d", ("d1",), "c", ("c1",), "")),
)


def test_a_small_space_is_covered_by_few_rows() -> None:
    rows = extended(SMALL, [], [everybody])
    assert uncovered(SMALL, rows, everybody) == {}
    assert all(not set(SMALL.pairs(row)) & SMALL.forbidden for row in rows)
    assert 7 <= len(rows) <= 9  # seven pairs of a and b can be
    assert idle(SMALL, rows, [everybody]) == []


def test_rows_that_somebody_refuses_cover_nothing_for_him() -> None:
    def narrow(row: Row) -> bool:
        return row["c"] == "c0" or row["a"] == "a0"

    both = extended(SMALL, [], [narrow, everybody])
    assert uncovered(SMALL, both, narrow) == {}
    assert uncovered(SMALL, both, everybody) == {}
    blind = extended(SMALL, [], [everybody])
    assert set(runnable(SMALL, narrow)) < set(runnable(SMALL, everybody))
    hidden = [row for row in blind if not narrow(row)]
    assert hidden, "the control has rows that the narrow one refuses"


@pytest.mark.parametrize("takes", [everybody, lambda row: row["c"] == "c0"], ids=["all", "some"])
def test_a_value_or_an_axis_more_adds_rows_and_leaves_the_others(
    takes: Callable[[Row], bool],
) -> None:
    before = [SMALL.text(row) for row in extended(SMALL, [], [takes])]
    a, *rest = SMALL.axes
    wider = Space((Axis("a", (*a.words, "a3")), *rest, Axis("e", ("e0", "e1"))), SMALL.never)
    after = extended(wider, [wider.row(text) for text in before], [takes])
    assert [wider.text(row) for row in after[: len(before)]] == before
    assert len(after) > len(before)
    assert uncovered(wider, after, takes) == {}


def test_pins_that_cannot_meet_settle_nowhere() -> None:
    assert SMALL.settled(SMALL.row(""), ("a", "a1"), ("b", "b0")) is None
    assert SMALL.settled(SMALL.row("b1"), ("a", "a1")) == SMALL.row("a1 b2")


_PRINT = """
from splitkv.matrix.pairwise import Axis, Never, Space, extended
axes = tuple(Axis(name, tuple(f"{name}{i}" for i in range(4))) for name in "abcdef")
space = Space(axes, (Never("a", ("a1", "a2"), "b", ("b0", "b1"), ""),))
print([space.text(row) for row in extended(space, [], [lambda row: True])])
"""


def test_rows_do_not_depend_on_the_order_of_a_hash() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", _PRINT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1
    assert "a1" in said.pop()

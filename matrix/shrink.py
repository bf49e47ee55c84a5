"""From a case that fails to a small one that fails in the same way.

Greedy and deterministic: the first simpler case that still fails takes the case's place, until none
does or the tries are spent. Requests go first, then features one by one, then numbers by halves.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from splitkv.backends.base import Backend
from splitkv.common.spec import Layout
from splitkv.matrix.case import Case
from splitkv.matrix.case_text import from_settings, settings
from splitkv.matrix.parity import Outcome, Result
from splitkv.matrix.verdict import judge

MOST_TRIES = 300

_SMALLEST = {
    "num_queries": 1,
    "head_dim": 16,
    "head_dim_v": 16,
    "page_size": 16,
    "sliding_window": 1,
    "anchor_tokens": 0,
    "columns": 0,
    "num_splits": 2,
    "split_size": 16,
    "merged_at_block": 1,
}
"""Where halving a field stops; what is below already stays."""
_KEPT = ("seq_lens", "query_lens", "planned_lens", "num_q_heads", "num_kv_heads", "dtype", "layout")
"""Fields that are no feature to leave out; their own lines make them smaller."""

Change = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest failing case that was found, its result, and how many runs that took."""

    case: Case
    result: Result
    tries: int


def shrink(backend: Backend, case: Case, failed: Result, most_tries: int = MOST_TRIES) -> Shrunk:
    """The smallest case that fails on ``backend`` for one of the reasons that ``failed`` has."""
    wanted = _kinds(failed)
    smallest = Shrunk(case, failed, 0)

    def fails(simpler: Case) -> bool:
        nonlocal smallest
        result = judge(backend, simpler).result
        same = result.outcome is Outcome.FAILED and bool(_kinds(result) & wanted)
        now = smallest.tries + 1
        smallest = (
            Shrunk(simpler, result, now) if same else Shrunk(smallest.case, smallest.result, now)
        )
        return same

    reduce(case, fails, most_tries)
    return smallest


def reduce(case: Case, fails: Callable[[Case], bool], most_tries: int = MOST_TRIES) -> Case:
    """The last of a chain of simpler and simpler cases for all of which ``fails`` holds."""
    tried = {case}
    while True:
        for simpler in simpler_cases(case):
            if simpler in tried:
                continue
            if len(tried) > most_tries:
                return case
            tried.add(simpler)
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def simpler_cases(case: Case) -> Iterator[Case]:
    """Well-formed cases one step simpler than ``case``, the largest steps first; the id stays."""
    given = settings(case)
    for change in _changes(case, given):
        try:
            simpler = from_settings(case.id, {**given, **change})
        except ValueError:  # the fields that are left contradict each other
            continue
        if simpler != case:
            yield simpler


def _kinds(result: Result) -> frozenset[str]:
    """What went wrong, without the numbers: "lse" of "lse: 3e-3, allowed 1e-6"."""
    return frozenset(line.partition(":")[0] for line in result.why)


def _changes(case: Case, given: Change) -> Iterator[Change]:
    yield from _fewer_requests(case)
    optional = [name for name in given if name not in _KEPT]
    yield from ({name: None} for name in optional)
    if case.query_lens is not None:
        yield {"query_lens": None}
        yield {"query_lens": None, "packed_queries": None}
    if case.planned_lens is not None:
        yield {"planned_lens": None}
    if case.spec.layout is not Layout.BSND:
        yield {"layout": Layout.BSND, "page_size": None}
    if case.spec.dtype is not torch.float32:
        yield {"dtype": torch.float32}
    yield from _fewer_heads(case)
    yield from _smaller_numbers(given)
    yield from _shorter_requests(case)


def _fewer_requests(case: Case) -> Iterator[Change]:
    """Each request alone, then all but one."""
    every = range(len(case.seq_lens))
    if len(every) < 2:
        return
    for kept in [*([index] for index in every), *([i for i in every if i != x] for x in every)]:
        change = {"seq_lens": tuple(case.seq_lens[index] for index in kept)}
        for name in ("query_lens", "planned_lens"):
            if (values := getattr(case, name)) is not None:
                change[name] = tuple(values[index] for index in kept)
        yield change


def _fewer_heads(case: Case) -> Iterator[Change]:
    group, heads = case.spec.group, case.spec.num_kv_heads
    for fewer_heads in _down(heads, 1):
        yield {"num_kv_heads": fewer_heads, "num_q_heads": fewer_heads * group}
    for narrower in _down(group, 1):
        yield {"num_kv_heads": heads, "num_q_heads": heads * narrower}


def _smaller_numbers(given: Change) -> Iterator[Change]:
    for name, smallest in _SMALLEST.items():
        value = given.get(name)
        if isinstance(value, int):
            yield from ({name: less} for less in _down(value, smallest))


def _shorter_requests(case: Case) -> Iterator[Change]:
    """One length or one count of queries at a time."""
    for name in ("seq_lens", "query_lens", "planned_lens"):
        values: tuple[int, ...] = getattr(case, name) or ()
        for index, value in enumerate(values):
            for less in _down(value, 0):
                yield {name: (*values[:index], less, *values[index + 1 :])}


def _down(value: int, smallest: int) -> list[int]:
    """What to try below ``value``: the smallest, then by halves, a quarter off, one less."""
    below = (smallest, math.ceil(value / 2), value - value // 4, value - 1)
    return [less for less in dict.fromkeys(below) if smallest <= less < value]

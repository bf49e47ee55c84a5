"""Rows of the support matrix, and what a cell may say: declarations times recorded runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import torch

from splitkv.backends.ascend import AscendBackend
from splitkv.backends.base import Backend
from splitkv.common.spec import DecodeSpec, Feature, Layout
from splitkv.common.support import IntSet, No, Support, dtype_name
from splitkv.kernels_ascend.routes import ROUTES
from splitkv.kernels_ascend.soc import Soc, soc_of
from splitkv.matrix.case import Case
from splitkv.matrix.evidence import Evidence, Kind, Run
from splitkv.matrix.parity import Outcome, refusals


class Word(Enum):
    """What a cell says."""

    PASSED = "passed on a device"
    INTERPRETER = "checked in the interpreter"
    STAND_IN = "checked against a stand-in"
    COMPILES = "compiles for a target"
    DECLARED = "declared, not run"
    BROKEN = "broken"
    NO = "no"


_WORDS = {
    Kind.DEVICE: Word.PASSED,
    Kind.INTERPRETER: Word.INTERPRETER,
    Kind.STAND_IN: Word.STAND_IN,
    Kind.AOT: Word.COMPILES,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: the cases that stand for it, and what a declaration says against it."""

    title: str
    holds: Callable[[Case], bool]
    against: Callable[[Support], str | None]


@dataclass(frozen=True, slots=True)
class Standing:
    """What one evidence file says of a row: of ``cases`` that are not refused ``passed`` passed."""

    evidence: Evidence
    cases: int
    passed: int
    error: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """``word``, what it stands on (best kind only), and the sentence of a "no" or of a failure."""

    word: Word
    standing: tuple[Standing, ...] = ()
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """A table besides the features: ``key`` of a spec (None: not in it), what speaks against it."""

    title: str
    key: Callable[[DecodeSpec], tuple[Any, ...] | None]
    against: Callable[[Support, DecodeSpec], str | None]


AXES = (
    Axis(
        "Layout",
        lambda spec: (spec.layout.value,),
        lambda support, spec: _of_no(support.features[_layout_feature(spec)]),
    ),
    Axis(
        "Head dims D / Dv",
        lambda spec: (spec.head_dim, spec.head_dim_v),
        lambda support, spec: (
            _outside(spec.head_dim, support.head_dim)
            or _outside(spec.head_dim_v, support.head_dim_v)
        ),
    ),
    Axis(
        "Query heads per kv head G",
        lambda spec: (spec.group,),
        lambda support, spec: _outside(spec.group, support.group),
    ),
    Axis(
        "Page size P",
        lambda spec: None if spec.page_size is None else (spec.page_size,),
        lambda support, spec: _outside(spec.page_size or 0, support.page_size),
    ),
    Axis(
        "Dtype of q / cache",
        lambda spec: (dtype_name(spec.dtype), dtype_name(spec.cache_dtype)),
        lambda support, spec: (
            _not_one_of(spec.dtype, support.dtypes)
            or _not_one_of(spec.cache_dtype, support.kv_dtypes)
        ),
    ),
    Axis(
        "Queries per request S",
        lambda spec: (spec.num_queries,),
        lambda support, spec: _outside(spec.num_queries, support.num_queries),
    ),
)


def tables(cases: Sequence[Case]) -> dict[str, tuple[Row, ...]]:
    """The rows by table: features, then each axis with the values that the cases have."""
    return {"Feature": tuple(map(_feature_row, Feature))} | {
        axis.title: _axis_rows(axis, cases) for axis in AXES
    }


def routes(backend: Backend, cases: Sequence[Case]) -> tuple[Row, ...]:
    """A row for each of the ways in which ``backend`` computes the cases; none if there is one."""
    taken = [case for case in cases if not refusals(backend, case)]
    named = {case.id: route for case in taken if (route := backend.route(case.spec)) is not None}
    return tuple(_route_row(route, named) for route in sorted(set(named.values())))


@dataclass(frozen=True, slots=True)
class RouteCell:
    """What one route says on one chip: its cell, and how many of the cases it would take there."""

    cell: Cell
    takes: int


def chips(backend: Backend) -> dict[str, Backend]:
    """The backend decided for each chip generation, by the generation's name; none where its
    answers do not depend on the chip.
    """
    if not isinstance(backend, AscendBackend):
        return {}
    return {soc.value: AscendBackend(soc=soc) for soc in Soc}


def of_chip(evidence: Iterable[Evidence], chip: str) -> list[Evidence]:
    """Runs of that chip's devices, or of a stand-in under such a name."""
    return [entry for entry in evidence if soc_of(entry.device) is Soc(chip)]


def chip_routes(
    chip: str, evidence: Iterable[Evidence], cases: Sequence[Case]
) -> dict[str, RouteCell]:
    """Every route of the Ascend backend on one chip, by name.

    A run counts for the route that the backend chose in it; what a route would take besides stands
    on nothing recorded.
    """
    backend, runs = AscendBackend(soc=Soc(chip)), of_chip(evidence, chip)
    chosen = {case.id: backend.choice(case.spec).route for case in cases}
    found = {}
    for route in ROUTES:
        reasons = _route_refusals(Soc(chip), route.name, route.state, tuple(cases))
        takes = sum(not given for given in reasons.values())
        if not takes:
            kind = [case.id for case in cases if not route.structural(case.spec)]
            nearest = min((reasons[case_id] for case_id in kind or reasons), key=len)
            no = Cell(Word.NO, sentence="every case is refused: " + "; ".join(nearest))
            found[route.name] = RouteCell(no, 0)
            continue
        served = {case.id for case in cases if chosen[case.id] is route}
        row = _served_row(route.name, served)
        serves = served & {case_id for case_id, given in reasons.items() if not given}
        said = cell(row, backend, runs, cases) if serves else Cell(Word.DECLARED)
        found[route.name] = RouteCell(said, takes)
    return found


@cache
def _route_refusals(
    soc: Soc, route: str, needs_lse: bool, cases: tuple[Case, ...]
) -> dict[str, list[str]]:
    """By case, why this route alone would not take it. Page and data both ask, of every case."""
    named = AscendBackend(soc=soc, route=route, needs_lse=needs_lse)
    return {case.id: refusals(named, case) for case in cases}


def cell(row: Row, backend: Backend, evidence: Iterable[Evidence], cases: Sequence[Case]) -> Cell:
    """What the matrix says of ``backend``; runs of a case that has changed since do not count."""
    if (sentence := row.against(backend.support)) is not None:
        return Cell(Word.NO, sentence=sentence)
    of_row = [case for case in cases if row.holds(case)]
    reasons = {case.id: refusals(backend, case) for case in of_row}
    taken = [case for case in of_row if not reasons[case.id]]
    if not taken:
        nearest = min(reasons.values(), key=len)
        return Cell(Word.NO, sentence="every case is refused: " + "; ".join(nearest))
    files = [entry for entry in evidence if entry.backend == backend.name]
    failed = [
        f"{run.case} on {entry.device}"
        for entry in files
        for run in current_runs(entry, taken)
        if run.outcome is Outcome.FAILED
    ]
    if failed:
        return Cell(Word.BROKEN, sentence=", ".join(failed))
    for kind in Kind:
        standing = [_standing(entry, taken) for entry in files if entry.kind is kind]
        if found := tuple(entry for entry in standing if entry.passed):
            return Cell(_WORDS[kind], found)
    return Cell(Word.DECLARED)


def of_today(evidence: Iterable[Evidence], sources: Mapping[str, str]) -> tuple[Evidence, ...]:
    """``evidence`` as cells take it: without failures of sources that have changed since.

    Whether these are mended, the next run says; the runs' table lists them until then.
    """
    return tuple(
        entry
        if entry.sources == sources[entry.backend]
        else replace(
            entry, runs=tuple(run for run in entry.runs if run.outcome is not Outcome.FAILED)
        )
        for entry in evidence
    )


def current_runs(evidence: Evidence, cases: Iterable[Case]) -> list[Run]:
    """The recorded runs of ``cases`` as they are defined now."""
    digests = {case.id: case.digest for case in cases}
    return [run for run in evidence.runs if digests.get(run.case) == run.case_digest]


def _standing(evidence: Evidence, taken: Sequence[Case]) -> Standing:
    runs = current_runs(evidence, taken)
    passed = [run for run in runs if run.outcome is Outcome.PASSED]
    refused = [run for run in runs if run.outcome is Outcome.REFUSED]  # for what tensors showed
    errors = [run.error for run in passed if run.error is not None]
    return Standing(evidence, len(taken) - len(refused), len(passed), max(errors, default=None))


def _feature_row(feature: Feature) -> Row:
    return Row(
        feature.value,
        lambda case: feature in case.features,
        lambda support: _of_no(support.features[feature]),
    )


def _of_no(no: No | None) -> str | None:
    if no is None:
        return None
    whose = {"NOT_YET": "not yet", "UPSTREAM": "upstream", "NEVER": "never"}[no.why.name]
    return f"{whose}: {no.reason}" + (f"; {no.remedy}" if no.remedy else "")


def _axis_rows(axis: Axis, cases: Sequence[Case]) -> tuple[Row, ...]:
    first = {key: case.spec for case in reversed(cases) if (key := axis.key(case.spec)) is not None}
    return tuple(_axis_row(axis, key, first[key]) for key in sorted(first))


def _axis_row(axis: Axis, key: tuple[Any, ...], spec: DecodeSpec) -> Row:
    title = " / ".join(dict.fromkeys(map(str, key)))
    return Row(
        title,
        lambda case: axis.key(case.spec) == key,
        lambda support: axis.against(support, spec),
    )


def _served_row(title: str, served: set[str]) -> Row:
    return Row(title, lambda case: case.id in served, lambda support: None)


def _route_row(route: str, named: Mapping[str, str]) -> Row:
    return Row(route, lambda case: named.get(case.id) == route, lambda support: None)


def _layout_feature(spec: DecodeSpec) -> Feature:
    if spec.layout.paged:
        return Feature.PAGED
    return Feature.PACKED if spec.layout is Layout.PACKED else Feature.DENSE


def _outside(value: int, allowed: IntSet) -> str | None:
    return None if value in allowed else f"{value} is not in {allowed}"


def _not_one_of(dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> str | None:
    if dtype in allowed:
        return None
    return f"{dtype_name(dtype)} is not one of {', '.join(map(dtype_name, allowed))}"

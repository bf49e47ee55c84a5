"""Planted bugs, one at a time: parity fails, and the support matrix says "broken" in their rows."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch

import mutants_ascend
import mutants_cpu
import mutants_cuda
from mutants import Mutant, Patch
from splitkv.backends.base import Backend
from splitkv.backends.registry import backend_named
from splitkv.common.support import UnsupportedError
from splitkv.kernels_ascend import standin
from splitkv.matrix import parity
from splitkv.matrix.cases import CASES
from splitkv.matrix.cells import Word, cell, tables
from splitkv.matrix.evidence import Kind, record
from splitkv.matrix.parity import SEED, Outcome, Result, backends_for, run_case

BY_ID = {case.id: case for case in CASES}
CPU = torch.device("cpu")
GPU = torch.cuda.is_available()
PASSED = {
    Kind.DEVICE: Word.PASSED,
    Kind.INTERPRETER: Word.INTERPRETER,
    Kind.STAND_IN: Word.STAND_IN,
}


def _parameters() -> list[object]:
    planted = (
        (backends_for("cpu")[0], mutants_cpu.MUTANTS),
        (backends_for("cuda", interpreter=not GPU)[0], mutants_cuda.MUTANTS),
        (backends_for("ascend")[0], mutants_ascend.MUTANTS),
    )
    return [
        pytest.param(backend, mutant, id=f"{backend.name}-{mutant.plant.__name__}")
        for backend, mutants in planted
        for mutant in mutants
    ]


@pytest.fixture
def in_reach(backend: Backend) -> Iterator[None]:
    with standin.installed() if backend.name == "ascend" else nullcontext():
        if (missing := backend.missing()) is not None:
            pytest.skip(missing)
        yield


def results_of(backend: Backend, ids: Sequence[str]) -> list[Result]:
    return [run_case(backend, BY_ID[name]) for name in ids]


def words_of(backend: Backend, results: Sequence[Result]) -> dict[str, Word]:
    """What the feature table says of ``backend`` if these are all the runs there are."""
    cases = [BY_ID[result.case] for result in results]
    evidence = record(backend, CPU, cases, results, SEED)
    rows = tables(CASES)["Feature"]
    return {row.title: cell(row, backend, [evidence], CASES).word for row in rows}


@pytest.mark.filterwarnings("ignore:page size")
@pytest.mark.usefixtures("in_reach")
@pytest.mark.parametrize(("backend", "mutant"), _parameters())
def test_a_planted_bug_turns_parity_red(
    backend: Backend, mutant: Mutant, monkeypatch: Patch
) -> None:
    ids = (*mutant.touched, *mutant.spared)
    before = results_of(backend, ids)
    assert [result.outcome for result in before] == [Outcome.PASSED] * len(ids)
    words = words_of(backend, before)
    good = PASSED[Kind(backend.evidence)]
    assert {words[title] for title in mutant.broken + mutant.whole} == {good}

    mutant.plant(monkeypatch)
    after = results_of(backend, ids)
    failed = tuple(result.case for result in after if result.outcome is Outcome.FAILED)
    assert failed == mutant.touched
    words = words_of(backend, after)
    assert {words[title] for title in mutant.broken} == {Word.BROKEN}
    assert {words[title] for title in mutant.whole} <= {good}


def test_a_refusal_in_other_words_fails(monkeypatch: Patch) -> None:
    def vague(*_: object, **__: object) -> None:
        raise UnsupportedError("not supported")

    monkeypatch.setattr(parity, "decode", vague)
    (result,) = results_of(backend_named("ascend"), ["soft-cap"])
    assert result.outcome is Outcome.FAILED
    assert any("not in the refusal" in reason for reason in result.why)


def test_a_refused_call_that_runs_fails(monkeypatch: Patch) -> None:
    monkeypatch.setattr(parity, "decode", lambda *_, **__: None)
    (result,) = results_of(backend_named("ascend"), ["soft-cap"])
    assert result.outcome is Outcome.FAILED
    assert "it ran" in result.why[0]

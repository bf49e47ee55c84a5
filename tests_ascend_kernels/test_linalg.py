"""What Triton-Ascend lowered the kernels to, run on this CPU, is the float64 reference's answer."""

from pathlib import Path

import pytest

from mutants_own_kernel import MERGE_MUTANTS, SPLIT_MUTANTS, SourceMutant, plant
from on_cpu import run_lowered
from own_kernel import EXTRA, OwnKernel, taken
from own_merge import MERGES, error_and_complaints
from splitkv.kernels_ascend.kernels.launch import Launch
from splitkv.matrix.case import Memory
from splitkv.matrix.kernel_record import load
from splitkv.matrix.parity import Outcome, run_case

MERGE = {merge.id: merge for merge in MERGES}
SPLIT = {
    case.id: case for case in (*taken(), *EXTRA) if case.memory is not Memory.STRIDED
}  # which it refuses, as tests/test_ascend_triton_split.py shows
RECORD = load()


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run what Triton-Ascend made of the kernel."""
    monkeypatch.setattr(Launch, "run", run_lowered)


@pytest.mark.parametrize("name", MERGE)
def test_merge(name: str) -> None:
    assert error_and_complaints(MERGE[name], run_lowered)[1] == []


@pytest.mark.parametrize("name", SPLIT)
def test_split(name: str) -> None:
    result = run_case(OwnKernel(), SPLIT[name])
    assert (result.outcome, result.why) == (Outcome.PASSED, ())


@pytest.mark.parametrize("mutant", MERGE_MUTANTS, ids=[mutant.id for mutant in MERGE_MUTANTS])
def test_a_mutant_of_the_merge_is_rejected(
    mutant: SourceMutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(mutant, "merge", tmp_path, monkeypatch)
    for name in mutant.cases:
        assert error_and_complaints(MERGE[name], run_lowered)[1], f"{name} does not see it"
    assert RECORD["mutants_rejected"]["merge"][mutant.id] == list(mutant.cases)


@pytest.mark.parametrize("mutant", SPLIT_MUTANTS, ids=[mutant.id for mutant in SPLIT_MUTANTS])
def test_a_mutant_of_the_split_is_rejected(
    mutant: SourceMutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(mutant, "split", tmp_path, monkeypatch)
    for name in mutant.cases:
        result = run_case(OwnKernel(), SPLIT[name])
        assert result.outcome is Outcome.FAILED, f"{name} does not see it"
        assert result.errors is not None, "it did not compute: " + "; ".join(result.why)
    assert RECORD["mutants_rejected"]["split"][mutant.id] == list(mutant.cases)


def test_the_record_is_of_these_cases() -> None:
    assert list(RECORD["linalg"]["merge"]) == list(MERGE)
    assert list(RECORD["linalg"]["split"]) == list(SPLIT)

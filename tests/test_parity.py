"""Every case on every backend in reach: the reference's answer, or a refusal as declared."""

import pytest

from splitkv.backends.base import Backend
from splitkv.matrix.case import Case, Size
from splitkv.matrix.cases import CASES
from splitkv.matrix.parity import Outcome, backends_for, refusals, run_case

(CPU,) = backends_for("cpu")


def _parameters() -> list[object]:
    return [
        pytest.param(
            CPU,
            case,
            id=f"{CPU.name}-{case.id}",
            marks=[pytest.mark.slow] if case.size is Size.LARGE else [],
        )
        for case in CASES
    ]


@pytest.mark.parametrize(("backend", "case"), _parameters())
def test_parity(backend: Backend, case: Case) -> None:
    result = run_case(backend, case)
    expected = Outcome.REFUSED if refusals(backend, case) else Outcome.PASSED
    assert result.outcome is expected, "; ".join(result.why)

"""Every case on every backend in reach: the reference's answer, or a refusal as declared.

Without a GPU "cuda" is the Triton kernels in Triton's interpreter; "ascend" is our host code on a
stand-in for the vendor's operators. On their devices `splitkv parity` runs the same cases.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from splitkv.backends.base import Backend
from splitkv.kernels_ascend import standin
from splitkv.matrix.case import Case, Size
from splitkv.matrix.cases import CASES
from splitkv.matrix.parity import Outcome, backends_for, refusals, run_case

(CPU,) = backends_for("cpu")
(ASCEND,) = backends_for("ascend")
(CUDA,) = backends_for("cuda", interpreter=not torch.cuda.is_available())

QUICK_IN_THE_INTERPRETER = frozenset(
    (
        "lengths-zero-between",
        "batch-zero",
        "layout-bsnd",
        "layout-packed-fp32",
        "layout-hnd",
        "memory-joint",
        "poison-inf",
        "nan-in-v",
        "head-dim-80",
        "group-3",
        "page-3",
        "page-16",
        "mla-64-window",
        "scales-channel-token",
        "queries-ragged",
        "queries-beyond-keys",
        "non-causal-ragged",
        "window-lengths",
        "window-ragged",
        "anchors",
        "blocks-longer",
        "starts-longer",
        "soft-cap-window",
        "alibi-window",
        "bias-hides",
        "mask-wide",
        "sinks",
        "splits-size",
        "plan-longer-window",
        "state-merged",
        "model-gpt-oss",
        "pair-0f83e41e",
        "pair-5ebb4745",
        "pair-65a947f0",
        "pair-88e9a029",
        "pair-9e9113ba",
        "pair-c028e42f",
    )
)
"""A case for every feature that the kernels take, what goes wrong most, and a few where much meets;
the rest is slow.
"""


def _is_slow(backend: Backend, case: Case) -> bool:
    if refusals(backend, case):
        return False
    interpreted = backend.evidence == "interpreter" and case.id not in QUICK_IN_THE_INTERPRETER
    return interpreted or case.size is Size.LARGE


def _parameters() -> list[object]:
    return [
        pytest.param(
            backend,
            case,
            id=f"{backend.name}-{case.id}",
            marks=[pytest.mark.slow] if _is_slow(backend, case) else [],
        )
        for backend in (CUDA, ASCEND, CPU)
        for case in CASES
    ]


@pytest.fixture
def in_reach(backend: Backend) -> Iterator[None]:
    with standin.installed() if backend is ASCEND else nullcontext():
        yield


@pytest.mark.filterwarnings("ignore:page size")
@pytest.mark.usefixtures("in_reach")
@pytest.mark.parametrize(("backend", "case"), _parameters())
def test_parity(backend: Backend, case: Case) -> None:
    result = run_case(backend, case)
    if result.outcome is Outcome.MISSING:
        pytest.skip("; ".join(result.why))
    declared = bool(refusals(backend, case)) or result.outcome is Outcome.REFUSED
    assert result.outcome is (Outcome.REFUSED if declared else Outcome.PASSED), "; ".join(
        result.why
    )

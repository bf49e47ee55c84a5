"""Faults that are known: what is not mended is expected to fail, until somebody mends it.

A kernel multiplies the values of a tile for all of its rows at once. A NaN (or infinity) in a value
that one query sees would reach the rows of that tile that do not see it, since 0 * NaN is NaN. The
CPU leaves such values out, the CUDA kernels keep them apart, our own Ascend kernel does not yet.
"""

import pytest
import torch

from own_kernel import OwnKernel
from splitkv.backends.base import Backend
from splitkv.backends.cpu import CpuBackend
from splitkv.matrix.case_text import from_text
from splitkv.matrix.parity import Outcome, backends_for, run_case

(CUDA,) = backends_for("cuda", interpreter=not torch.cuda.is_available())
LATER_VALUE_IS_NAN = (
    "nan-seen-later seq_lens=2 nan=v num_q_heads=1 num_kv_heads=1 head_dim=16 layout=bsnd "
    "dtype=float16 num_queries=2"
)
LEAKS = pytest.mark.xfail(
    raises=AssertionError, reason="a NaN value that one query sees reaches other rows of its tile"
)


@pytest.mark.parametrize(
    "backend",
    [CpuBackend(), CUDA, pytest.param(OwnKernel(), marks=LEAKS)],
    ids=["cpu", "cuda", "ascend own kernel"],
)
def test_a_nan_value_stays_with_the_queries_that_see_it(backend: Backend) -> None:
    result = run_case(backend, from_text(LATER_VALUE_IS_NAN))
    assert result.outcome is Outcome.PASSED, result.why

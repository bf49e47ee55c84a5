"""Whether a case that nobody chose is out of bounds by a fault or by chance.

The bounds are twice the error that eager PyTorch makes on the same numbers. The table's cases were
chosen once; among thousands of random ones eager is now and then lucky, most of all where softmax
is sharp and the last digit of a score is all the error there is. A fault is anything else that
fails, and an error that neither rounding of scores nor other numbers explain.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from splitkv.backends.base import Backend
from splitkv.matrix.case import Case
from splitkv.matrix.closeness import Errors
from splitkv.matrix.draw import dequantised, request
from splitkv.matrix.parity import SEED, Outcome, Result, run_case

SURELY = 2.0
"""Times the bound (and what rounding adds): more than that is no chance."""
AGAIN = (1, 2, 3)
"""Seeds of other numbers that a result has to be out of bounds with, all of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case on one backend. close: out of bounds by chance; ``result`` then has passed, and its
    ``why`` says by how much it was out.
    """

    result: Result
    close: bool = False


def judge(backend: Backend, case: Case) -> Verdict:
    """Run ``case`` as parity does, and once for each seed of ``AGAIN`` if that leaves a doubt."""
    result = run_case(backend, case)
    if result.outcome is not Outcome.FAILED or not _only_bounds(result):
        return Verdict(result)
    over = excess(result, score_rounding(case))
    if over > SURELY:
        return Verdict(result)
    if over > 1 and all(_fails(backend, case, seed) for seed in AGAIN):
        return Verdict(result)
    return Verdict(replace(result, outcome=Outcome.PASSED), close=True)


def excess(result: Result, extra: float = 0.0) -> float:
    """The largest of the errors over its bound plus ``extra``; 0 where nothing was computed. An
    infinite bound, where eager PyTorch overflows, says nothing.
    """
    if result.errors is None or result.allowed is None:
        return 0.0
    pairs = _pairs(result.errors, result.allowed)
    return max((got / (most + extra) for got, most in pairs if math.isfinite(most)), default=0.0)


def score_rounding(case: Case) -> float:
    """Two spacings of the largest |q| |k| sm_scale, in the precision that scores are summed in.

    A sum of D products that is rounded anyhow is off by up to D spacings of that (Cauchy-Schwarz);
    a weight is off by as much, relatively.
    """
    wide = case.spec.dtype == torch.float64
    q_norm = k_norm = 0.0
    for index in range(len(case.seq_lens)):
        drawn = request(case, SEED, index)
        keys = dequantised(drawn.k, drawn.k_scale, drawn.k_zero).nan_to_num().norm(dim=-1)
        q_norm = max(q_norm, drawn.q.double().norm(dim=-1).max().item() if drawn.q.numel() else 0.0)
        k_norm = max(k_norm, keys.max().item() if keys.numel() else 0.0)
    eps = torch.finfo(torch.float64 if wide else torch.float32).eps
    return 2 * eps * q_norm * k_norm * abs(case.spec.scale)


def _fails(backend: Backend, case: Case, seed: int) -> bool:
    return run_case(backend, case, seed=seed).outcome is Outcome.FAILED


def _only_bounds(result: Result) -> bool:
    """Whether bounds are all that it fails."""
    if result.errors is None or result.allowed is None:
        return False
    return list(result.why) == result.errors.exceeds(result.allowed)


def _pairs(errors: Errors, allowed: Errors) -> Iterator[tuple[float, float]]:
    for name in Errors.__slots__:
        yield getattr(errors, name), getattr(allowed, name)

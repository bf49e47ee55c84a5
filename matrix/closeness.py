"""How far from the float64 reference a result may be: twice what plain eager PyTorch is off.

Nothing here is tuned by hand. Eager attention on the same input in the call's dtype (scores and
weights rounded to it, softmax in float32) sets the bound for ``out``; eager in float32 the one for
``lse``, which every backend computes in float32. A NaN passes only where the reference has one, and
rows that see nothing must be 0 and -inf exactly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.matrix.reference import Answer, reference


@dataclass(frozen=True, slots=True)
class Errors:
    """How far a result is off, or may be.

    norm: |out - reference| / |reference| over everything. worst: the largest difference of one
    element over the root mean square of its row [Dv]. lse: the largest difference over
    max(1, |lse|).
    Infinite where NaN, 0 or -inf stand in the wrong place.
    """

    norm: float
    worst: float
    lse: float

    def exceeds(self, bounds: "Errors") -> list[str]:
        """What is out of bounds, as sentences."""
        pairs = (
            ("norm of the error", self.norm, bounds.norm),
            ("worst element", self.worst, bounds.worst),
            ("lse", self.lse, bounds.lse),
        )
        return [
            f"{name}: {error:.2e}, allowed {bound:.2e}"
            for name, error, bound in pairs
            if not error <= bound
        ]


def errors(out: Tensor, lse: Tensor, answer: Answer) -> Errors:
    """How far host tensors ``out`` and ``lse`` are from ``answer``.

    Raises:
        ValueError: another shape.
    """
    for name, got, want in (("out", out, answer.out), ("lse", lse, answer.lse)):
        if got.shape != want.shape:
            raise ValueError(f"{name} must be {list(want.shape)}, got {list(got.shape)}")
    return Errors(*_out_errors(out.double(), answer.out), _lse_error(lse.double(), answer.lse))


def bounds(
    call: DecodeCall, sinks: Tensor | None, answer: Answer, rounded_splits: int = 0
) -> Errors:
    """What a backend may be off on ``call`` (host tensors).

    rounded_splits: splits of a request whose ``out`` is rounded to the call's dtype, once each.
    """
    dtype = call.q.dtype
    single = _eager(call, sinks, torch.float32, answer)
    low = single if dtype in (torch.float32, torch.float64) else _eager(call, sinks, dtype, answer)
    # float64 cannot be measured against itself: what float32 is off, in the smaller unit
    unit = _eps(dtype) / _eps(torch.float32) if dtype == torch.float64 else 1.0
    extra = rounded_splits * _eps(dtype) / 2
    return Errors(
        norm=max(2 * low.norm * unit, _floor(dtype)) + extra,
        worst=max(2 * low.worst * unit, _floor(dtype)) + extra,
        lse=max(2 * single.lse, _floor(torch.float32)) * unit,
    )


def _eager(call: DecodeCall, sinks: Tensor | None, dtype: torch.dtype, answer: Answer) -> Errors:
    eager = reference(call, sinks, dtype)
    return errors(eager.out, eager.lse, answer)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _floor(dtype: torch.dtype) -> float:
    """Where eager happens to be exact: one spacing of a 16-bit type, 16 (2e-6) of a wider one."""
    return _eps(dtype) * (1 if dtype.itemsize == 2 else 16)


def _out_errors(out: Tensor, wanted: Tensor) -> tuple[float, float]:
    if wanted.numel() == 0:
        return 0.0, 0.0
    expected_nan = torch.isnan(wanted)
    if not torch.equal(torch.isnan(out), expected_nan):
        return math.inf, math.inf
    difference = (out - wanted).masked_fill(expected_nan, 0.0).abs()
    wanted = wanted.masked_fill(expected_nan, 0.0)
    spread = wanted.square().mean(-1, keepdim=True).sqrt()
    zero = spread == 0
    if (difference * zero).any():  # a row that sees nothing is 0, not nearly 0
        return math.inf, math.inf
    norm = (difference.norm() / wanted.norm()).item() if wanted.any() else 0.0
    return norm, (difference / spread.masked_fill(zero, 1.0)).max().item()


def _lse_error(lse: Tensor, wanted: Tensor) -> float:
    if wanted.numel() == 0:
        return 0.0
    finite = torch.isfinite(wanted)
    same = torch.isnan(lse) == torch.isnan(wanted)
    same &= (lse == wanted) | finite | torch.isnan(wanted)
    if not same.all():
        return math.inf
    off = (lse - wanted).abs() / wanted.abs().clamp(min=1.0)
    return off[finite].max().item() if finite.any() else 0.0

"""States made from scores and values by their definition, and how far a merge may be from it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from splitkv.common.state import PartialState


def state_of(scores: Tensor, values: Tensor) -> PartialState:
    """The state of scores [..., H, n] over values [..., H, n, Dv] or [n, Dv]; -inf masks a key."""
    if scores.shape[-1] == 0:
        heads = (*scores.shape[:-1], values.shape[-1])
        nothing = torch.full(scores.shape[:-1], -math.inf, dtype=scores.dtype)
        return PartialState(nothing, nothing.clone(), torch.zeros(heads, dtype=scores.dtype))
    lse = torch.logsumexp(scores, -1)
    seen = (scores > -math.inf) | scores.isnan()
    weights = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)
    kept = torch.where(seen[..., None], values, 0.0)  # 0 * NaN is NaN
    out = (weights[..., None] * kept).sum(-2)
    nothing = (lse == -math.inf)[..., None]
    return PartialState(scores.amax(-1), lse, torch.where(nothing, 0.0, out))


def as_double(state: PartialState) -> PartialState:
    return PartialState(state.max.double(), state.lse.double(), state.out.double())


def bits(state: PartialState) -> tuple[bytes, ...]:
    """Equal only for equal bits: the sign of zero counts, and so does a NaN's payload."""
    parts = (state.max, state.lse, state.out)
    return tuple(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def assert_merged(
    merged: PartialState, expected: PartialState, parts: Sequence[PartialState]
) -> None:
    """``merged`` is ``expected`` (float64) up to the rounding that float32 cannot avoid.

    An lse is rounded to a spacing of |lse| * eps, which moves a weight by that factor; each of the
    parts adds one rounding more. The bound is absolute in units of the largest |out| merged; below
    the normal numbers rounding is to a fixed spacing instead.
    """
    eps = torch.finfo(merged.lse.dtype).eps
    spacing = torch.finfo(merged.out.dtype).smallest_normal * torch.finfo(merged.out.dtype).eps
    finite = [part.lse[part.lse.isfinite()].abs() for part in parts]
    largest_lse = max((float(lse.max()) for lse in finite if lse.numel()), default=0.0)
    largest_out = max(
        (float(part.out.abs().max()) for part in parts if part.out.numel()), default=0.0
    )
    slack = (len(parts) + 8 + 4 * largest_lse) * eps * largest_out + (len(parts) + 1) * spacing
    assert not merged.out.isnan().any()
    assert bool(((merged.out.double() - expected.out).abs() <= slack).all())
    nothing = expected.lse == -math.inf
    assert torch.equal(merged.lse == -math.inf, nothing)
    assert torch.equal(merged.max.double(), expected.max)
    off = (merged.lse.double() - expected.lse)[~nothing].abs()
    assert bool((off <= (len(parts) + 8 + largest_lse) * eps).all())
    assert bool((merged.out[nothing] == 0).all())

"""The border where the vendor's ways of saying "nothing seen" become ours: lse = -inf, out = 0."""

import math

import torch
from torch import Tensor

SENTINEL_BELOW = -1e30
"""The legacy path writes the finite -3.4e38; no softmax over 16-bit inputs comes near this."""


def normalise(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Operator results as float32 state entries.

    out: [..., Dv] in any float dtype; lse: float32 [...]. The operators report a row without keys
    as lse +inf (most paths), -3.4e38 (BSH, BSND and BNSD with one query) or -inf (a caller's own
    filler), each with out 0. A NaN stays a NaN, and an lse of +inf beside an out that is not 0
    stays too: that is an overflow of visible scores and must be seen downstream.

    Returns:
        ``(out, lse)`` in float32.
    """
    out = out.float()
    nothing = (lse == math.inf) & (out == 0).all(-1)
    nothing = nothing | (lse <= SENTINEL_BELOW)
    return torch.where(nothing[..., None], 0.0, out), torch.where(nothing, -math.inf, lse)

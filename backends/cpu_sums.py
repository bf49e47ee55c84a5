"""What tiles leave behind on the CPU, and how tiles of one strand merge."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.common.state import PartialState

PILE_BYTES = 8 << 20
"""Most bytes of outputs that wait to be merged, and never fewer than two tiles' outputs."""


@dataclass(slots=True)
class Sums:
    """Largest score, sum of exp(score - largest), and normalised output.

    max, sum: [...]; out: [..., Dv]. Nothing seen: -inf, 0, 0. An lse is rounded in proportion to
    its size, and merge weights with it; this pair merges without that loss.
    """

    max: Tensor
    sum: Tensor
    out: Tensor

    @classmethod
    def nothing(cls, shape: tuple[int, ...], head_dim_v: int, dtype: torch.dtype) -> "Sums":
        return cls(
            torch.full(shape, -math.inf, dtype=dtype),
            torch.zeros(shape, dtype=dtype),
            torch.zeros(*shape, head_dim_v, dtype=dtype),
        )

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.max, self.sum, self.out

    def state(self) -> PartialState:
        """As a state in float64, so that splits merge as exactly as tiles do."""
        top = self.max.double()
        return PartialState(top, top + torch.log(self.sum.double()), self.out.double())


@dataclass(slots=True)
class Pile:
    """Sums of successive tiles, merged when the pile is full and at the end.

    max, sum: [slots, ...]; out: [slots, ..., Dv].
    """

    max: Tensor
    sum: Tensor
    out: Tensor
    used: int = 0

    @classmethod
    def empty(
        cls, tiles: int, shape: tuple[int, ...], head_dim_v: int, dtype: torch.dtype
    ) -> "Pile":
        """Room for ``tiles`` tiles, or as many as ``PILE_BYTES`` hold."""
        fitting = PILE_BYTES // (math.prod(shape) * head_dim_v * dtype.itemsize)
        slots = min(tiles, max(fitting, 2))
        return cls(
            torch.empty(slots, *shape, dtype=dtype),
            torch.empty(slots, *shape, dtype=dtype),
            torch.empty(slots, *shape, head_dim_v, dtype=dtype),
        )

    def push(self, top: Tensor, total: Tensor) -> Tensor:
        """Takes max and sum of the next tile; returns where its output goes."""
        if self.used == len(self.max):
            merged = self.merged()
            self.max[0], self.sum[0], self.out[0] = merged.parts
            self.used = 1
        self.max[self.used], self.sum[self.used] = top, total
        self.used += 1
        return self.out[self.used - 1]

    def merged(self) -> Sums:
        """The sums of all tiles so far."""
        if self.used == 1:
            return Sums(self.max[0], self.sum[0], self.out[0])
        tops = self.max[: self.used]
        top = tops.amax(0)
        weights = torch.exp(tops - torch.where(top == -math.inf, 0.0, top)) * self.sum[: self.used]
        total = weights.sum(0)
        out = (self.out[: self.used] * weights[..., None]).sum(0)
        return Sums(top, total, out / torch.where(total == 0.0, 1.0, total)[..., None])

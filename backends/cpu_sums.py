"""What tiles leave behind on the CPU, and how tiles of one strand merge."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitkv.common.state import PartialState

PILE_ELEMENTS = 1 << 17
"""Elements of outputs that wait to be merged, or one tile's. A quarter of that cost a fifth of the
speed in merges (tried once: 32:8 heads, 8 x 8192 tokens, float32)."""


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

    def map(self, change: Callable[[Tensor], Tensor]) -> "Sums":
        """With each of the three changed."""
        return Sums(change(self.max), change(self.sum), change(self.out))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.max, self.sum, self.out

    def state(self) -> PartialState:
        """In float64, so that states of splits merge as exactly as sums do."""
        return PartialState(self.max.double(), log_sum(self.max, self.sum), self.out.double())


def log_sum(top: Tensor, total: Tensor) -> Tensor:
    """The lse, in float64."""
    return torch.log(total.double()).add_(top)


@dataclass(slots=True)
class Pile:
    """Sums of tiles of the same strands, in order, each with a first axis of disjoint tokens."""

    waiting: list[Sums] = field(default_factory=list)

    def add(self, sums: Sums) -> None:
        """Puts one more on the pile, and merges what lies there first if that would be too much."""
        waiting = sum(part.out.numel() for part in self.waiting)
        if waiting and waiting + sums.out.numel() >= PILE_ELEMENTS:
            self.waiting = [self.merged().map(lambda part: part[None])]
        self.waiting.append(sums)

    def merged(self) -> Sums:
        """The sums over all tokens so far."""
        if len(self.waiting) == 1:
            tops, totals, outs = self.waiting[0].parts
            if len(tops) == 1:
                return Sums(tops[0], totals[0], outs[0])
        else:
            columns = zip(*(sums.parts for sums in self.waiting), strict=True)
            tops, totals, outs = (torch.cat(column) for column in columns)
        top = tops.amax(0)
        weights = torch.exp(tops - torch.where(top == -math.inf, 0.0, top)) * totals
        total = weights.sum(0)
        out = (outs * weights[..., None]).sum(0)
        return Sums(top, total, out / torch.where(total == 0.0, 1.0, total)[..., None])

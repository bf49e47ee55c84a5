"""What a planted bug is: see test_parity_mutants.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.common import plan
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState, as_list, merge_states_torch

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    plant: puts it in. touched: cases that must fail; spared: cases that must still pass. broken,
    whole: rows of the feature table that must then say so.
    """

    plant: Callable[[Patch], None]
    touched: tuple[str, ...]
    broken: tuple[str, ...]
    spared: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


def averaged(states: Any) -> PartialState:
    """The merge with the plain average of the outs in place of the weighted one."""
    parts = as_list(states)
    right = merge_states_torch(parts)
    if len(parts) == 1:
        return right
    return replace(right, out=torch.stack([part.out for part in parts]).mean(0))


def wider(spec: DecodeSpec) -> DecodeSpec:
    """The spec with a window of one more position, or block."""
    window = spec.sliding_window
    return spec if window is None else replace(spec, sliding_window=window + spec.window_block)


def widen_plans(patch: Patch) -> None:
    """Plans reach one position further back than the window does."""
    bounds = plan.visible_bounds
    patch.setattr(plan, "visible_bounds", lambda x, s, spec: bounds(x, s, wider(spec)))


def interleaved(q: Tensor, kv_heads: int) -> Tensor:
    """Heads [..., H, D] in the order that takes head h to belong to kv head h % K."""
    return q.unflatten(-2, (-1, kv_heads)).transpose(-2, -3).flatten(-3, -2)


def sink_per_split(backend: type[Backend]) -> Callable[[Patch], None]:
    """The sink enters once for each of two splits: its exponential counts twice."""

    def plant(patch: Patch) -> None:
        right = backend.decode

        def decode(self: Backend, *args: Any, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return right(self, *args, sinks=None if sinks is None else sinks + math.log(2))

        patch.setattr(backend, "decode", decode)

    plant.__name__ = "sink_per_split"
    return plant

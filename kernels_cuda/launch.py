"""One kernel launch as data: to be run, or compiled for a device that is not there."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel, its number of programs, its arguments by name, and the compiler's options.

    The programs lie on grid axis 0 alone, whose limit is 2**31 - 1 (the other axes end at 65535).
    """

    kernel: Any
    programs: int
    arguments: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)

    def run(self, device: torch.device) -> object:
        """Launch on ``device``, which need not be the current one; no programs, no launch.

        Returns what triton does: the compiled kernel, or None.
        """
        if not self.programs:
            return None
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self.kernel[(self.programs,)](**self.arguments, **self.options)


@cache
def early(device: torch.device) -> bool:
    """Whether kernels start before the one in front of them has ended (compute capability 9.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def broadcast_strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    """The strides as a kernel takes them, in elements; 0 where a dimension of 1 stands for all."""
    if tensor is None:
        return None
    return tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def query_strides(tensor: Tensor, dims: int) -> tuple[int, ...]:
    """Strides of a tensor of ``dims`` dimensions, or of a packed one, whose request stride is 0."""
    return (0,) * (dims - tensor.ndim) + tensor.stride()

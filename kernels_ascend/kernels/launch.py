"""One kernel launch as data: to be run, or lowered for a device that is not there."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel, its number of programs, and its arguments by name, in the kernel's order.

    programs: no more than the cores that run the kernel at once; each takes further work in a loop.
    A larger grid is cut into waves on the host's side, and its axis ends at 65535.
    """

    kernel: Any
    programs: int
    arguments: Mapping[str, object]

    def run(self, device: torch.device) -> None:
        """Launch on ``device``, which need not be the current one; no programs, no launch."""
        if self.programs:
            with torch.npu.device(device) if device.type == "npu" else nullcontext():  # type: ignore[attr-defined]
                self.kernel[(self.programs,)](**self.arguments)

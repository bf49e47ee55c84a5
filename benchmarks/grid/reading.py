"""The ceiling: how fast the bytes of a point can be read, by whichever way of reading is fastest.

It is a ceiling of reading at that size, launch and latency included, not a datasheet's rate.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from splitkv.cli.bench import reading as torch_sums
from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate, Timer, take_turns

_WAYS = (
    *((512, 1, 2), (1024, 1, 4), (1024, 2, 4), (1024, 4, 4), (2048, 1, 4), (2048, 2, 4)),
    *((2048, 4, 4), (4096, 1, 8), (4096, 2, 8), (8192, 1, 8), (8192, 2, 8), (16384, 1, 16)),
)
"""Elements of a block, blocks of a program, warps."""


@dataclass(slots=True)
class Reading:
    """Remembers which way was fastest at a size, so that each size is searched once in a run."""

    fastest: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def candidate(self, step: Step, timer: Timer, count: int) -> Candidate:
        """Reading as many bytes as ``step`` must, from the same sets of buffers."""
        if step.device.type != "cuda":
            return torch_sums(step)
        size = step.shape.kv_bytes
        if size not in self.fastest:
            readied = {
                str(index): timer.ready(kernel_reads(step, way), count)
                for index, way in enumerate(_WAYS)
            }
            timings = take_turns(readied, turns=3)
            best = min(timings, key=lambda name: timings[name].median)
            self.fastest[size] = _WAYS[int(best)]
        return kernel_reads(step, self.fastest[size])


def kernel_reads(step: Step, way: tuple[int, int, int]) -> Candidate:
    """One launch per set of buffers; way: elements of a block, blocks of a program, warps."""
    from benchmarks.grid.reading_kernel import read_kernel

    block, unroll, warps = way
    parts = step.necessary()
    programs = -(-len(parts[0]) // (block * unroll))
    sums = torch.empty(programs, device=step.device)
    # untyped: Triton takes numbers for its constants, and the compiler's options beside them
    options: dict[str, Any] = {"BLOCK": block, "UNROLL": unroll, "num_warps": warps}

    def read(part: torch.Tensor) -> torch.Tensor:
        launch = read_kernel[(programs,)]
        launch(part, sums, len(part), **options)
        return sums

    return Candidate([partial(read, part) for part in parts])

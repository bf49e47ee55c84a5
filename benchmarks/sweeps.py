"""Curves and single figures beside the grid: ``python -m benchmarks.sweeps [--only WORD,WORD]``.

length, batch: time against size, with an affine line through it. steps: lengths 1 to 8192 by 97,
against a smooth curve. splits: automatic splits against the best number found by trying all of a
dense list, and predicted against measured time, at the 40 points of the grid's subset "choice".
merge: 16 states of [256, 32, 128] in bfloat16. plan: host and device time of planning. Each part
replaces itself in the results file of its device, and is written when it is done.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.grid.points import SUBSETS, TINY
from benchmarks.parts import Part, Where, backend_of, micro, run_parts, turns_of
from splitkv.backends.base import Backend
from splitkv.backends.registry import select
from splitkv.cli.bench_shapes import Shape, Step, ours, steps
from splitkv.cli.bench_timing import Call, Candidate, Timing
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.state import PartialState

PAGE = 16
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SPLITS = sorted({round(1.19**power) for power in range(36)})
"""1 to 441: each number of splits within 19 % of one that is tried, all up to 6 tried."""


def main(arguments: Sequence[str] | None = None) -> int:
    return run_parts("sweeps", __doc__, PARTS, arguments)


# The parts


def length_sweep(where: Where) -> dict[str, object]:
    """8k to 1M tokens of one request, 8 query heads on 1."""
    powers = range(7, 10) if where.quick else range(13, 21)
    lengths = [size for power in powers for size in (2**power, 3 * 2 ** (power - 1))]
    if not where.quick:
        lengths = [length for length in lengths if length <= 2**20]
    seconds = [_automatic(where, Shape(8, 1, 128, (length,))).median for length in lengths]
    return _affine([float(length) for length in lengths], seconds)


def batch_sweep(where: Where) -> dict[str, object]:
    """1 to 256 requests of 8k tokens, 8 query heads on 1."""
    batches, length = ((1, 2, 4), 128) if where.quick else (_BATCHES, 8192)
    seconds = [_automatic(where, Shape(8, 1, 128, (length,) * size)).median for size in batches]
    return _affine([float(size) for size in batches], seconds)


def step_sweep(where: Where) -> dict[str, object]:
    """Lengths 1 to 8192 by 97, 8 query heads on 1: is there a cliff between neighbours?"""
    lengths = range(1, 800 if where.quick else 8193, 97)
    shapes = [Shape(8, 1, 128, (length,)) for length in lengths]
    seconds = [_automatic(where, shape).median for shape in shapes]
    smooth = np.polynomial.Polynomial.fit(list(lengths), seconds, 3)(np.array(lengths))
    return {
        "sizes": list(lengths),
        "us": [micro(value) for value in seconds],
        "worst_over_smooth": round(worst_ratio(seconds, smooth.tolist()), 4),
        "worst_over_neighbour": round(worst_ratio(seconds[1:], seconds[:-1]), 4),
    }


def split_sweep(where: Where) -> dict[str, object]:
    """Automatic splits and every number of a dense list, in turns."""
    rows = []
    for point in TINY if where.quick else SUBSETS["choice"]:
        step, backend = _step(where, point.shape)
        automatic = backend.plan(step.spec, point.shape.lengths)
        most = max(point.shape.lengths) // automatic.granule + 1
        plans: dict[str, SplitPlan] = {"automatic": automatic}
        for number in _SPLITS[:3] if where.quick else _SPLITS:
            if number <= most:
                plans[str(number)] = backend.plan(step.spec, point.shape.lengths, num_splits=number)
        ways = {name: ours(step, backend, plan) for name, plan in plans.items()}
        timings = turns_of(where, ways, point.shape.kv_bytes)
        best = min(timings, key=lambda name: timings[name].median)
        mine = timings["automatic"].median
        rows.append(
            {
                "point": point.id,
                "kv_bytes": point.shape.kv_bytes,
                "automatic_us": micro(mine),
                "automatic_splits": automatic.max_splits,
                "best": best,
                "over_best": round(mine / timings[best].median, 4),
                "predicted_over_measured": round(automatic.predicted_seconds / mine, 4),
                "us": {name: micro(timing.median) for name, timing in timings.items()},
            }
        )
        print(f"{point.id} {rows[-1]['over_best']} of the best ({best})", flush=True)
        del step, ways
        gc.collect()
    large = [row["predicted_over_measured"] for row in rows if row["kv_bytes"] >= 64e6]
    return {
        "points": rows,
        "worst_over_best": max(row["over_best"] for row in rows),
        "worst_prediction": max((abs(ratio - 1) for ratio in large), default=None),
    }


def merge_figures(where: Where) -> dict[str, object]:
    """16 states of [256, 32, 128], ``out`` in bfloat16, more of them than a cache holds."""
    rows, heads, dim = (8, 4, 64) if where.quick else (256, 32, 128)
    backend = backend_of(where.device)
    sets = [States16.random(where, rows, heads, dim) for _ in range(2 if where.quick else 8)]
    wide = [states.widened() for states in sets]
    ways = {"float32": Candidate([partial(backend.merge, states) for states in wide])}
    if backend.name == "cuda":
        from splitkv.kernels_cuda.merge import merge_stacked

        # the kernel reads 16-bit parts too, which a PartialState never holds
        merge = cast("Callable[[Any], object]", merge_stacked)
        ways["bfloat16"] = Candidate([partial(merge, states) for states in sets])
        if find_spec("flashinfer") is not None:
            ways["bfloat16_flashinfer"] = _flashinfer_merge(sets)
    timings = turns_of(where, ways, sets[0].out.nbytes)
    return {f"{name}_us": micro(timing.median) for name, timing in timings.items()}


def plan_figures(where: Where) -> dict[str, object]:
    """Median host time of ``plan`` and ``refresh``, and of planning on the device."""
    found: dict[str, object] = {}
    backend = backend_of(where.device)
    for batch in (2, 4) if where.quick else (1, 64, 256):
        found |= _planning(where, backend, batch)
    return found


def _planning(where: Where, backend: Backend, batch: int) -> dict[str, float]:
    shape = Shape(32, 8, 128, tuple(1900 + 7 * index for index in range(batch)))
    step = steps(shape, (PAGE,), where.device, cold_bytes=1)[PAGE]
    lengths = list(shape.lengths)
    plan = backend.plan(step.spec, lengths)
    found = {
        f"plan_us_{batch}": _host(lambda: backend.plan(step.spec, lengths), where),
        f"refresh_us_{batch}": _host(lambda: plan.refresh(lengths), where),
    }
    if backend.name == "cuda":
        call = DecodeCall(step.q[:, None], step.caches[0], step.spec)
        timings = turns_of(where, {"device": Candidate([lambda: backend.plan_for(call)])}, 1)
        found[f"device_us_{batch}"] = micro(timings["device"].median)
    return found


PARTS: dict[str, Part] = {
    "plan": plan_figures,
    "merge": merge_figures,
    "length": length_sweep,
    "batch": batch_sweep,
    "steps": step_sweep,
    "splits": split_sweep,
}


# Fits


def worst_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """The largest of a / b and b / a over all pairs: 1.1 where one is 10 % off."""
    pairs = zip(values, others, strict=True)
    return max((max(a / b, b / a) if a > 0 < b else float("inf") for a, b in pairs), default=1.0)


def affine_fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """``(intercept, slope)`` of the line with the least relative squares."""
    weight = 1 / np.asarray(seconds)
    columns = np.stack([weight, np.asarray(sizes) * weight], 1)
    (intercept, slope), *_ = np.linalg.lstsq(columns, np.ones(len(weight)), rcond=None)
    return float(intercept), float(slope)


def _affine(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, object]:
    intercept, slope = affine_fit(sizes, seconds)
    line = [intercept + slope * size for size in sizes]
    return {
        "sizes": list(sizes),
        "us": [micro(value) for value in seconds],
        "intercept_us": micro(intercept),
        "slope_us": slope * 1e6,
        "worst_residual": round(max(abs(a / b - 1) for a, b in zip(seconds, line, strict=True)), 4),
    }


# Timing


def _step(where: Where, shape: Shape) -> tuple[Step, Backend]:
    step = steps(shape, (PAGE,), where.device, cold_bytes=where.cold_bytes)[PAGE]
    return step, select(step.spec, where.device)


def _automatic(where: Where, shape: Shape) -> Timing:
    step, backend = _step(where, shape)
    candidate = ours(step, backend, backend.plan(step.spec, shape.lengths))
    return turns_of(where, {"splitkv": candidate}, shape.kv_bytes)["splitkv"]


def _host(call: Call, where: Where) -> float:
    repeats = 20 if where.quick else 300
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return micro(median(seconds))


@dataclass(frozen=True, slots=True, eq=False)
class States16:
    """States as an engine keeps them: out bfloat16 [N, rows, H, D], lse and max float32 [N, rows,
    H].
    """

    max: Tensor
    lse: Tensor
    out: Tensor

    @classmethod
    def random(cls, where: Where, rows: int, heads: int, dim: int) -> "States16":
        lse = torch.randn(16, rows, heads, device=where.device)
        return cls(lse, lse.clone(), torch.randn(*lse.shape, dim, device=where.device).bfloat16())

    def widened(self) -> PartialState:
        """The same in float32, as a state is."""
        return PartialState(self.max, self.lse, self.out.float())


def _flashinfer_merge(states: Sequence[States16]) -> Candidate:
    """FlashInfer's merge of n states, in its layout [rows, states, heads, dim] and base 2."""
    import flashinfer

    def call(out: Tensor, lse2: Tensor) -> object:
        return flashinfer.merge_states(out, lse2)

    pairs = [
        (s.out.transpose(0, 1).contiguous(), (s.lse / np.log(2)).transpose(0, 1).contiguous())
        for s in states
    ]
    return Candidate([partial(call, out, lse) for out, lse in pairs])


if __name__ == "__main__":
    sys.exit(main())

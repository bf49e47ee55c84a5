"""CPU timings beside torch's own attention: ``python -m benchmarks.cpu [--quick] [--json FILE]``.

32 query heads, 8 kv heads, head dim 128; every point is timed on the same memory by torch's
scaled_dot_product_attention (enable_gqa=True, on [B, K, T, D] views), by a dense cache and by paged
caches whose pages are shuffled. The candidates take turns, and a ratio is the median of the ratios
of one turn. A step has as many layers as it takes to leave the caches of the CPU; the plan is made
once per step, outside the clock. The bandwidth is that of summing 1 GiB, measured in the same
turns.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import splitkv
from splitkv.common.spec import DecodeSpec, Layout

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
PAGE_SIZES = (16, 128)
COLD_BYTES = 256 << 20
"""Bytes of K and V that a step reads at least, so that no layer is left in a cache."""
STREAM_BYTES = 1 << 30
TARGETS = {torch.float32: 3.0, torch.bfloat16: 8.0}
"""Times faster than torch's attention at 8k tokens and more."""
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Point:
    """One size. ``layer_bytes``: K and V of one layer."""

    dtype: torch.dtype
    batch: int
    tokens: int

    @property
    def layer_bytes(self) -> int:
        return 2 * self.batch * self.tokens * KV_HEADS * DIM * self.dtype.itemsize

    @property
    def layers(self) -> int:
        return max(1, math.ceil(COLD_BYTES / self.layer_bytes))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8, at most 8k tokens")
    parser.add_argument(
        "--turns", type=int, default=5, help="turns per point, 5 or more for a record"
    )
    parser.add_argument("--layout", choices=["BSND", "BNSD"], default="BSND", help="dense layout")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    points, left_out = _points(args.quick)
    memory = {dtype: _memory([p for p in points if p.dtype is dtype]) for dtype in TARGETS}
    stream = torch.ones(STREAM_BYTES // 4)
    print(_header())
    rows = []
    for point in points:
        rows.append(_measure(point, memory[point.dtype], stream, args.turns, Layout(args.layout)))
        print(_line(rows[-1]), flush=True)
    for point in left_out:
        print(f"left out for memory: {_name(point)} ({point.layer_bytes / 1e9:.1f} GB)")
    if args.json:
        record = {"host": _host(), "rows": rows, "left_out": [_name(p) for p in left_out]}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _points(quick: bool) -> tuple[list[Point], list[Point]]:
    """Points to run, and those whose cache would take over half of the free memory."""
    batches, lengths = ((1, 8), (1024, 8192)) if quick else ((1, 8, 32), (1024, 8192, 32768))
    every = [Point(dtype, b, t) for dtype in TARGETS for t in lengths for b in batches]
    budget = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fits = [point.layer_bytes + COLD_BYTES + STREAM_BYTES <= budget for point in every]
    chosen = [point for point, fit in zip(every, fits, strict=True) if fit]
    return chosen, [point for point, fit in zip(every, fits, strict=True) if not fit]


def _memory(points: list[Point]) -> Tensor:
    """One block of random values that holds every point; a random megabyte repeated."""
    size = max(point.layers * point.layer_bytes // point.dtype.itemsize for point in points)
    block = torch.randn(1 << 20).to(points[0].dtype)
    return block.repeat(math.ceil(size / block.numel()))[:size]


def _measure(
    point: Point, memory: Tensor, stream: Tensor, turns: int, layout: Layout
) -> dict[str, object]:
    steps = dict(_candidates(point, memory, layout))
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in (*steps, "stream")}
    for _ in range(turns):
        for name, step in steps.items():
            seconds[name].append(_clock(step) / point.layers)
        seconds["stream"].append(_clock(stream.sum))
    bandwidth = STREAM_BYTES / statistics.median(seconds["stream"])
    rate = {name: point.layer_bytes / statistics.median(seconds[name]) for name in steps}
    ours = [name for name in steps if name != "torch"]
    return {
        "point": _name(point),
        "tokens": point.tokens,
        "stream_gb_s": bandwidth / 1e9,
        "gb_s": {name: value / 1e9 for name, value in rate.items()},
        "share": {name: rate[name] / bandwidth for name in ours},
        "over_torch": {name: _ratio(seconds["torch"], seconds[name]) for name in ours},
        "over_dense": {name: _ratio(seconds["dense"], seconds[name]) for name in ours[1:]},
        "target": TARGETS[point.dtype] if point.tokens >= 8192 else 1.0,
    }


def _candidates(point: Point, memory: Tensor, layout: Layout) -> Iterator[tuple[str, Step]]:
    batch, tokens = point.batch, point.tokens
    shape = (batch, tokens, KV_HEADS, DIM)
    if layout is Layout.BNSD:
        shape = (batch, KV_HEADS, tokens, DIM)
    layers = [
        tuple(part.view(shape) for part in layer.chunk(2))
        for layer in memory[: point.layers * point.layer_bytes // point.dtype.itemsize].chunk(
            point.layers
        )
    ]
    q = torch.randn(batch, Q_HEADS, DIM).to(point.dtype)
    lengths = torch.full((batch,), tokens, dtype=torch.int32)
    heads_first = (lambda x: x) if layout is Layout.BNSD else (lambda x: x.transpose(1, 2))
    views = [tuple(heads_first(x) for x in layer) for layer in layers]

    def torch_step() -> None:
        for k, v in views:
            torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    yield "torch", torch_step
    dense = [splitkv.DenseCache(k, v, lengths, layout) for k, v in layers]
    yield "dense", _step(q, dense, _spec(point, layout))
    for page in PAGE_SIZES:
        table = torch.randperm(batch * tokens // page).view(batch, -1).to(torch.int32)
        paged_layout = Layout.NHD if layout is Layout.BSND else Layout.HND
        page_shape = (
            (-1, page, KV_HEADS, DIM) if layout is Layout.BSND else (-1, KV_HEADS, page, DIM)
        )
        caches = [
            splitkv.PagedCache(k.view(page_shape), v.view(page_shape), table, lengths, paged_layout)
            for k, v in layers
        ]
        yield f"page {page}", _step(q, caches, _spec(point, paged_layout, page))


def _spec(point: Point, layout: Layout, page_size: int | None = None) -> DecodeSpec:
    return DecodeSpec(
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        layout=layout,
        dtype=point.dtype,
        page_size=page_size,
    )


def _step(q: Tensor, caches: list, spec: DecodeSpec) -> Step:
    plan = splitkv.select(spec, q.device).plan(spec, caches[0].seq_lens.tolist())

    def step() -> None:
        for cache in caches:
            splitkv.decode(q, cache, spec, plan=plan)

    return step


def _clock(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _name(point: Point) -> str:
    return f"{str(point.dtype).removeprefix('torch.')} B={point.batch} T={point.tokens}"


def _header() -> str:
    return (
        f"{'point':26} {'stream':>7} {'torch':>7} | {'dense GB/s':>10} {'x torch':>8} "
        f"{'target':>7} {'share':>6} |"
        f" {'page 16':>8} {'x dense':>8} | {'page 128':>8} {'x dense':>8}"
    )


def _line(row: dict) -> str:
    rate, dense = row["gb_s"], row["over_dense"]
    return (
        f"{row['point']:26} {row['stream_gb_s']:7.1f} {rate['torch']:7.2f} | {rate['dense']:10.2f} "
        f"{row['over_torch']['dense']:8.2f} {row['target']:7.1f} {row['share']['dense']:6.0%} |"
        f" {rate['page 16']:8.2f} {dense['page 16']:8.2f} | {rate['page 128']:8.2f} "
        f"{dense['page 128']:8.2f}"
    )


def _host() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    sys.exit(main())

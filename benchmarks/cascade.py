"""Shared prefixes against flat decode: ``python -m benchmarks.cascade [--full] [--device cuda]``.

32 query heads, 8 kv heads, head dim 128, shuffled pages of 16 (NHD). Both plans are made outside
the clock; flat and cascade take turns, and the ratio is the median of the ratios of one turn. On a
GPU each is a CUDA graph; "eager" is the cascade with the host's work in it. "reads" is K and V
bytes of the flat plan over those of the cascade. ``--full``: a prefix of 32k, 64 requests, suffixes
of 512. A GPU's small points stay in its caches: read the full one there.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import splitkv
from benchmarks.parts import facts_of
from splitkv.backends.cascade.decode import cascade_decode, plan_cascade
from splitkv.cli.bench_timing import Candidate, HostTimer, kernel_timer, take_turns
from splitkv.cli.output import print_table
from splitkv.common.spec import DecodeSpec, Layout

Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
CALLS = {"cpu": 1, "cuda": 4}
"""Calls of one turn."""


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens shared by all requests, and of each request's own."""

    prefix: int
    requests: int
    suffix: int


QUICK = (Point(512, 2, 128), Point(512, 8, 128), Point(4096, 8, 256), Point(4096, 32, 256))
FULL = (*QUICK, Point(32768, 64, 512))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="with 64 requests of 33k tokens")
    parser.add_argument("--device", default="cpu", choices=list(CALLS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    points = FULL if args.full else QUICK
    rows = [_measure(point, torch.device(args.device), dtype, args.turns) for point in points]
    title = f"{args.device}, {dtype}, {torch.get_num_threads()} threads: milliseconds per call"
    print_table(tuple(rows[0]), [tuple(row.values()) for row in rows], title=title)
    if args.json:
        facts = facts_of(torch.device(args.device), args.turns)
        args.json.write_text(json.dumps({"title": title, **facts, "rows": rows}, indent=1) + "\n")
    return 0


@torch.no_grad()
def _measure(
    point: Point, device: torch.device, dtype: torch.dtype, turns: int
) -> dict[str, object]:
    cache = _cache(point, device, dtype)
    q = torch.randn(point.requests, Q_HEADS, DIM, device=device).to(dtype)
    spec = DecodeSpec(
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        layout=Layout.NHD,
        dtype=dtype,
        page_size=PAGE,
    )
    start = time.perf_counter()
    chosen = plan_cascade(cache, spec)
    planning = time.perf_counter() - start
    cascade = plan_cascade(cache, spec, always=True)
    flat = splitkv.select(spec, device).plan(spec, cache.seq_lens.tolist())
    calls = {
        "flat": Candidate((partial(splitkv.decode, q, cache, spec, plan=flat),)),
        "cascade": Candidate((partial(cascade_decode, q, cache, spec, plan=cascade),)),
    }
    timer, count = kernel_timer(device), CALLS[device.type]
    ready = {name: timer.ready(candidate, count) for name, candidate in calls.items()}
    ready["eager"] = HostTimer(device).ready(calls["cascade"], count)
    times = take_turns(ready, turns)
    pairs = zip(times["flat"].seconds, times["cascade"].seconds, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    return {
        "prefix": point.prefix,
        "requests": point.requests,
        "suffix": point.suffix,
        **{name: round(times[name].median * 1e3, 3) for name in ready},
        "times": round(ratio, 2),
        "reads": round(cascade.flat_kv_bytes / cascade.kv_bytes, 1),
        "planner": "shares" if chosen.groups else "flat",
        "planning": round(planning * 1e3, 3),
    }


def _cache(point: Point, device: torch.device, dtype: torch.dtype) -> splitkv.PagedCache:
    shared, own = point.prefix // PAGE, point.suffix // PAGE
    pages = shared + point.requests * own
    block = torch.randn(1 << 20, device=device).to(dtype)
    shape = (pages, PAGE, KV_HEADS, DIM)
    k, v = (
        block.repeat(-(-pages * PAGE * KV_HEADS * DIM // len(block)))[
            : torch.Size(shape).numel()
        ].view(shape)
        for _ in range(2)
    )
    order = torch.randperm(pages, device=device).int()
    prefix = order[:shared].expand(point.requests, -1)
    table = torch.cat([prefix, order[shared:].view(point.requests, own)], 1)
    lengths = torch.full((point.requests,), point.prefix + point.suffix, dtype=torch.int32)
    return splitkv.PagedCache(k, v, table, lengths.to(device), Layout.NHD)


if __name__ == "__main__":
    sys.exit(main())

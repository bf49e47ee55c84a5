"""``splitkv bench``: one decode step timed here, beside torch's attention and reading."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from splitkv.backends.registry import BACKENDS, check_device, select
from splitkv.cli.bench_shapes import Shape, Step, ours, steps, torch_attention
from splitkv.cli.bench_timing import Candidate, HostTimer, Timing, kernel_timer, take_turns
from splitkv.cli.output import print_json, print_table
from splitkv.cli.plan import parse_lengths
from splitkv.cli.spec_arguments import DTYPES
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import FLOAT_DTYPES
from splitkv.common.support import dtype_name
from splitkv.matrix.machine import this_machine

HELP = (
    "Time one decode step here, contiguous and paged, beside torch's own attention and beside "
    "reading the same bytes. On CUDA kernels in a graph replay; elsewhere, and with --eager, calls "
    "by the host's clock."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way. microseconds: median per call, with its 20 % and 80 % quantiles. gb_per_second: of
    the K and V that any method must read. share: of the rate at which they can be read.
    """

    layout: str
    way: str
    microseconds: float
    low: float
    high: float
    gb_per_second: float
    share: float
    predicted_microseconds: float | None


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", default="8192x8", metavar="L,LxN", help="tokens per request (default 8192x8)")
    add("--heads", default="32:8", metavar="H:K", help="query heads and kv heads (default 32:8)")
    add("--head-dim", type=int, default=128, metavar="D", help="(default 128)")
    floats = [dtype_name(dtype) for dtype in FLOAT_DTYPES]
    add("--dtype", default="bfloat16", choices=floats, help="(default bfloat16)")
    add(
        "--page-sizes", default="16,128", metavar="P,P", help="pages beside contiguous; '' for none"
    )
    add("--device", metavar="DEVICE", help="(default: the first that a backend can use)")
    add("--eager", action="store_true", help="by the host's clock, its own work included")
    add("--turns", type=int, default=7, metavar="N", help="times each way is timed (default 7)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--num-splits", type=int, metavar="N", help="at most N splits per request")
    how.add_argument("--split-size", type=int, metavar="T", help="T tokens per split")


def run(args: argparse.Namespace) -> int:
    shape, page_sizes = _shape(args), _page_sizes(args.page_sizes)
    if args.turns < 1:
        raise ValueError(f"--turns must be 1 or more, got {args.turns}")
    device = _device(args.device)
    rows = list(_measure(args, shape, page_sizes, device))
    machine = this_machine(device)
    if args.json:
        print_json({"machine": asdict(machine), "rows": [asdict(row) for row in rows]})
        return 0
    clock = "graph replays" if device.type == "cuda" and not args.eager else "host clock"
    print_table(
        ("layout", "way", "us", "20-80 %", "GB/s", "of reading", "predicted us"),
        [_cells(row) for row in rows],
        title=f"{machine.device}, {clock}, {shape.kv_bytes / 1e6:.1f} MB of K and V",
    )
    if not shape.uniform:
        print("no row for torch: its attention takes no lengths that differ")
    return 0


def _measure(
    args: argparse.Namespace, shape: Shape, page_sizes: list[int | None], device: torch.device
) -> Iterator[Row]:
    candidates: dict[tuple[str, str], Candidate] = {}
    plans: dict[tuple[str, str], SplitPlan] = {}
    for size, step in steps(shape, page_sizes, device).items():
        name = "contiguous" if size is None else f"pages of {size}"
        backend = select(step.spec, device)
        plan = backend.plan(
            step.spec, shape.lengths, num_splits=args.num_splits, split_size=args.split_size
        )
        candidates[name, "splitkv"], plans[name, "splitkv"] = ours(step, backend, plan), plan
        if size is None:
            candidates[name, "reading"] = reading(step)
            if shape.uniform:
                candidates[name, "torch"] = torch_attention(step)
    timings = dict(zip(candidates, _time(args, candidates, device), strict=True))
    fastest = shape.kv_bytes / timings["contiguous", "reading"].median
    for key, timing in timings.items():
        rate = shape.kv_bytes / timing.median
        predicted = plans[key].predicted_seconds * 1e6 if key in plans else None
        low, high = (seconds * 1e6 for seconds in timing.spread)
        micro = timing.median * 1e6
        yield Row(*key, micro, low, high, rate / 1e9, rate / fastest, predicted)


def _time(
    args: argparse.Namespace, candidates: dict[tuple[str, str], Candidate], device: torch.device
) -> list[Timing]:
    timer = HostTimer(device) if args.eager else kernel_timer(device)
    count = 16 if device.type == "cuda" else 2
    readied = {
        "/".join(key): timer.ready(candidate, count) for key, candidate in candidates.items()
    }
    return list(take_turns(readied, args.turns).values())


def reading(step: Step) -> Candidate:
    """torch sums the bytes that any method must read."""

    parts = [part.view(torch.float32) for part in step.necessary()]
    return Candidate([part.sum for part in parts])


def _cells(row: Row) -> tuple[object, ...]:
    return (
        row.layout,
        row.way,
        f"{row.microseconds:.1f}",
        f"{row.low:.1f}-{row.high:.1f}",
        f"{row.gb_per_second:.1f}",
        f"{row.share:.0%}",
        None if row.predicted_microseconds is None else f"{row.predicted_microseconds:.1f}",
    )


def _shape(args: argparse.Namespace) -> Shape:
    heads, _, kv_heads = args.heads.partition(":")
    if not (heads.isdecimal() and kv_heads.isdecimal()):
        raise ValueError(f"--heads must be H:K, as in 32:8, got {args.heads!r}")
    lengths = tuple(parse_lengths(args.lengths))
    return Shape(int(heads), int(kv_heads), args.head_dim, lengths, DTYPES[args.dtype])


def _page_sizes(text: str) -> list[int | None]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"--page-sizes takes numbers of tokens between commas, got {text!r}")
    return [None, *map(int, words)]


def _device(name: str | None) -> torch.device:
    if name is not None:
        check_device(name)
        return torch.device(name)
    here = [backend for backend in BACKENDS if backend.missing() is None]
    return torch.device(here[0].device_type)

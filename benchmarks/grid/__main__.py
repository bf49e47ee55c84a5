"""The grid: ``python -m benchmarks.grid --points anchors --seconds 480 --out DIR``.

Points that this code has measured already, in DIR or in what is committed, are skipped; every point
is written when it is done, and one that fails costs no other. ``--report`` only writes table, CSV
and plots of what DIR holds, and ``--merge FILE`` takes over another run's points first. The last
lines are a summary of the points asked for, short enough for the end of a log.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.grid import plots, report
from benchmarks.grid.measure import EAGER, GRAPH, Settings, measure, release, words
from benchmarks.grid.peers.known import peers
from benchmarks.grid.points import SUBSETS, Point, chosen
from benchmarks.grid.results import FOLDER, Results, code_digest
from benchmarks.grid.warm import tasks, warm
from splitkv.backends.registry import BACKENDS
from splitkv.cli.bench_shapes import COLD_BYTES
from splitkv.matrix.machine import this_machine

_MOST_FAILURES = 3
"""In a row: then the device answers no more, which an illegal access of any library can bring."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    points = chosen(args.points)
    if args.list:
        for point in points:
            print(f"{point.id:24} {point.shape.kv_bytes / 1e6:10.1f} MB")
        return 0
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    results = _known(this_machine(device).device, args.out)
    results.merge(args.merge)
    held = True
    if not args.report:
        settings = Settings(
            device,
            tuple(peers(args.peers, args.peer)),
            tuple(args.modes.split(",")) if args.modes else _modes(device),
            args.turns,
            cold_bytes=args.cold_bytes,
        )
        held = _run(points, settings, results, args)
    print(f"written: {results.save(args.out)}")
    for path in [] if args.bare else _render(results, args.out):
        print(f"written: {path}")
    print(report.summary([results.records[p.id] for p in points if p.id in results.records]))
    return 0 if held else 1


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.grid", description=__doc__)
    add = parser.add_argument
    add("--points", default="anchors", help=f"ids, shell patterns, subsets {list(SUBSETS)}")
    add("--list", action="store_true", help="say which points these are, measure nothing")
    add("--peers", default="*", help="shell patterns of names, between commas; '' for none")
    add("--peer", action="append", default=[], metavar="MODULE:CLASS", help="another adapter")
    add("--modes", help=f"{GRAPH},{EAGER} (default: both on CUDA, eager elsewhere)")
    add("--turns", type=int, default=7, help="interleaved repeats (default 7)")
    add("--seconds", type=float, default=float("inf"), help="start no point that may end later")
    add("--device", help="(default: cuda where there is one, else cpu)")
    add("--cold-bytes", type=int, default=COLD_BYTES, help="K and V of all sets in rotation")
    add("--out", type=Path, default=FOLDER, help="folder (default: benchmarks/results)")
    add(
        "--jobs", type=int, default=8, help="processes that compile beforehand (default 8, 0: none)"
    )
    add("--bare", action="store_true", help="write JSON, and no table, CSV or plots")
    add("--again", action="store_true", help="measure also what is measured already")
    add("--report", action="store_true", help="measure nothing")
    add("--merge", type=Path, nargs="*", default=[], metavar="FILE", help="take over their points")
    args = parser.parse_args(arguments)
    known = {GRAPH, EAGER}
    if args.modes and not set(args.modes.split(",")) <= known:
        parser.error(f"--modes takes {sorted(known)}, got {args.modes!r}")
    if args.turns < 1:
        parser.error(f"--turns must be 1 or more, got {args.turns}")
    return args


def _modes(device: torch.device) -> tuple[str, ...]:
    return (GRAPH, EAGER) if device.type == "cuda" else (EAGER,)


def _known(device: str, out: Path) -> Results:
    """What is committed, and what an earlier run left in ``out``."""
    results = Results(device)
    paths = dict.fromkeys(folder / results.file_name for folder in (FOLDER, out))
    results.merge(path for path in paths if path.is_file())
    return results


def _run(
    points: Sequence[Point], settings: Settings, results: Results, args: argparse.Namespace
) -> bool:
    """Whether no point failed; a device that answers no more ends it."""
    start, kind = time.monotonic(), settings.device.type
    digest = code_digest(next(b.name for b in BACKENDS if b.device_type == kind))
    asked = [peer.name for peer in settings.peers]
    for peer in settings.peers:
        if (why := peer.missing()) is not None:
            print(f"not here: {peer.name}: {why}")
    left = [
        point
        for point in points
        if args.again or not results.has(point.id, digest, asked, settings.modes)
    ]
    print(f"{len(left)} of {len(points)} points to measure, code {digest}", flush=True)

    if kind == "cuda" and args.jobs and left:
        for line in warm(tasks(left, settings.peers), settings.device, args.jobs):
            print(f"not compiled: {line}")
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    failed, in_a_row = 0, 0

    def work(point: Point) -> None:
        nonlocal failed, in_a_row
        release(settings.device)  # of what an earlier failure held
        try:
            record = measure(point, settings, digest)
        except Exception as error:  # whatever one point raises, the others are measured
            failed, in_a_row = failed + 1, in_a_row + 1
            print(f"{point.id:24} failed: {words(error)}", flush=True)
            if in_a_row == _MOST_FAILURES:
                raise SystemExit(f"{in_a_row} points in a row failed: try a new process") from error
            return
        in_a_row = 0
        results.add(record)
        results.save(args.out)
        print(report.line(record), flush=True)

    seconds = args.seconds - (time.monotonic() - start)
    unmeasured = within(left, seconds, work, time.monotonic)
    if unmeasured:
        print(f"out of time: {len(unmeasured)} points left, from {unmeasured[0].id} on")
    return not failed


def within(
    points: Sequence[Point],
    seconds: float,
    work: Callable[[Point], None],
    clock: Callable[[], float],
) -> Sequence[Point]:
    """Work on points in order while the slowest so far would still end in time; returns the
    rest.
    """
    start, slowest = clock(), 0.0
    for index, point in enumerate(points):
        begun = clock()
        if begun - start + slowest > seconds:
            return points[index:]
        work(point)
        slowest = max(slowest, clock() - begun)
    return []


def _render(results: Results, folder: Path) -> list[Path]:
    written = report.write(results, folder)
    if find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install 'splitkv[bench]')")
        return written
    return written + plots.draw(results, folder)


if __name__ == "__main__":
    sys.exit(main())

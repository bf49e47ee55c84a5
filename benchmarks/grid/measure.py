"""One point measured: our layouts, the peers and reading take turns on the same memory."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch
from torch import Tensor

from benchmarks.grid.check import MOST_ERROR, reference_error, relative_error
from benchmarks.grid.peers.protocol import Peer
from benchmarks.grid.points import PAGE_SIZES, Point
from benchmarks.grid.reading import Reading
from benchmarks.grid.record import AGAIN, OURS, READING, SPLITS, Absent, Record, Row
from benchmarks.grid.splits import splits_only
from splitkv.backends.base import Backend
from splitkv.backends.registry import select
from splitkv.cli.bench_shapes import COLD_BYTES, Step, ours, steps
from splitkv.cli.bench_timing import (
    Candidate,
    GraphTimer,
    HostTimer,
    Once,
    Timer,
    Timing,
    synchronize,
    take_turns,
)
from splitkv.common.plan import SplitPlan
from splitkv.matrix.machine import this_machine

GRAPH, EAGER = "graph", "eager"
EVERY = "every layout"
_DIGITS = 5
"""Of a figure: more is noise."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How points are measured. peers: those that are asked. turns: repeats, interleaved."""

    device: torch.device
    peers: tuple[Peer, ...] = ()
    modes: tuple[str, ...] = (EAGER,)
    turns: int = 7
    page_sizes: tuple[int | None, ...] = PAGE_SIZES
    cold_bytes: int = COLD_BYTES
    reading: Reading = field(default_factory=Reading)

    def timer(self, mode: str) -> Timer:
        """What times this mode here."""
        return GraphTimer(self.device) if mode == GRAPH else HostTimer(self.device)


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate that answered right."""

    layout: str
    way: str
    candidate: Candidate
    error: float | None = None
    temporary_bytes: int | None = None
    held_bytes: int | None = None


def measure(point: Point, settings: Settings, digest: str) -> Record:
    """Check and time everything at ``point``; what does not take part is recorded with its reason.

    Raises:
        UnsupportedError: no backend here takes the point.
    """
    shape = point.shape
    reasons = {peer.name: peer.missing() for peer in settings.peers}
    absent = [Absent(EVERY, name, why) for name, why in reasons.items() if why is not None]
    here = [peer for peer in settings.peers if reasons[peer.name] is None]
    views = steps(shape, settings.page_sizes, settings.device, cold_bytes=settings.cold_bytes)
    entries: list[Entry] = []
    plans: dict[str, dict[str, object]] = {}
    for step in views.values():
        backend = select(step.spec, settings.device)
        plan = backend.plan(step.spec, shape.lengths)
        plans[layout_name(step)] = plan.summary()
        entries += _layout(step, backend, plan, here, absent)
    rows, aa = list[Row](), dict[str, float]()
    for mode in settings.modes:
        found = list(_time(next(iter(views.values())), entries, mode, settings, absent))
        rows += found
        aa[mode] = _again(found)
    machine = this_machine(settings.device, ("flashinfer-python", "tilelang"))
    record = Record(
        point.id,
        digest,
        datetime.now(UTC).date().isoformat(),
        machine.driver,
        machine.versions,
        shape.kv_bytes,
        len(next(iter(views.values())).caches),
        settings.turns,
        settings.modes,
        tuple(peer.name for peer in settings.peers),
        plans,
        aa,
        tuple(rows),
        tuple(absent),
    )
    del entries, views
    release(settings.device)
    return record


def layout_name(step: Step) -> str:
    """contiguous, p16, p128."""
    return "contiguous" if step.page_size is None else f"p{step.page_size}"


def calls_per_turn(mode: str, kv_bytes: int, device: torch.device) -> int:
    """Enough that the clock's grain does not show; 16 in a graph, 8 of more than a gigabyte."""
    if device.type == "cpu":
        return 4 if kv_bytes < 1e6 else 1
    if mode == GRAPH:
        return 16 if kv_bytes <= 1e9 else 8
    return 200 if kv_bytes < 64e6 else 40 if kv_bytes < 1e9 else 8


def _layout(
    step: Step, backend: Backend, plan: SplitPlan, here: Sequence[Peer], absent: list[Absent]
) -> Iterator[Entry]:
    """Ours, checked against float32, and every peer that agrees with ours."""
    name, mine = layout_name(step), ours(step, backend, plan)
    answer, error = _answer(mine), 0.0
    if answer is not None:
        error = reference_error(step, answer)
    if answer is None or error > MOST_ERROR:
        absent.append(Absent(name, OURS, f"wrong: error {error:.1e} against float32"))
        return
    yield Entry(name, OURS, mine, error, _temporary(mine, step.device))
    yield Entry(name, AGAIN, ours(step, backend, plan))
    if (splits := splits_only(step, backend, plan)) is not None:
        yield Entry(name, SPLITS, splits)
    for peer in here:
        why = peer.refusal(step)
        if why is None:
            found = _peer(peer, step, answer)
            if isinstance(found, Entry):
                yield found
                continue
            why = found
        absent.append(Absent(name, peer.name, why))


def _peer(peer: Peer, step: Step, wanted: Tensor) -> Entry | str:
    """A peer that is ready, or why it is not."""
    before = _allocated(step.device)
    try:
        candidate = peer.prepare(step)
        answer = _answer(candidate)
        synchronize(step.device)
    except Exception as error:  # noqa: BLE001 - a stranger's code raises what it likes; its words are recorded
        return f"failed: {words(error)}"
    held = None if before is None else (_allocated(step.device) or 0) - before
    wrong = relative_error(answer, wanted) if answer is not None else float("inf")
    if wrong > MOST_ERROR:
        return f"wrong: differs from splitkv by {wrong:.1e}, allowed {MOST_ERROR:.0e}"
    return Entry(
        layout_name(step), peer.name, candidate, wrong, _temporary(candidate, step.device), held
    )


def _time(
    step: Step, entries: Sequence[Entry], mode: str, settings: Settings, absent: list[Absent]
) -> Iterator[Row]:
    timer, kv_bytes = settings.timer(mode), step.shape.kv_bytes
    count = calls_per_turn(mode, kv_bytes, settings.device)
    reading = settings.reading.candidate(step, timer, count)
    readied: dict[str, Once] = {READING: timer.ready(reading, count)}
    taking_part: dict[str, Entry] = {READING: Entry("contiguous", READING, reading)}
    for entry in entries:
        if mode == EAGER and entry.way == SPLITS:
            continue
        key = f"{entry.layout}/{entry.way}"
        try:
            readied[key] = timer.ready(entry.candidate, count)
        except Exception as error:  # as above; and not every library can be captured
            if entry.way in (OURS, AGAIN, SPLITS):
                raise
            absent.append(Absent(entry.layout, entry.way, f"{mode}: {words(error)}"))
            continue
        taking_part[key] = entry
    timings = take_turns(readied, settings.turns)
    ceiling = timings[READING].median
    for key, timing in timings.items():
        yield _row(mode, taking_part[key], timing, kv_bytes, ceiling)


def _row(mode: str, entry: Entry, timing: Timing, kv_bytes: int, ceiling: float) -> Row:
    low, high = timing.spread
    return Row(
        mode,
        entry.layout,
        entry.way,
        _rounded(timing.median * 1e6),
        _rounded(low * 1e6),
        _rounded(high * 1e6),
        _rounded(kv_bytes / timing.median / 1e12),
        _rounded(ceiling / timing.median),
        None if entry.error is None else _rounded(entry.error),
        entry.temporary_bytes,
        entry.held_bytes,
    )


def words(error: BaseException) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _again(rows: Sequence[Row]) -> float:
    """The largest share by which ours and ours again differ."""
    again = {row.layout: row.us for row in rows if row.way == AGAIN}
    pairs = [(row.us, again[row.layout]) for row in rows if row.way == OURS]
    return _rounded(max((abs(a - b) / min(a, b) for a, b in pairs), default=0.0))


def _answer(candidate: Candidate) -> Tensor | None:
    """A copy: the next call writes where this one did."""
    found = candidate.first()
    return found.clone() if isinstance(found, Tensor) else None


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _temporary(candidate: Candidate, device: torch.device) -> int | None:
    """Most memory that a call holds while it runs."""
    if (before := _allocated(device)) is None:
        return None
    torch.cuda.reset_peak_memory_stats(device)
    candidate.first()
    return torch.cuda.max_memory_allocated(device) - before


def release(device: torch.device) -> None:
    """Give back what is not in use: a step asks how much is free before it takes any."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")

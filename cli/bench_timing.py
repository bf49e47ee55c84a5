"""How a call is timed: graph replays between events on CUDA, a host clock elsewhere.

What is timed is a candidate: calls that do the same work on one set of buffers each. The sets
rotate, so that no cache serves a second read, and the candidates take turns, so that a device that
slows down slows all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median, quantiles
from time import perf_counter
from typing import Protocol

import torch

Call = Callable[[], object]
Once = Callable[[], float]
"""One repeat: seconds per call."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One way to compute a step.

    calls: the same work, one call per set of buffers. within: entered around warm-up, capture and
    timing, for libraries whose choices are a global state.
    """

    calls: Sequence[Call]
    within: Callable[[], AbstractContextManager[object]] = nullcontext

    def first(self) -> object:
        """What the call on the first set of buffers returns."""
        with self.within():
            return self.calls[0]()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of one candidate: one entry per turn."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 20 % and 80 % quantiles."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, *_, high = quantiles(self.seconds, n=5, method="inclusive")
        return low, high


class Timer(Protocol):
    """Readies a candidate, so that each turn only runs it."""

    def ready(self, candidate: Candidate, count: int) -> Once:
        """What times ``count`` calls, taken from the sets of buffers in rotation."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostTimer:
    """Host clock around calls and one wait for the device: the host's own work is in the time.

    device: whose work to wait for. clock: seconds.
    """

    device: torch.device
    clock: Callable[[], float] = perf_counter

    def ready(self, candidate: Candidate, count: int) -> Once:
        around = cycle(candidate.calls)
        with candidate.within():
            for call in candidate.calls[:2]:
                call()

        def once() -> float:
            calls = list(islice(around, count))
            with candidate.within():
                synchronize(self.device)
                start = self.clock()
                for call in calls:
                    call()
                synchronize(self.device)
                return (self.clock() - start) / count

        return once


@dataclass(frozen=True, slots=True, eq=False)
class GraphTimer:
    """One CUDA graph of all calls, replayed between two events: the host's work is not in it."""

    device: torch.device

    def ready(self, candidate: Candidate, count: int) -> Once:
        calls = list(islice(cycle(candidate.calls), max(count, len(candidate.calls))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), candidate.within():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for call in candidate.calls:  # all: nothing may be compiled during the capture
                    call()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def once() -> float:
            with torch.cuda.device(self.device):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3 / len(calls)

        return once


def kernel_timer(device: torch.device) -> Timer:
    """What times kernels alone where that can be told apart, else the host's clock."""
    return GraphTimer(device) if device.type == "cuda" else HostTimer(device)


def take_turns(readied: Mapping[str, Once], turns: int) -> dict[str, Timing]:
    """Time every candidate ``turns`` times, one after another, from another first one each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in readied}
    names = list(readied)
    for turn in range(turns):
        start = turn % max(len(names), 1)
        for name in names[start:] + names[:start]:
            seconds[name].append(readied[name]())
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def synchronize(device: torch.device) -> None:
    """Wait for ``device``; the CPU has nothing to wait for."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)

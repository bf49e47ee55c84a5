"""The plans that ``splitkv tune`` times, on caches that have left the device's own caches.

Shape of all: 32 query heads on 8 kv heads of 128, bfloat16, NHD pages of 128. A small call is
repeated over other pages of one pool, as the layers of a model are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Protocol

import torch

from splitkv.backends.base import Backend
from splitkv.cli.bench_timing import Call, Candidate, kernel_timer
from splitkv.cli.tune_fit import Timed, call_seconds, merge_seconds
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import DeviceProfile
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.state import PartialState

H, K, D, P = 32, 8, 128, 128
SPEC = DecodeSpec(num_q_heads=H, num_kv_heads=K, head_dim=D, layout=Layout.NHD, page_size=P)
MOST_CALLS = 32
"""Calls in a row over other pages; more would not leave the caches more thoroughly."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One plan to time: lengths and how they are cut (both None: by the planner)."""

    name: str
    lengths: tuple[int, ...]
    num_splits: int | None = None
    split_size: int | None = None

    @property
    def pages(self) -> int:
        return sum(-(-length // P) for length in self.lengths)


@dataclass(frozen=True, slots=True)
class Design:
    """fitted, merges: what the constants come from, named after the one that each tells most of;
    merges are (requests, states of each). held_out: what they are tried on. tiles: one history in
    splits of more and more tokens. pool: pages.
    """

    fitted: tuple[Probe, ...]
    merges: tuple[tuple[int, int], ...]
    held_out: tuple[Probe, ...]
    tiles: tuple[Probe, ...]
    pool: int


class Clock(Protocol):
    """Says how many seconds one call by a plan takes, or one merge."""

    def seconds(self, plan: SplitPlan, pages: int) -> float:
        """Of a call with the lengths of ``plan``, which lie on ``pages`` pages."""
        ...

    def merge_seconds(self, requests: int, states: int) -> float:
        """Of merging so many states of each request's H rows."""
        ...


def _probes(name: str, *sizes: tuple[int, int, int]) -> tuple[Probe, ...]:
    """Of (requests, tokens of each, splits of each)."""
    return tuple(
        Probe(f"{name} {count}x{tokens}/{splits}", (tokens,) * count, num_splits=splits)
        for count, tokens, splits in sizes
    )


def _tiles(count: int, tokens: int, sizes: Iterable[int]) -> tuple[Probe, ...]:
    return tuple(
        Probe(f"tile {count}x{tokens} by {size}", (tokens,) * count, split_size=size)
        for size in sizes
    )


DESIGNS = {
    "cpu": Design(
        fitted=(
            *_probes("launch", (1, 128, 1), (1, 256, 1), (1, 512, 1), (2, 256, 1)),
            *_probes("read", (1, 16384, 1), (1, 65536, 1), (4, 8192, 1), (1, 4096, 1)),
            *_probes("cut", (1, 4096, 8), (1, 8192, 16), (4, 2048, 4), (1, 16384, 64)),
        ),
        merges=((1, 4), (1, 64), (16, 16), (64, 16), (16, 128)),
        held_out=(
            *_probes("whole", (1, 2048, 1), (1, 32768, 1), (2, 8192, 1)),
            *_probes("cut", (1, 2048, 4), (1, 32768, 8), (2, 4096, 16), (1, 12288, 24)),
            Probe("ragged, automatic", (16384, 1024, 1024, 1024, 1024, 300)),
        ),
        tiles=_tiles(1, 16384, (128, 256, 512, 1024, 2048)),
        pool=768,
    ),
    # every worker busy: what the planner would not choose, the model does not describe
    "cuda": Design(
        fitted=(
            *_probes("launch", (1, 1024, 8), (16, 128, 1), (32, 256, 1), (64, 512, 1)),
            *_probes("read", (64, 8192, 1), (256, 2048, 1), (33, 8192, 1), (64, 4096, 4)),
            *_probes("cut", (1, 8192, 32), (1, 131072, 64), (8, 8192, 32), (64, 4096, 16)),
        ),
        merges=((1, 64), (64, 16), (256, 16), (256, 64)),
        held_out=(
            *_probes("whole", (64, 2048, 1), (128, 4096, 1)),
            *_probes("cut", (1, 65536, 64), (4, 8192, 16), (16, 8192, 4), (64, 8192, 8)),
            Probe("ragged, automatic", (131072, *(1024,) * 63)),
            Probe("one long, automatic", (131072,)),
        ),
        tiles=_tiles(64, 4096, (128, 256, 512, 1024, 2048)),
        pool=8192,
    ),
}


def measure(probes: Iterable[Probe], profile: DeviceProfile, clock: Clock) -> Iterator[Timed]:
    """Each probe planned for ``profile`` and timed."""
    for probe in probes:
        plan = plan_splits(
            SPEC,
            probe.lengths,
            profile=profile,
            num_splits=probe.num_splits,
            split_size=probe.split_size,
        )
        yield Timed(probe.name, clock.seconds(plan, probe.pages), partial(call_seconds, plan))


def measure_merges(sizes: Iterable[tuple[int, int]], clock: Clock) -> Iterator[Timed]:
    """Merges of (requests, states of each) timed."""
    for requests, states in sizes:
        seconds = clock.merge_seconds(requests, states)
        rows = requests * states * H
        yield Timed(f"merge {requests}x{states}", seconds, partial(merge_seconds, rows))


def measure_tiles(
    probes: Iterable[Probe], profile: DeviceProfile, clock: Clock
) -> dict[int, Timed]:
    """Tokens of a split -> the probe with such splits; each is one tile, however fine."""
    found = {}
    for probe in probes:
        assert probe.split_size is not None
        tile = replace(profile, tile_tokens=probe.split_size)
        (found[probe.split_size],) = measure([probe], tile, clock)
    return found


class Calls:
    """One pool of pages on a device, and calls that lie on it one after the other."""

    def __init__(self, backend: Backend, device: torch.device, pages: int) -> None:
        self.backend, self.device = backend, device
        random = torch.Generator().manual_seed(0)
        page = torch.randn(1, P, K, D, generator=random).bfloat16().to(device)
        self.k, self.v = (page.repeat(pages, 1, 1, 1) for _ in "kv")
        order = torch.randperm(pages, generator=random).to(torch.int32)
        self.order = torch.cat([order, order])  # a call may begin anywhere

    def of(self, plan: SplitPlan, pages: int) -> list[DecodeCall]:
        """Calls with the plan's lengths, on other pages each until the pool is used up."""
        held = len(self.k)
        if pages > held:
            raise ValueError(f"a call of {pages} pages needs a pool of as many, it has {held}")
        lengths = torch.from_numpy(plan.seq_lens.copy())
        blocks = -(-plan.seq_lens // P)
        q = torch.randn(plan.batch, 1, H, D).bfloat16().to(self.device)
        calls = []
        for turn in range(min(max(held // pages, 1), MOST_CALLS)):
            table = torch.zeros(plan.batch, int(blocks.max()), dtype=torch.int32)
            at = turn * pages
            for row, count in enumerate(blocks.tolist()):
                table[row, :count] = self.order[at : at + count]
                at += count
            cache = PagedCache(self.k, self.v, table.to(self.device), lengths.to(self.device))
            calls.append(DecodeCall(q, cache, SPEC))
        return calls

    def states(self, requests: int, states: int) -> PartialState:
        """Stacked states [states, requests, H]."""
        shape = (states, requests, H)
        lse, out = torch.randn(shape), torch.randn(*shape, D)
        return PartialState.from_lse(out.to(self.device), lse.to(self.device))


class DeviceClock:
    """Median of repeats, timed as ``bench`` times: graph replays on CUDA, single calls elsewhere.

    Five repeats at least, more for ``spend`` seconds, ``most`` at most.
    """

    def __init__(self, calls: Calls, spend: float = 0.5, most: int = 64) -> None:
        self._calls, self._spend, self._most = calls, spend, most
        self._timer = kernel_timer(calls.device)
        self._in_a_row = 8 if calls.device.type == "cuda" else 1

    def seconds(self, plan: SplitPlan, pages: int) -> float:
        backend = self._calls.backend
        return self._time([partial(backend.decode, x, plan) for x in self._calls.of(plan, pages)])

    def merge_seconds(self, requests: int, states: int) -> float:
        parts = self._calls.states(requests, states)
        return self._time([partial(self._calls.backend.merge, parts)])

    def _time(self, calls: Sequence[Call]) -> float:
        once = self._timer.ready(Candidate(calls), self._in_a_row)
        times: list[float] = []
        start = perf_counter()
        while len(times) < 5 or (perf_counter() - start < self._spend and len(times) < self._most):
            times.append(once())
        return median(times)

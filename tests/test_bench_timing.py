"""Timing with a clock that the test turns, and the tensors that are timed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitkv.backends.cpu import CpuBackend
from splitkv.cli.bench_shapes import Shape, ours, steps, torch_attention
from splitkv.cli.bench_timing import Candidate, GraphTimer, HostTimer, Timing, take_turns
from splitkv.common.cache import PackedCache, PagedCache

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 16, (40, 40))
RAGGED = Shape(4, 2, 16, (33, 0, 70))


class Clock:
    """Time passes when a call says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def call(self, seconds: float) -> None:
        self.now += seconds


def test_a_turn_is_seconds_per_call_over_all_sets_in_rotation() -> None:
    clock, seen = Clock(), list[int]()

    def use(index: int) -> None:
        seen.append(index)
        clock.call([1.0, 2.0, 6.0][index])

    candidate = Candidate([lambda i=i: use(i) for i in range(3)])
    once = HostTimer(CPU, clock).ready(candidate, count=2)
    seen.clear()
    assert [once() for _ in range(3)] == [1.5, 3.5, 4.0]
    assert seen == [0, 1, 2, 0, 1, 2]  # goes on where it was, so that no set is read twice in a row


def test_what_a_candidate_needs_around_it_is_there_and_not_timed() -> None:
    clock, inside = Clock(), [False]

    @contextmanager
    def within() -> Iterator[None]:
        clock.call(100.0)
        inside[0] = True
        yield
        inside[0] = False
        clock.call(100.0)

    def call() -> None:
        assert inside[0]
        clock.call(0.5)

    assert HostTimer(CPU, clock).ready(Candidate([call], within), count=4)() == 0.5


class FakeCuda:
    """What ``GraphTimer`` asks of CUDA: a graph keeps the calls made while it is captured."""

    def __init__(self, clock: Clock, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.capturing, self.log = clock, False, list[str]()
        nothing = lambda *_: nullcontext()  # noqa: E731
        stream = lambda *_: SimpleNamespace(wait_stream=lambda other: None)  # noqa: E731
        names = {"device": nothing, "stream": nothing, "Stream": stream, "current_stream": stream}
        names |= {"CUDAGraph": lambda: SimpleNamespace(kept=[]), "graph": self.capture}
        for name, value in (names | {"Event": self.event}).items():
            patch.setattr(torch.cuda, name, value)

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        self.capturing, self.log = True, []
        yield
        self.capturing, kept = False, list(self.log)
        graph.replay = lambda: [self.clock.call(float(word)) for word in kept]

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.clock.now)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3  # milliseconds
        return event

    def use(self, seconds: float) -> None:
        self.log.append(str(seconds))


def test_a_graph_holds_every_set_and_its_replay_is_divided_by_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    cuda = FakeCuda(clock, monkeypatch)
    candidate = Candidate([lambda s=s: cuda.use(s) for s in (1.0, 2.0, 6.0)])
    timer = GraphTimer(torch.device("cuda", 0))
    once = timer.ready(candidate, count=1)
    assert cuda.log == ["1.0", "2.0", "6.0"]  # captured after all were run once
    clock.call(1000.0)
    assert once() == pytest.approx(3.0)
    assert timer.ready(candidate, count=4)() == pytest.approx(10.0 / 4)


def test_candidates_take_turns_and_each_is_first_once() -> None:
    order: list[str] = []
    readied = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    timings = take_turns(readied, turns=3)
    assert order == [*"abc", *"bca", *"cab"]
    assert timings["a"] == Timing((1, 6, 8))
    assert timings["a"].median == 6


def test_median_and_spread_of_known_numbers() -> None:
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0, 100.0))
    assert timing.median == 3.5
    assert timing.spread == (2.0, 5.0)
    assert Timing((7.0,)).spread == (7.0, 7.0)


def test_a_shape_counts_each_byte_of_k_and_v_once() -> None:
    assert Shape(32, 8, 128, (1024,)).kv_bytes == 4 << 20
    assert RAGGED.kv_bytes == 2 * 103 * 2 * 16 * 2
    assert RAGGED.slots(16) == 48 + 80
    assert RAGGED.slots(None) == 103


@pytest.mark.parametrize("shape", [SHAPE, RAGGED])
def test_every_layout_is_a_view_of_the_same_memory_and_one_table_serves_all_sets(
    shape: Shape,
) -> None:
    views = steps(shape, (None, 16), CPU, cold_bytes=3 * shape.kv_bytes)
    assert {len(step.caches) for step in views.values()} == {3}
    start, size = views[None].memory.data_ptr(), views[None].memory.nbytes
    for step in views.values():
        for cache in step.caches:
            assert start <= cache.k.data_ptr() < start + size
        assert all(part.nbytes == shape.kv_bytes for part in step.necessary())
    pages = views[16].caches
    assert all(isinstance(cache, PagedCache) for cache in pages)
    assert len({id(cache.block_table) for cache in pages if isinstance(cache, PagedCache)}) == 1
    assert isinstance(views[None].caches[0], PackedCache) == (not shape.uniform)
    used = sorted(page for page in pages[0].block_table.flatten().tolist() if page >= 0)
    assert used == list(range(shape.slots(16) // 16))


def test_sets_hold_more_than_a_cache_and_there_are_two_at_least() -> None:
    assert len(steps(SHAPE, (None,), CPU, cold_bytes=1)[None].caches) == 2
    assert len(steps(SHAPE, (None,), CPU, cold_bytes=10 * SHAPE.kv_bytes)[None].caches) == 10
    with pytest.raises(ValueError, match="nothing to read"):
        steps(Shape(4, 2, 16, (0, 0)), (None,), CPU)


def test_ours_and_torch_compute_the_same_on_the_same_set() -> None:
    step = steps(SHAPE, (None,), CPU, cold_bytes=1)[None]
    backend = CpuBackend()
    mine = ours(step, backend, backend.plan(step.spec, SHAPE.lengths))
    theirs = torch_attention(step)
    for index in range(2):
        a, b = mine.calls[index](), theirs.calls[index]()
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        assert (a - b).float().norm() / b.float().norm() < 1e-2
    with pytest.raises(ValueError, match="neither pages nor lengths"):
        torch_attention(steps(SHAPE, (16,), CPU, cold_bytes=1)[16])

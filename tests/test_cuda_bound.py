"""What a plan keeps of a call's launches: later calls start just what they would have alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import _allocation

from splitkv.common.plan import plan_splits
from splitkv.common.profile import H200
from splitkv.kernels_cuda import bound
from splitkv.kernels_cuda.attention import attend
from splitkv.kernels_cuda.plan import bind
from splitkv.kernels_cuda.states import Destination
from tests.bound_calls import asked
from tests.outside_the_interpreter import printed_by

GPU = torch.device("cuda", 1)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return printed_by("tests.bound_calls")


def test_a_call_starts_what_it_would_alone_whatever_came_before(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    never_kept = ("scaled alike", "strided lengths", "in place")
    of_other_kind = (("scaled", "scaled alike"), ("plain", "in place"))  # the same facts
    assert found["direct"] == found["kinds"] - len(never_kept) + len(of_other_kind)


@pytest.mark.parametrize(
    ("missing", "told_apart"),
    [
        ("spec", ["window", "soft cap"]),
        ("layout", ["plain", "HND"]),
        ("shapes", ["mask of more", "mask padded"]),
        ("strides", ["q padded", "q strides of 16"]),
        ("dtypes", ["plain", "int64 table"]),
        ("alignments", ["plain", "lse off"]),
        ("whether k is v", ["k is v", "plain"]),
        ("tensors", ["plain", "state"]),
    ],
)
def test_with_a_fact_missing_calls_would_go_wrong(
    found: dict[str, Any], missing: str, told_apart: list[str]
) -> None:
    assert told_apart in found[f"without {missing}"]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
    )
    monkeypatch.setattr(bound, "_KNOWN", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton.knobs, "runtime", hooks)


def _listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [print])


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True),
        lambda patch: patch.setattr(torch.cuda, "current_device", lambda: 0),
        lambda patch: patch.setattr(bound, "_KNOWN", False),
        _listened_to,
    ],
    ids=["capturing", "another device", "another triton", "a profiler's hook"],
)
@pytest.mark.usefixtures("on_gpu")
def test_the_ordinary_way_is_taken(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    assert bound.can_start(GPU)
    change(monkeypatch)
    assert not bound.can_start(GPU)


def test_a_workspace_that_lies_elsewhere_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    start = bound._Start(
        lambda *values: started.append(values), [1, 1, 1, None, 5, 0], ((5, 0, 4),)
    )
    streams = iter((7, 8))
    active = SimpleNamespace(get_current_stream=lambda index: next(streams) + index)
    monkeypatch.setattr(bound, "driver", SimpleNamespace(active=active))
    kept = bound.Bound((start,), workspace=torch.empty(1).expand(8))
    assert kept.start(1, [64])
    assert kept.start(1, [32])
    assert started == [(1, 1, 1, 8, 5, 68), (1, 1, 1, 9, 5, 36)]  # on the stream of each call
    off = torch.empty(9)[1:]
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: off)
    assert not kept.start(1, [64])
    assert len(started) == 2


@pytest.mark.parametrize("scratch", [0, 64])
def test_past_the_wrapper_a_launcher_is_given_the_same(
    monkeypatch: pytest.MonkeyPatch, scratch: int
) -> None:
    given: list[tuple[object, ...]] = []
    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.launch = lambda *values: given.append(values)
    launcher.global_scratch_size, launcher.global_scratch_align = scratch, 1
    launcher.profile_scratch_size, launcher.profile_scratch_align = 0, 1
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    allocator = SimpleNamespace(get=lambda: lambda *_: "scratch")
    monkeypatch.setattr(_allocation, "_allocator", allocator)
    compiled = SimpleNamespace(run=launcher, packed_metadata=(4, 1, 0))
    run, fixed = bound._launcher(compiled)  # type: ignore[arg-type]
    assert (run is launcher) == (scratch > 0)  # which has to allocate it
    run(2, 1, 1, 7, 5, *fixed, "own")
    launcher(2, 1, 1, 7, 5, (4, 1, 0), None, None, None, "own")
    assert given[0] == given[1]
    assert (given[0][7] == "scratch") == (scratch > 0)


def test_the_interpreter_keeps_nothing_and_its_bits_stay() -> None:
    made = asked()
    plan = plan_splits(made.call.spec, [128, 128], profile=H200, num_splits=2)
    results = []
    for memo in (None, plan.bound, plan.bound):
        out = torch.empty_like(made.destination.out)
        attend(
            made.call, bind(plan, out.device), Destination(out, made.destination.lse), None, memo
        )
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not any(isinstance(value, bound.Bound) for value in plan.bound.values())

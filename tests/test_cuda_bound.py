"""What a plan keeps of a call's launches: later calls start just what they would have alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from splitkv.common.plan import plan_splits
from splitkv.common.profile import H200
from splitkv.kernels_cuda import bound
from splitkv.kernels_cuda.attention import attend
from splitkv.kernels_cuda.plan import bind
from splitkv.kernels_cuda.states import Destination
from tests.bound_calls import asked

ROOT = Path(__file__).resolve().parent.parent
GPU = torch.device("cuda", 1)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bound_calls"],
        cwd=ROOT,
        env=compiled,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


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
    start = bound._Start(lambda *values: started.append(values), (1, 1, 1), (), [], ())
    monkeypatch.setattr(
        bound, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 0))
    )
    kept = bound.Bound((start,), workspace=8)
    assert kept.start(torch.device("cpu"), [])
    assert len(started) == 1
    off = torch.empty(9)[1:]
    monkeypatch.setattr(torch, "empty", lambda *_, **__: off)
    assert not kept.start(torch.device("cpu"), [])
    assert len(started) == 1


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

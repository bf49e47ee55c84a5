"""Around the measurements: compiling beforehand, points that fail, the summary, the sanitizer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sanitize, sanitize_grid
from benchmarks.grid import __main__ as grid
from benchmarks.grid import report
from benchmarks.grid.peers.eager import TorchEager
from benchmarks.grid.peers.known import PEERS
from benchmarks.grid.points import ANCHORS, GRID, SUBSETS, TINY, chosen
from benchmarks.grid.record import AGAIN, OURS, READING, Record, Row
from benchmarks.grid.warm import Task, first_use, tasks, warm
from benchmarks.parts import run_parts
from splitkv.backends.cuda import CudaBackend, InterpretedCudaBackend
from splitkv.common.support import UnsupportedError
from splitkv.kernels_cuda.launch import Launch

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
ON_GPU = torch.cuda.is_available()
BACKEND = CudaBackend() if ON_GPU else InterpretedCudaBackend()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Broken(TorchEager):
    name = "broken"

    def prepare(self, step: Any) -> Any:
        raise KeyError("no compiler")


# Before the clock


def test_each_peer_is_warmed_once_for_a_head_dim_and_ours_for_all_heads() -> None:
    points = chosen("32:8x128/*,8:1x128/rag-?,16:8x256/1x1024")
    found = tasks(points, (TorchEager(), PEERS[0]))
    here = [TorchEager.name] if not ON_GPU else [TorchEager.name, PEERS[0].name]
    of_peers = [(task.peer.name, task.dim) for task in found if task.peer is not None]
    assert sorted(of_peers) == sorted((name, dim) for name in here for dim in (128, 256))
    assert [(t.heads, t.kv_heads, t.dim) for t in found if t.peer is None] == [
        (32, 8, 128),
        (8, 1, 128),
        (16, 8, 256),
    ]


def test_what_cannot_be_compiled_is_said_and_stops_nothing() -> None:
    good = [Task(None, 4, 2, 16), Task(TorchEager(), 4, 2, 16)]
    faults = list(warm([*good, Task(Unpicklable(), 4, 2, 16)], CPU, 2))
    assert len(faults) == 1
    assert faults[0].startswith("unpicklable 4:2x16: ")
    with pytest.raises(KeyError):
        first_use(Task(Broken(), 4, 2, 16), CPU)


class Unpicklable(TorchEager):
    name = "unpicklable"

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


# Points


def test_every_head_comes_before_the_second_case() -> None:
    for name, every in (("anchors", ANCHORS), ("grid", GRID)):
        ordered = SUBSETS[name]
        assert {one.id for one in ordered} == {one.id for one in every}
        heads = {one.heads for one in every}
        assert {one.heads for one in ordered[: len(heads)]} == heads
        assert {one.case for one in ordered[: len(heads)]} == {"1x1024"}


def test_a_point_that_fails_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(one: Any, settings: Any, digest: str) -> Record:
        if one is TINY[0]:
            raise UnsupportedError("nobody takes it\nat all")
        return record(one.id, modes=settings.modes)

    monkeypatch.setattr(grid, "measure", measure)
    command = ["--points", "tiny", "--peers", "", "--bare", "--out", str(tmp_path)]
    command += ["--device", "cpu"]
    assert grid.main(command) == 1
    said = capsys.readouterr().out
    assert f"{TINY[0].id:24} failed: UnsupportedError: nobody takes it\n" in said
    (written,) = tmp_path.iterdir()
    assert "@" not in written.name
    assert [entry["id"] for entry in json.loads(written.read_text())["points"]] == [TINY[1].id]
    assert said.splitlines()[-1].startswith(TINY[1].id)
    monkeypatch.setattr(grid, "_MOST_FAILURES", 1)
    with pytest.raises(SystemExit, match="1 points in a row failed"):
        grid.main([*command, "--again"])


def test_a_part_that_fails_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad(where: Any) -> Any:
        raise KeyError("no library")

    made: dict[str, Any] = {"bad": bad, "good": lambda where: {"us": 1.0}}
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert run_parts("trial", "", made, words) == 1
    assert "bad failed: KeyError: 'no library'" in capsys.readouterr().out
    (written,) = tmp_path.iterdir()
    assert "@" not in written.name
    assert list(json.loads(written.read_text())) == ["good"]


# The summary


def record(point: str, **changes: Any) -> Record:
    ways = {OURS: 10.0, AGAIN: 10.0, "torch cudnn": 8.0, "flashinfer tc": 20.0}
    rows = [
        Row("graph", layout, way, us, us, us, 1.0, 0.5)
        for layout in ("contiguous", "p16", "p128")
        for way, us in ways.items()
    ]
    fields: dict[str, Any] = {
        "digest": "d",
        "date": "2026-01-01",
        "driver": None,
        "versions": {},
        "kv_bytes": 1,
        "sets": 2,
        "turns": 5,
        "modes": ("graph",),
        "asked": (),
        "plans": {name: {"predicted_us": 1.0} for name in ("contiguous", "p16", "p128")},
        "aa": {},
        "rows": (*rows, Row("graph", "contiguous", READING, 5.0, 5.0, 5.0, 1.0, 1.0)),
    }
    return Record(point, **fields | changes)


def test_the_summary_fits_into_the_end_of_a_log() -> None:
    text = report.summary([record(one.id) for one in ANCHORS])
    assert len(text) <= 10_000
    line = "32:8x128/1x1024 p16 10 50% | cudnn 8 tc 20 | 1.250"
    assert line in text.splitlines()
    assert "| over cuDNN |" in text
    few = report.summary([record(one.id) for one in ANCHORS], most=3000)
    assert len(few) <= 3000
    assert "lines more, which --report writes to a table" in few
    assert report.summary([]) == "point layout us of-reading | peers' us | ours/fastest"


# The sanitizer


def test_a_report_is_clean_only_if_the_tool_ran_and_saw_kernels() -> None:
    clean = sanitize.Report("memcheck", 1.0, 0, 0, {"tree": []}, {"tree": ["split_kernel"]}, [])
    assert clean.faults() == []
    unlike: list[tuple[dict[str, Any], str]] = [
        ({"code": None}, "did not end in time"),
        ({"code": 9}, "exit code 9"),
        ({"reported": None}, "no summary: the tool did not run"),
        ({"reported": 2}, "2 reported"),
        ({"kernels": {}}, "no kernel was launched"),
        ({"wrong": {"tree": ["off"]}}, "tree: off"),
    ]
    for change, fault in unlike:
        fields = {name: getattr(clean, name) for name in sanitize.Report.__slots__}
        assert sanitize.Report(**fields | change).faults() == [fault]


def test_summaries_of_the_sanitizer_are_read() -> None:
    assert sanitize.reported("========= ERROR SUMMARY: 0 errors\n") == 0
    assert sanitize.reported("========= ERROR SUMMARY: 3 errors\n") == 3
    hazards = "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"
    assert sanitize.reported(hazards) == 2
    assert sanitize.reported("Error: Target application terminated before first call\n") is None


def test_a_machine_without_the_sanitizer_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert sanitize.main([]) == 1
    assert "compute-sanitizer is not on PATH" in capsys.readouterr().err
    if not ON_GPU:
        monkeypatch.setattr(sanitize.shutil, "which", lambda name: "/bin/true")
        assert sanitize.main([]) == 1
        assert "no CUDA device" in capsys.readouterr().err


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A program that runs what compute-sanitizer is given, and reports no error of it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fake = folder / "compute-sanitizer"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = "--version" ] && echo "Version 0" && exit\n'
        'while [ "$1" != "--log-file" ]; do shift; done\nlog=$2\nshift 2\n'
        'while [ "$1" = "--kernel-regex" ]; do shift 2; done\n'
        'echo "========= ERROR SUMMARY: 0 errors" > "$log"\nexec "$@"\n'
    )
    fake.chmod(0o755)
    return fake


def test_what_runs_under_the_sanitizer_is_read(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["-c", "import sys, json; json.dump({'wrong': {}, 'kernels': {'a': ['k']}}, "]
    command[1] += "open(sys.argv[1], 'w')); sys.exit(9)"
    monkeypatch.setattr(sanitize, "_this", lambda: [sys.executable])
    found = sanitize._under(str(stand_in), "memcheck", [*command, "{file}"], ["k"], 60)
    assert (found.code, found.reported, found.kernels) == (9, 0, {"a": ["k"]})
    slow = sanitize._under(
        str(stand_in), "memcheck", ["-c", "import time; time.sleep(60)"], [], 0.5
    )
    assert slow.code is None


def test_probes_launch_our_kernels_and_are_right() -> None:
    pytest.importorskip("triton")
    launch = Launch.run
    names = ["paged-16", "starts", "merged", "cascade", "appended"]
    found = sanitize_grid.run(BACKEND, DEVICE, names)
    assert found.wrong == {name: [] for name in names}
    assert {"split_kernel", "merge_kernel"} <= set(found.kernels["paged-16"])
    assert "clip_kernel" in found.kernels["starts"]
    assert Launch.run is launch


def test_a_wrong_merge_is_noticed_by_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKEND), "merge", lambda self, states: states[0])
    found = sanitize_grid.run(BACKEND, DEVICE, ["merged"])
    assert found.wrong == {"merged": ["merged otherwise"]}


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="the kernels are interpreted")
def test_the_command_needs_the_planted_fault_to_be_seen(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(stand_in))
    monkeypatch.chdir(ROOT)
    words = ["--tool", "memcheck", "--only", "merged,paged-16", "--device", "cpu"]
    assert sanitize.main([*words, "--jobs", "2", "--out", str(tmp_path)]) == 1
    (written,) = tmp_path.glob("sanitize_*.json")
    said = json.loads(written.read_text())
    assert said["tools"]["memcheck"]["faults"] == ["the fault planted for it went unseen"]
    assert "merge_kernel" in said["kernels"]
    assert set(said["tools"]["memcheck"]["grid"]["wrong"]) == {"merged", "paged-16"}


@pytest.mark.slow
def test_the_whole_grid_of_the_sanitizer(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "found.json"
    words = ["--inner", str(file), "--device", DEVICE.type]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sanitize", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0
    found = json.loads(file.read_text())
    assert set(found["wrong"]) == set(sanitize_grid.PROBES)
    assert {"split_kernel", "latent_kernel", "merge_kernel"} <= {
        name for names in found["kernels"].values() for name in names
    }

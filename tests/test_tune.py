"""``splitkv tune``: a clock that obeys the model gives back its constants; files name faults."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import splitkv
from splitkv.backends.profiles import profile_from, read_profile, write_profile
from splitkv.backends.registry import backend_named
from splitkv.cli import tune as command
from splitkv.cli.main import main
from splitkv.cli.tune import tune
from splitkv.cli.tune_fit import Timed, call_seconds, fit, merge_seconds, shortest_tile
from splitkv.cli.tune_timing import DESIGNS, SPEC, Calls, DeviceClock, Probe, measure, measure_tiles
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import PROFILES, DeviceProfile

Capture = pytest.CaptureFixture[str]
WORKERS = {"cpu": 1, "cuda": 132}
PLANTED = {
    "cpu": DeviceProfile("a CPU", 1, 1.3e10, 4.5e-5, 3.1e-8, 512, source="made up"),
    "cuda": DeviceProfile("a GPU", 132, 4.2e12, 2.4e-6, 1.1e-8, 256, source="made up"),
}
CONSTANTS = ("read_bandwidth", "launch_seconds", "merge_seconds")


def guess(kind: str) -> DeviceProfile:
    """What is known before: the workers, and a wrong idea of the rest."""
    return DeviceProfile("unknown", WORKERS[kind], 1e12, 1e-3, 1e-9, 128, source="assumed")


class ModelClock:
    """Obeys the planner's model with ``planted`` constants, reads whole tiles, and shakes a bit."""

    def __init__(self, planted: DeviceProfile, noise: float = 0.0) -> None:
        self.planted, self.noise = planted, noise
        self.random = np.random.default_rng(0)

    def seconds(self, plan: SplitPlan, pages: int) -> float:
        tile = self.planted.tile_tokens
        wide = replace(plan, end=plan.start + -(-(plan.end - plan.start) // tile) * tile)
        cut_fine = plan.profile.tile_tokens < tile and plan.max_splits > 1
        return self._shaken(call_seconds(wide if cut_fine else plan, self.planted))

    def merge_seconds(self, requests: int, states: int) -> float:
        return self._shaken(merge_seconds(requests * states * 32, self.planted))

    def _shaken(self, seconds: float) -> float:
        return seconds * float(np.exp(self.noise * self.random.standard_normal()))


@pytest.mark.parametrize("kind", DESIGNS)
def test_the_planted_constants_are_recovered(kind: str) -> None:
    # plans of the fit itself are cut at tiles that the clock reads at the model's price
    planted = replace(PLANTED[kind], tile_tokens=128)
    found, fitted, held_out = tune(DESIGNS[kind], guess(kind), ModelClock(planted))
    for name in CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(planted, name), rel=1e-6)
    assert found.workers == planted.workers
    assert found.tile_tokens == 128
    assert max(abs(one.off(found)) for one in (*fitted, *held_out)) < 1e-6
    assert max(abs(one.off(guess(kind))) for one in held_out) > 0.1


@pytest.mark.parametrize("kind", DESIGNS)
def test_a_noisy_clock_moves_the_constants_little(kind: str) -> None:
    planted = replace(PLANTED[kind], tile_tokens=128)
    found, _, held_out = tune(DESIGNS[kind], guess(kind), ModelClock(planted, noise=0.05))
    for name in CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(planted, name), rel=0.2)
    assert max(abs(one.off(found)) for one in held_out) < 0.3


@pytest.mark.parametrize("tile", [128, 256, 512, 1024])
@pytest.mark.parametrize("kind", DESIGNS)
def test_the_tile_is_the_shortest_split_that_reads_well(kind: str, tile: int) -> None:
    planted = replace(PLANTED[kind], tile_tokens=tile)
    clock = ModelClock(planted)
    timed = measure_tiles(DESIGNS[kind].tiles, planted, clock)
    assert shortest_tile(timed, planted) == tile


def test_costs_that_are_not_there_come_out_as_0() -> None:
    free = replace(PLANTED["cpu"], launch_seconds=0.0, tile_tokens=128)
    found, _, _ = tune(DESIGNS["cpu"], guess("cpu"), ModelClock(free, noise=0.02))
    assert 0 <= found.launch_seconds < 2e-6
    assert found.read_bandwidth == pytest.approx(free.read_bandwidth, rel=0.1)


def test_plans_that_determine_too_little_are_refused() -> None:
    known = guess("cpu")
    clock = ModelClock(PLANTED["cpu"])
    uncut = [Probe("whole", (length,), num_splits=1) for length in (128, 4096, 65536)]
    with pytest.raises(ValueError, match="do not determine launch, bandwidth and merge cost"):
        fit(list(measure(uncut, known, clock)), known)
    with pytest.raises(ValueError, match="0 times do not determine"):
        fit([], known)


def test_times_that_do_not_grow_are_refused() -> None:
    known = guess("cpu")
    sizes = {(256, 1): 1.0, (65536, 1): 0.01, (65536, 8): 2.0, (65536, 32): 3.0}
    shrinking = []
    for (length, splits), seconds in sizes.items():
        plan = plan_splits(SPEC, [length], profile=known, num_splits=splits)
        shrinking.append(Timed("", seconds, partial(call_seconds, plan)))
    with pytest.raises(ValueError, match="do not grow with the bytes"):
        fit(shrinking, known)


def test_calls_lie_on_other_pages_each_and_compute() -> None:
    cpu = backend_named("cpu")
    calls = Calls(cpu, torch.device("cpu"), 12)
    plan = plan_splits(SPEC, [300, 128], profile=cpu.profile(), num_splits=2)
    made = calls.of(plan, 4)
    used = [
        [*call.cache.block_table[0, :3].tolist(), int(call.cache.block_table[1, 0])]
        for call in made
    ]
    assert len(made) == 3
    assert sorted(page for pages in used for page in pages) == list(range(12))
    clock = DeviceClock(calls, spend=0, most=1)
    assert min(clock.seconds(plan, 4), clock.merge_seconds(2, 3)) > 0
    with pytest.raises(ValueError, match="a call of 13 pages needs a pool of as many"):
        calls.of(plan, 13)


def test_the_command_writes_a_file_that_the_planner_takes(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = replace(PLANTED["cpu"], tile_tokens=128)
    monkeypatch.setattr("splitkv.cli.tune.DeviceClock", lambda calls: ModelClock(planted))
    monkeypatch.setattr(command, "Calls", lambda *_: None)
    for name in ("mine.yaml", "mine.json"):
        path = tmp_path / name
        assert main(["tune", "--out", str(path), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        profile = read_profile(path)
        assert {name: getattr(profile, name) for name in said["profile"]} == said["profile"]
        assert profile.read_bandwidth == pytest.approx(planted.read_bandwidth)
        held = yaml.safe_load(path.read_text())["measured"]
        assert {"device", "driver", "versions", "date", "fitted", "held_out"} <= set(held)
        assert {point["off"] for point in held["held_out"]} == {0.0}
        plan = splitkv.plan_splits(SPEC, [4096], profile=profile)
        assert plan.profile is profile

    words = ("plan", "--lengths", "4096,300", "--profile", str(path))
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["profile"] == profile.name
    assert main(["tune"]) == 0
    assert "Not fitted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tune", "--device", "npu"), "--device npu: measured are cpu, cuda"),
        (("tune", "--out", "mine.txt"), "--out mine.txt must end in .json"),
        (("tune", "--out", "no/such/folder/mine.json"), "no such folder"),
        (("plan", "--lengths", "5", "--profile", "H9000"), "unknown profile 'H9000'"),
        (("plan", "--lengths", "5", "--profile", "nowhere.yaml"), "nowhere.yaml: no such file"),
    ],
)
def test_malformed_requests_end_with_2(
    words: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert main(list(words)) == 2
    assert message in capsys.readouterr().err


# Files


FIELDS = {
    "name": "mine",
    "workers": 8,
    "read_bandwidth": 5e10,
    "launch_seconds": 1e-5,
    "merge_seconds": 1e-8,
    "tile_tokens": 128,
    "source": "typed",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "workers must be 1 to 1e[+]06 workers, got 0"),
        ({"workers": 2.5}, "workers must be an integer"),
        ({"workers": True}, "workers must be an integer"),
        (
            {"read_bandwidth": 4.6},
            "read_bandwidth must be 1e[+]07 to 1e[+]15 bytes per second, got 4.6",
        ),
        (
            {"read_bandwidth": "fast"},
            "read_bandwidth must be a number .bytes per second., got 'fast'",
        ),
        ({"read_bandwidth": float("nan")}, "read_bandwidth must be .* got nan"),
        ({"launch_seconds": 3}, "launch_seconds must be 0 to 1 seconds, got 3"),
        ({"launch_seconds": None}, "launch_seconds must be a number"),
        (
            {"merge_seconds": -1e-9},
            "merge_seconds must be 0 to 0.01 seconds per state row, got -1e-09",
        ),
        ({"tile_tokens": "128"}, "tile_tokens must be an integer"),
        ({"name": ""}, "name must be a text, got ''"),
        ({"cores": 3}, "unknown cores; fields are name"),
    ],
)
def test_malformed_fields_name_themselves_their_value_and_the_limit(
    change: dict[str, Any], message: str
) -> None:
    assert profile_from(FIELDS).workers == 8
    with pytest.raises(ValueError, match=message):
        profile_from(FIELDS | change)


@pytest.mark.parametrize("missing", FIELDS)
def test_every_field_is_needed(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} missing"):
        profile_from({name: value for name, value in FIELDS.items() if name != missing})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "profile: [", "is not yaml"),
        ("a.json", "{", "is not json"),
        ("a.json", "[1]", "needs a mapping 'profile'"),
        ("a.yaml", "", "needs a mapping 'profile'"),
        ("a.yaml", "profile: 3", "needs a mapping 'profile'"),
        ("a.yaml", "profile: {workers: 0}", "missing"),
    ],
)
def test_malformed_files_name_themselves(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as fault:
        read_profile(path)
    assert name in str(fault.value)


def test_numbers_without_a_point_are_numbers_in_yaml_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(
        "profile: {name: mine, workers: 8, read_bandwidth: 5e10, launch_seconds: 1e-5,\n"
        "  merge_seconds: 0, tile_tokens: 128, source: typed}\n"
    )
    assert read_profile(path) == replace(profile_from(FIELDS), merge_seconds=0.0)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=str)
def test_every_known_profile_survives_a_file(profile: DeviceProfile, tmp_path: Path) -> None:
    for name in ("one.yaml", "one.json"):
        path = write_profile(tmp_path / name, profile, {})
        read = read_profile(path)
        assert (read, read.source) == (profile, profile.source)
    with pytest.raises(ValueError, match="must end in"):
        write_profile(tmp_path / "one.txt", profile, {})

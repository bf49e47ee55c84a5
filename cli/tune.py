"""``splitkv tune``: measure a device and write its profile for the planner.

Each constant has a measurement of its own name (launch, read, merge, tile) through the backend's
own kernels; the first three come out of one least-squares fit of the planner's model.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import torch

from splitkv import __version__
from splitkv.backends.profiles import SUFFIXES, write_profile
from splitkv.backends.registry import BACKENDS, check_device
from splitkv.cli.output import print_json, print_table, track
from splitkv.cli.tune_fit import Timed, fit, shortest_tile, typical_off
from splitkv.cli.tune_timing import (
    DESIGNS,
    Calls,
    Clock,
    Design,
    DeviceClock,
    measure,
    measure_merges,
    measure_tiles,
)
from splitkv.common.profile import DeviceProfile
from splitkv.matrix.machine import Machine, this_machine

HELP = (
    "Measure a device through the backend's own kernels and fit the planner's constants to it; "
    "predictions are tried on plans that were not fitted. Takes less than a minute on a CPU."
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cpu", help=f"one of {', '.join(DESIGNS)}, or as in cuda:1")
    add("--out", type=Path, metavar="FILE", help=f"where to write it ({', '.join(SUFFIXES)})")


def run(args: argparse.Namespace) -> int:
    _check(args)
    device = torch.device(args.device)
    backend = next(one for one in BACKENDS if one.device_type == device.type)
    design = DESIGNS[device.type]
    with torch.no_grad():
        clock = DeviceClock(Calls(backend, device, design.pool))
        profile, fitted, held_out = tune(design, backend.profile(), clock, progress=True)
    machine = this_machine(device)
    profile = replace(profile, name=machine.device, source=_source(fitted, machine))
    report = _report(profile, machine, fitted, held_out)
    if args.out is not None:
        write_profile(args.out, profile, report)
    if args.json:
        print_json({"profile": _fields(profile), "measured": report})
    else:
        _show(profile, fitted, held_out, args.out)
    return 0


def tune(
    design: Design, known: DeviceProfile, clock: Clock, *, progress: bool = False
) -> tuple[DeviceProfile, list[Timed], list[Timed]]:
    """The fitted profile, what it was fitted to, and what it was not; ``known`` gives workers, and
    the tile that plans are made with.

    Raises:
        ValueError: the times do not determine the constants.
    """
    runs = chain(
        measure((*design.fitted, *design.held_out), known, clock),
        measure_merges(design.merges, clock),
    )
    plans = len(design.fitted) + len(design.held_out)
    times = list(track(runs, "times", plans + len(design.merges)) if progress else runs)
    fitted = [*times[: len(design.fitted)], *times[plans:]]
    held_out = times[len(design.fitted) : plans]
    profile = fit(fitted, known)
    tile = shortest_tile(measure_tiles(design.tiles, profile, clock), profile)
    return replace(profile, tile_tokens=tile), fitted, held_out


def _check(args: argparse.Namespace) -> None:
    kind = args.device.partition(":")[0]
    if kind not in DESIGNS:
        raise ValueError(f"--device {args.device}: measured are {', '.join(DESIGNS)}")
    check_device(args.device)
    if args.out is not None and args.out.suffix not in SUFFIXES:
        raise ValueError(f"--out {args.out} must end in {', '.join(SUFFIXES)}")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"--out {args.out}: no such folder")


def _source(fitted: Sequence[Timed], machine: Machine) -> str:
    day = datetime.now(UTC).date().isoformat()
    return (
        f"splitkv tune, {day}, torch {machine.versions.get('torch')}: workers as the backend has "
        f"them; bandwidth, launch and merge cost fitted to {len(fitted)} times"
    )


def _fields(profile: DeviceProfile) -> dict[str, object]:
    return {name: getattr(profile, name) for name in DeviceProfile.__slots__}


def _report(
    profile: DeviceProfile,
    machine: Machine,
    fitted: Sequence[Timed],
    held_out: Sequence[Timed],
) -> dict[str, object]:
    return {
        "device": machine.device,
        "driver": machine.driver,
        "versions": {"splitkv": __version__, **machine.versions},
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "median_off": {
            "fitted": round(typical_off(fitted, profile), 4),
            "held_out": round(typical_off(held_out, profile), 4),
        },
        "fitted": [_point(one, profile) for one in fitted],
        "held_out": [_point(one, profile) for one in held_out],
    }


def _point(one: Timed, profile: DeviceProfile) -> dict[str, object]:
    return {
        "timed": one.name,
        "measured_us": round(one.seconds * 1e6, 2),
        "predicted_us": round(one.model(profile) * 1e6, 2),
        "off": round(one.off(profile), 4),
    }


def _show(
    profile: DeviceProfile,
    fitted: Sequence[Timed],
    held_out: Sequence[Timed],
    out: Path | None,
) -> None:
    print_table(
        ("constant", "value"),
        [
            ("workers", profile.workers),
            ("read bandwidth", f"{profile.read_bandwidth / 1e9:.4g} GB/s"),
            ("launch", f"{profile.launch_seconds * 1e6:.4g} us"),
            ("merge of a state row", f"{profile.merge_seconds * 1e9:.4g} ns"),
            ("tile", f"{profile.tile_tokens} tokens"),
        ],
        title=profile.name,
    )
    for title, timed in (("Fitted", fitted), ("Not fitted", held_out)):
        print_table(
            ("timed", "measured us", "predicted us", "off"),
            [
                (
                    one.name,
                    f"{one.seconds * 1e6:.1f}",
                    f"{one.model(profile) * 1e6:.1f}",
                    f"{one.off(profile):+.0%}",
                )
                for one in timed
            ],
            title=f"{title}: off by {typical_off(timed, profile):.0%} in the median",
        )
    print(f"written: {out}" if out is not None else "--out FILE keeps it")

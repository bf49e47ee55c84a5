"""Benchmarks in parts, each of which replaces itself in the results file of its device."""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.grid.measure import EAGER, GRAPH, calls_per_turn, release, words
from benchmarks.grid.results import FOLDER, code_digest, file_name
from splitkv.backends.base import Backend
from splitkv.backends.registry import BACKENDS
from splitkv.cli.bench_timing import Candidate, Timing, kernel_timer, take_turns
from splitkv.matrix.machine import this_machine


@dataclass(frozen=True, slots=True)
class Where:
    """quick: sizes for trying this file on a CPU."""

    device: torch.device
    turns: int
    quick: bool

    @property
    def cold_bytes(self) -> int:
        return 1 << 20 if self.quick else 192 << 20

    def count(self, kv_bytes: int) -> int:
        """Calls per turn."""
        mode = GRAPH if self.device.type == "cuda" else EAGER
        return calls_per_turn(mode, kv_bytes, self.device)


Part = Callable[[Where], Mapping[str, object]]


def run_parts(
    kind: str,
    text: str | None,
    parts: Mapping[str, Part],
    arguments: Sequence[str] | None,
    turns: int = 5,
) -> int:
    """The command ``python -m benchmarks.<kind>``, whose help is ``text``."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{kind}", description=text)
    add = parser.add_argument
    add("--only", default=",".join(parts), help=f"parts between commas, of {list(parts)}")
    add("--turns", type=int, default=turns, help=f"interleaved repeats (default {turns})")
    add("--seconds", type=float, default=float("inf"), help="start no part after that long")
    add("--quick", action="store_true", help="tiny sizes: does it run")
    add("--device", help="(default: cuda where there is one, else cpu)")
    add("--out", type=Path, default=FOLDER, help="folder (default: benchmarks/results)")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.only.split(",") if name not in parts]
    if unknown:
        parser.error(f"--only: unknown {unknown}, known: {list(parts)}")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    where, start = Where(device, args.turns, args.quick), time.monotonic()
    failed = False
    for name in args.only.split(","):
        if time.monotonic() - start > args.seconds:
            print(f"out of time before {name}")
            break
        release(device)
        try:
            found = parts[name](where)
        except Exception as error:  # noqa: BLE001 - one part's fault, and the others go on
            failed = True
            print(f"{name} failed: {words(error)}", flush=True)
            continue
        print(f"{name}: {json.dumps(_headlines(found))}", flush=True)
        _save(kind, name, found, where, args.out)
    return 1 if failed else 0


def turns_of(
    where: Where, ways: dict[str, Candidate], kv_bytes: int, at_least: int = 1
) -> dict[str, Timing]:
    """at_least: calls per turn, if bytes ask for fewer."""
    timer, count = kernel_timer(where.device), max(where.count(kv_bytes), at_least)
    return take_turns({name: timer.ready(way, count) for name, way in ways.items()}, where.turns)


def backend_of(device: torch.device) -> Backend:
    return next(backend for backend in BACKENDS if backend.device_type == device.type)


def micro(seconds: float) -> float:
    return float(f"{seconds * 1e6:.5g}")


def facts_of(device: torch.device, turns: int) -> dict[str, object]:
    """When and where figures were taken, of which code."""
    machine = this_machine(device)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": machine.device,
        "driver": machine.driver,
        "versions": machine.versions,
        "digest": code_digest(backend_of(device).name),
        "turns": turns,
    }


def _headlines(found: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in found.items() if not isinstance(value, list | dict)}


def _save(kind: str, name: str, found: Mapping[str, object], where: Where, folder: Path) -> None:
    facts = facts_of(where.device, where.turns)
    file = file_name(str(facts["device"]), kind)
    known: dict[str, object] = {}
    for path in dict.fromkeys((FOLDER / file, folder / file)):
        if path.is_file():
            known |= json.loads(path.read_text(encoding="utf-8"))
    known[name] = {**facts, **found}
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(part)}: {json.dumps(value)}" for part, value in known.items()]
    (folder / file).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

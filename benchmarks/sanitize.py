"""Every kernel under NVIDIA's checker: ``python -m benchmarks.sanitize [--tool memcheck]``.

The grid of ``sanitize_grid`` runs once by itself, which compiles its kernels, and then once under
compute-sanitizer for each tool. A tool counts only if it reports a fault that is planted for it.
Exit codes: 0 all clean; 1 an error, a hazard, a wrong answer, a planted fault that went unseen, or
no compute-sanitizer or GPU here; 2 a malformed request.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.grid.results import FOLDER, code_digest, file_name
from splitkv.matrix.machine import this_machine

TOOLS = ("memcheck", "racecheck", "initcheck")
FOUND = 9
"""Exit code of compute-sanitizer where it reports anything."""
LINES = 40
"""Of a report, kept at most."""
_FILTERED = ("racecheck",)
"""Looks at one kernel at a time, so that only ours need be slowed down. initcheck must see who
writes what they read."""
_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Else a tensor's neighbours are torch's own memory, where no access is out of bounds."""

Words = list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """One run under one tool.

    code: the exit code, None where it did not end in time. reported: errors and hazards by the
    tool's own summary, None where it printed none. wrong, kernels: by probe. lines: of its report.
    """

    tool: str
    seconds: float
    code: int | None
    reported: int | None
    wrong: dict[str, Words]
    kernels: dict[str, Words]
    lines: Words

    def faults(self) -> Words:
        """Why this run is not clean."""
        found = [f"{name}: {'; '.join(words)}" for name, words in self.wrong.items() if words]
        if self.code is None:
            found.append("did not end in time")
        elif self.code:
            found.append(f"exit code {self.code}")
        if self.reported is None:
            found.append("no summary: the tool did not run")
        elif self.reported:
            found.append(f"{self.reported} reported")
        if not any(self.kernels.values()):
            found.append("no kernel was launched")
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    if args.plant is not None:
        from benchmarks.sanitize_plant import plant

        plant(args.plant)
        return 0
    if args.inner is not None:
        return _inner(args)
    sanitizer = shutil.which("compute-sanitizer")
    lack = "compute-sanitizer is not on PATH" if sanitizer is None else None
    if lack is None and args.device == "cuda" and not torch.cuda.is_available():
        lack = "torch sees no CUDA device"
    if sanitizer is None or lack is not None:
        print(f"benchmarks.sanitize: {lack}", file=sys.stderr)
        return 1
    return _outer(sanitizer, args)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.sanitize", description=__doc__)
    add = parser.add_argument
    add("--tool", default=",".join(TOOLS), help=f"between commas, of {list(TOOLS)}")
    add("--only", help="probes of sanitize_grid between commas (default: all)")
    add("--seconds", type=float, default=300, help="for each tool (default 300)")
    add("--jobs", type=int, default=8, help="processes that compile beforehand (default 8)")
    add("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: Triton's interpreter")
    add("--out", type=Path, default=FOLDER, help="folder (default: benchmarks/results)")
    add("--inner", type=Path, metavar="FILE", help="run the grid itself, write what came of it")
    add("--plant", choices=TOOLS, help="commit the fault that this tool must report")
    args = parser.parse_args(arguments)
    unknown = [tool for tool in args.tool.split(",") if tool not in TOOLS]
    if unknown:
        parser.error(f"--tool: unknown {unknown}, known: {list(TOOLS)}")
    return args


def _inner(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported
    from benchmarks import sanitize_grid
    from splitkv.backends.cuda import CudaBackend, InterpretedCudaBackend

    backend = InterpretedCudaBackend() if args.device == "cpu" else CudaBackend()
    if (lack := backend.missing()) is not None:
        print(f"benchmarks.sanitize: {lack}", file=sys.stderr)
        return 1
    names = None if args.only is None else args.only.split(",")
    if unknown := [name for name in names or () if name not in sanitize_grid.PROBES]:
        print(f"--only: unknown {unknown}, known: {list(sanitize_grid.PROBES)}", file=sys.stderr)
        return 2
    found = sanitize_grid.run(backend, torch.device(args.device), names)
    args.inner.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return 1 if any(found.wrong.values()) else 0


def _outer(sanitizer: str, args: argparse.Namespace) -> int:
    only = [*_of(args), *([] if args.only is None else ["--only", args.only])]
    start, kernels, wrong = time.monotonic(), _warm(args), {}
    print(f"compiled {', '.join(kernels)} in {time.monotonic() - start:.0f} s", flush=True)
    reports: dict[str, object] = {}
    for tool in args.tool.split(","):
        filters = kernels if tool in _FILTERED else []
        grid = _under(sanitizer, tool, ["--inner", "{file}", *only], filters, args.seconds)
        planted = _under(sanitizer, tool, ["--plant", tool], [], args.seconds)
        faults = grid.faults()
        if planted.code != FOUND and not planted.reported:
            faults.append("the fault planted for it went unseen")
        wrong[tool] = faults
        reports[tool] = {"clean": not faults, "faults": faults} | {
            "grid": asdict(grid),
            "planted": {"code": planted.code, "lines": planted.lines[:4]},
        }
        print(f"{tool}: {'clean' if not faults else '; '.join(faults)} ({grid.seconds:.0f} s)")
        for line in grid.lines if faults else ():
            print(f"    {line}")
        sys.stdout.flush()
        print(f"written: {_save(sanitizer, reports, kernels, args)}", flush=True)
    return 1 if any(wrong.values()) else 0


def _warm(args: argparse.Namespace) -> Words:
    """Compile what the grid needs, in several processes; names of its kernels.

    Raises:
        SystemExit: a probe is wrong already, or none launches a kernel.
    """
    from benchmarks.sanitize_grid import PROBES

    names = list(PROBES) if args.only is None else args.only.split(",")
    parts = [part for start in range(args.jobs) if (part := names[start :: args.jobs])]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.json" for index in range(len(parts))]
        running = [
            subprocess.Popen([*_this(), "--inner", str(file), *_of(args), "--only", ",".join(part)])
            for file, part in zip(files, parts, strict=True)
        ]
        codes = [process.wait() for process in running]
        found = [_read(file) for file in files]
    wrong = {name: words for one in found for name, words in one["wrong"].items() if words}
    kernels = sorted({name for one in found for words in one["kernels"].values() for name in words})
    if any(codes) or not kernels:
        raise SystemExit(f"without the checker: exit codes {codes}, kernels {kernels}, {wrong}")
    return kernels


def _under(sanitizer: str, tool: str, words: Words, kernels: Words, seconds: float) -> Report:
    """This module with ``words`` under ``tool``, which looks at ``kernels`` (none: at all)."""
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder) / "log", Path(folder) / "found.json"
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
        command += ["--target-processes", "application-only", "--log-file", str(log)]
        for name in kernels:
            command += ["--kernel-regex", f"kns={name}"]
        command += [*_this(), *(word.replace("{file}", str(file)) for word in words)]
        start = time.monotonic()
        code = _run(command, seconds)
        took = time.monotonic() - start
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        found = _read(file)
    lines = [line for line in text.splitlines() if line.strip("= ")]
    return Report(
        tool, round(took, 1), code, reported(text), found["wrong"], found["kernels"], lines[:LINES]
    )


def reported(log: str) -> int | None:
    """Errors and hazards by the summaries in compute-sanitizer's log; None where there is none."""
    counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", log)
    return sum(map(int, counts)) if counts else None


def _run(command: Words, seconds: float) -> int | None:
    """Its exit code, or None where it took longer and was ended with all that it had started."""
    process = subprocess.Popen(command, env=os.environ | _ENVIRONMENT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _this() -> Words:
    return [sys.executable, "-m", "benchmarks.sanitize"]


def _of(args: argparse.Namespace) -> Words:
    return ["--device", args.device]


def _read(file: Path) -> dict[str, dict[str, Words]]:
    if not file.is_file():
        return {"wrong": {}, "kernels": {}}
    found: dict[str, dict[str, Words]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _save(
    sanitizer: str, reports: dict[str, object], kernels: Words, args: argparse.Namespace
) -> Path:
    machine = this_machine(torch.device(args.device))
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True)
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": machine.device,
        "driver": machine.driver,
        "versions": machine.versions
        | {"compute-sanitizer": version.stdout.strip().splitlines()[-1]},
        "digest": code_digest("cuda"),
        "kernels": kernels,
        "tools": reports,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path: Path = args.out / file_name(machine.device, "sanitize")
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())

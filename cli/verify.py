"""``splitkv verify``: what somebody with an NPU runs, and commits.

Questions that the documents leave open are asked of the operators, the case table runs against the
float64 reference, calls are repeated and timed against the vendor's own. A finding that differs
from the documents is a result and no failure; a wrong answer of splitkv is one.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from splitkv import __version__
from splitkv.backends.base import Backend
from splitkv.cli.output import print_json, print_table, track
from splitkv.cli.verify_timing import Timing, timings
from splitkv.matrix import parity
from splitkv.matrix.cases import CASES, cases_named
from splitkv.matrix.contract import Agrees, Finding, all_checks, findings
from splitkv.matrix.evidence import record, save
from splitkv.matrix.machine import Machine, this_machine
from splitkv.matrix.parity import Outcome, Result

HELP = (
    "Ask an NPU what the documents leave open, run the cases on it, time it. Exits 1 without one."
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="npu", choices=["npu"], help="what to verify (default npu)")
    add("--standin", action="store_true", help="a dry run on the CPU imitation of the operators")
    add(
        "--case", metavar="PATTERN", help="only cases whose id matches; then no evidence is written"
    )
    add("--out", type=Path, metavar="FOLDER", help="where to write the evidence files to commit")
    add("--quick", action="store_true", help="short histories and few repetitions in the timings")


def run(args: argparse.Namespace) -> int:
    if args.out is not None and args.case is not None:
        raise ValueError("--out is of all cases: leave out --case")
    cases = cases_named(args.case)
    (backend,) = parity.backends_for("ascend", standin=args.standin)
    if (why := backend.missing()) is not None:
        return _absent(args, why)
    device = torch.device(args.device)
    runs = parity.run([backend], cases, device)
    results = [result for _, result in track(runs, "cases", total=len(cases))]
    times = timings(backend, device, quick=args.quick or args.standin)
    # last: a call that a device does not survive ends what comes after it
    found = list(track(findings(device), "questions", total=len(all_checks())))
    machine = this_machine(device)
    held = not any(result.outcome is Outcome.FAILED for result in results)
    report = _report(backend, machine, found, results, times, held)
    written = [] if args.out is None else _write(args.out, backend, device, results, report)
    if args.json:
        print_json({**report, "written": [str(path) for path in written]})
    else:
        _show(machine, found, results, times, written)
    return 0 if held else 1


def _absent(args: argparse.Namespace, why: str) -> int:
    if args.json:
        print_json({"held": False, "device": None, "why": why})
    else:
        print(f"no NPU to verify: {why}\n--standin is a dry run without one; `splitkv doctor`")
    return 1


def _report(
    backend: Backend,
    machine: Machine,
    found: Sequence[Finding],
    results: Sequence[Result],
    times: Sequence[Timing],
    held: bool,
) -> dict[str, Any]:
    return {
        "held": held,
        "kind": backend.evidence,
        "device": machine.device,
        "driver": machine.driver,
        "versions": {"splitkv": __version__, **machine.versions},
        "contract": [asdict(finding) | {"agrees": finding.agrees.value} for finding in found],
        "parity": {
            "counts": {
                outcome.value: sum(result.outcome is outcome for result in results)
                for outcome in Outcome
            },
            "failed": {
                result.case: list(result.why)
                for result in results
                if result.outcome is Outcome.FAILED
            },
        },
        "timings": [asdict(timing) for timing in times],
    }


def _write(
    folder: Path,
    backend: Backend,
    device: torch.device,
    results: Sequence[Result],
    report: dict[str, Any],
) -> list[Path]:
    """The case table in the form of matrix/evidence, and everything else beside it."""
    entry = record(backend, device, CASES, results, parity.SEED)
    folder.mkdir(parents=True, exist_ok=True)
    contract = folder / f"contract@{re.sub(r'[^a-z0-9]+', '-', report['device'].lower())}.json"
    contract.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [save(entry, folder / entry.path.name), contract]


def _show(
    machine: Machine,
    found: Sequence[Finding],
    results: Sequence[Result],
    times: Sequence[Timing],
    written: Sequence[Path],
) -> None:
    print_table(
        ("check", "", "found"),
        [(one.check, one.agrees.value, one.found) for one in found],
        title=f"What the documents say and what {machine.device} does",
    )
    for one in found:
        if one.agrees is Agrees.NO:
            print(f"{one.check}: {one.question} Documents: {one.documents}.")
    print_table(
        tuple(outcome.value for outcome in Outcome),
        [tuple(sum(result.outcome is outcome for result in results) for outcome in Outcome)],
        title="The case table, each case run twice and compared bit by bit",
    )
    for result in results:
        if result.outcome is Outcome.FAILED:
            print(f"{result.case}: {'; '.join(result.why)}")
    print_table(
        ("requests", "keys", "way", "microseconds"),
        [(one.requests, one.keys, one.way, f"{one.microseconds:.0f}") for one in times],
        title="Median of whole calls, the device waited for",
    )
    for path in written:
        print(f"written: {path}")

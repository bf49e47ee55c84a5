"""``splitkv parity``: the cases on the backends in reach, against the float64 reference."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from splitkv.backends.base import Backend
from splitkv.backends.registry import check_device
from splitkv.cli import parity_jobs
from splitkv.cli.output import print_json, print_table, track
from splitkv.matrix import parity
from splitkv.matrix.case import Case
from splitkv.matrix.cases import cases_named
from splitkv.matrix.evidence import differences, load, one_digit, record, save, sources_digest
from splitkv.matrix.parity import SEED, Outcome, Result

HELP = "Run the cases on the backends in reach against the float64 reference."

SHOWN_CASES = 24
"""Up to so many cases are listed one by one; failures always are."""

Results = Mapping[str, Sequence[Result]]


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", metavar="NAME", help="only this backend, which must then be in reach")
    add("--case", metavar="PATTERN", help="only cases whose id matches, as in 'window*'")
    add("--device", help="where the named backend's tensors live, as in cuda:1")
    add(
        "--interpreter", action="store_true", help="CUDA kernels in Triton's interpreter on the CPU"
    )
    add("--standin", action="store_true", help="Ascend on a CPU imitation of its operators")
    add("--seed", type=int, default=SEED, metavar="N", help=f"of the inputs (default {SEED})")
    add("--jobs", type=int, default=1, metavar="N", help="processes at work at a time (default 1)")
    add("--record", action="store_true", help="write matrix/evidence for the backends in reach")
    add("--against", type=Path, metavar="FILE", help="compare with another host's evidence")


def run(args: argparse.Namespace) -> int:
    _check(args)
    cases = cases_named(args.case)
    backends = parity.backends_for(args.backend, interpreter=args.interpreter, standin=args.standin)
    if args.device is not None:
        check_device(args.device)
    results: dict[str, list[Result]] = {backend.name: [] for backend in backends}
    sources = {name: sources_digest(name) for name in results}
    runs = _runs(args, backends, cases)
    for backend, result in track(runs, "cases", total=len(cases) * len(backends)):
        results[backend.name].append(result)
    if args.record and sources != {name: sources_digest(name) for name in results}:
        raise ValueError("the code changed while the cases ran: nothing recorded, run again")
    written, compared, unlike = _evidence(args, backends, cases, results)
    held = _held(results, named=args.backend is not None) and not unlike
    if args.json:
        print_json(_as_json(args, results, written, compared, unlike, held))
    else:
        _show(results, written, unlike)
        if args.against is not None:
            print(f"{compared} cases compared with {args.against}, {len(unlike)} unlike")
    return 0 if held else 1


def _runs(
    args: argparse.Namespace, backends: Sequence[Backend], cases: Sequence[Case]
) -> Iterator[tuple[Backend, Result]]:
    if args.jobs == 1:
        return parity.run(backends, cases, args.device, args.seed)
    threads = max(1, torch.get_num_threads() // args.jobs)
    asked = parity_jobs.Asked(args.interpreter, args.standin, args.device, args.seed, threads)
    return parity_jobs.run(backends, cases, asked, args.jobs)


def _check(args: argparse.Namespace) -> None:
    if args.jobs < 1:
        raise ValueError(f"--jobs must be 1 or more, got {args.jobs}")
    if args.record and (args.case is not None or args.seed != SEED):
        raise ValueError(f"--record is of all cases with seed {SEED}: leave out --case and --seed")
    if args.device is not None and args.backend is None:
        raise ValueError(f"--device {args.device} needs --backend: each has a device of its own")
    if args.interpreter and find_spec("triton") is None:
        raise ValueError(
            "--interpreter runs Triton's, and triton is not installed: pip install triton"
        )
    if args.against is not None and not args.against.is_file():
        raise ValueError(f"--against {args.against}: no such file")


def _evidence(
    args: argparse.Namespace, backends: Sequence[Backend], cases: Sequence[Case], results: Results
) -> tuple[list[Path], int, list[str]]:
    """What was written, how many runs were compared with another host's, and where they do not bear
    each other out.
    """
    if not args.record and args.against is None:
        return [], 0, []
    mine = [
        record(backend, _device(backend, args), cases, results[backend.name], args.seed)
        for backend in backends
        if backend.missing() is None
    ]
    written = [save(entry) for entry in mine] if args.record else []
    compared, unlike = 0, list[str]()
    if args.against is not None:
        theirs = load(args.against)
        known = {run.case for run in theirs.runs}
        for entry in mine:
            compared += sum(run.case in known for run in entry.runs)
            unlike += [f"{entry.backend}: {line}" for line in differences(entry, theirs)]
    return written, compared, unlike


def _device(backend: Backend, args: argparse.Namespace) -> torch.device:
    return torch.device(args.device or backend.device_type)


def _held(results: Results, named: bool) -> bool:
    """Nothing failed; a backend asked for by name, or every one if need be, was in reach."""
    outcomes = [result.outcome for found in results.values() for result in found]
    ran = any(outcome in (Outcome.PASSED, Outcome.REFUSED) for outcome in outcomes)
    absent = named and Outcome.MISSING in outcomes
    return ran and not absent and Outcome.FAILED not in outcomes


def _counts(found: Sequence[Result]) -> dict[str, int]:
    return {
        outcome.value: sum(result.outcome is outcome for result in found) for outcome in Outcome
    }


def _worst(found: Sequence[Result]) -> float | None:
    passed = [result.errors.norm for result in found if result.errors is not None]
    return one_digit(max(passed)) if passed else None


def _as_json(
    args: argparse.Namespace,
    results: Results,
    written: Sequence[Path],
    compared: int,
    unlike: Sequence[str],
    held: bool,
) -> dict[str, object]:
    return {
        "held": held,
        "seed": args.seed,
        "backends": {
            name: {
                "counts": _counts(found),
                "worst_error": _worst(found),
                "cases": [_result_json(result) for result in found],
            }
            for name, found in results.items()
        },
        "compared": compared,
        "unlike": list(unlike),
        "written": [str(path) for path in written],
    }


def _result_json(result: Result) -> dict[str, object]:
    errors = result.errors
    return {
        "case": result.case,
        "outcome": result.outcome.value,
        "error": None if errors is None else one_digit(errors.norm),
        "worst": None if errors is None else one_digit(errors.worst),
        "lse_error": None if errors is None else one_digit(errors.lse),
        "why": list(result.why),
    }


def _show(results: Results, written: Sequence[Path], unlike: Sequence[str]) -> None:
    lines = [(name, result) for name, found in results.items() for result in found]
    few = len(lines) <= SHOWN_CASES
    listed = [entry for entry in lines if few or entry[1].outcome is Outcome.FAILED]
    if listed:
        print_table(
            ("backend", "case", "outcome", "error", "why"),
            [_row(name, result) for name, result in listed],
        )
    print_table(
        ("backend", *(outcome.value for outcome in Outcome), "worst error", ""),
        [
            (name, *_counts(found).values(), _worst(found), _absence(found))
            for name, found in results.items()
        ],
    )
    for line in unlike:
        print(f"unlike: {line}")
    for path in written:
        print(f"recorded: {path}")


def _row(name: str, result: Result) -> tuple[object, ...]:
    error = None if result.errors is None else one_digit(result.errors.norm)
    return name, result.case, result.outcome.value, error, "; ".join(result.why)


def _absence(found: Sequence[Result]) -> str | None:
    return next((result.why[0] for result in found if result.outcome is Outcome.MISSING), None)

"""``splitkv fuzz``: random requests on the backends in reach, against the float64 reference.

A request runs as a case of ``splitkv parity`` does: twice with the same bits, once more with poison
in every slot that no query may see, within bounds that nobody tuned. What fails is made small; what
was out of bounds by chance (``matrix.verdict``) is counted as close.
"""

import argparse
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from splitkv.backends.base import Backend
from splitkv.cli.output import print_json, print_table
from splitkv.common.spec import Feature
from splitkv.common.support import UnsupportedError
from splitkv.matrix import parity
from splitkv.matrix.case import Case
from splitkv.matrix.case_text import from_text, to_text
from splitkv.matrix.evidence import one_digit
from splitkv.matrix.fuzz import MOST_TOKENS, draw
from splitkv.matrix.parity import Outcome
from splitkv.matrix.shrink import MOST_TRIES, Shrunk, shrink
from splitkv.matrix.verdict import Verdict, excess, judge

HELP = (
    "Draw random requests, run each on the backends in reach against the float64 reference, and "
    "make what fails small. Exits 1 with a line that replays it."
)

COUNT = 300
SHOWN_REASONS = 12
_PROGRESS_SECONDS = 0.5
_KINDS = ("passed", "failed", "refused", "close")


@dataclass(frozen=True, slots=True)
class Failure:
    """A drawn case that failed on a backend, and what it was shrunk to."""

    backend: str
    drawn: Case
    why: tuple[str, ...]
    shrunk: Shrunk


@dataclass(frozen=True, slots=True)
class Close:
    """A drawn case that was out of bounds, but not with other numbers; excess: error over bound."""

    backend: str
    case: Case
    why: tuple[str, ...]
    excess: float


@dataclass(slots=True)
class Tally:
    """What the requests came to so far; refusals and errors by backend."""

    backends: tuple[Backend, ...]
    drawn: int = 0
    seconds: float = 0.0
    features: Counter[Feature] = field(default_factory=Counter)
    outcomes: dict[str, Counter[Outcome]] = field(default_factory=dict)
    refusals: dict[str, Counter[str]] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    close: list[Close] = field(default_factory=list)

    def add(self, backend: Backend, case: Case, verdict: Verdict) -> None:
        name, result = backend.name, verdict.result
        if verdict.close:
            self.close.append(Close(name, case, result.why, excess(result)))
        self.outcomes.setdefault(name, Counter())[result.outcome] += 1
        if result.outcome is Outcome.REFUSED:
            self.refusals.setdefault(name, Counter()).update(result.why)
        norm = None if result.errors is None else result.errors.norm
        if result.outcome is Outcome.PASSED and norm is not None and math.isfinite(norm):
            self.worst[name] = max(self.worst.get(name, 0.0), norm)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--backend",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="only these, which must then be in reach (default: all that are)",
    )
    add("--standin", action="store_true", help="Ascend on a CPU imitation of its operators")
    add(
        "--interpreter", action="store_true", help="CUDA kernels in Triton's interpreter on the CPU"
    )
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--seconds", type=float, metavar="N", help="draw for so long")
    how_long.add_argument("--count", type=int, metavar="N", help=f"draw so many (default {COUNT})")
    how_long.add_argument("--case", metavar="TEXT", help="run this one again, as printed")
    add("--seed", type=int, default=0, metavar="S", help="of the drawing (default 0)")
    add("--first", type=int, default=0, metavar="I", help="index of the first draw (default 0)")
    add(
        "--tokens",
        type=int,
        default=MOST_TOKENS,
        metavar="N",
        help=f"at most so many per request (default {MOST_TOKENS})",
    )
    add("--failures", type=int, default=1, metavar="N", help="stop after so many (default 1)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    case = None if args.case is None else from_text(args.case)
    backends = _backends(args)
    if case is not None:
        return _replay(backends, case, as_json=args.json)
    tally = Tally(backends)
    try:
        _fuzz(tally, args)
    except KeyboardInterrupt:
        print(f"stopped after {tally.drawn} requests", file=sys.stderr)
    if args.json:
        print_json(_as_json(tally, args))
    else:
        _show(tally, args)
    return 1 if tally.failures else 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("count", 1), ("first", 0), ("tokens", 3), ("failures", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be {least} or more, got {value}")
    if args.seconds is not None and not 0 < args.seconds < float("inf"):
        raise ValueError(f"--seconds must be above 0 and finite, got {args.seconds}")


def _backends(args: argparse.Namespace) -> tuple[Backend, ...]:
    """Those asked for, or all that this machine can run.

    Raises:
        UnsupportedError: one asked for by name is not in reach.
    """
    names = [None] if args.backend is None else list(dict.fromkeys(args.backend))
    found = [
        backend
        for name in names
        for backend in parity.backends_for(name, interpreter=args.interpreter, standin=args.standin)
    ]
    lacks = {backend.name: lack for backend in found if (lack := backend.missing()) is not None}
    if args.backend is not None and lacks:
        raise UnsupportedError("; ".join(f"backend {name!r}: {why}" for name, why in lacks.items()))
    return tuple(backend for backend in found if backend.name not in lacks)


def _fuzz(tally: Tally, args: argparse.Namespace) -> None:
    for case in _ticking(tally, args):
        tally.drawn += 1
        tally.features.update(case.features)
        for backend in tally.backends:
            verdict = judge(backend, case)
            tally.add(backend, case, verdict)
            if (result := verdict.result).outcome is Outcome.FAILED:
                small = shrink(backend, case, result)
                tally.failures.append(Failure(backend.name, case, result.why, small))
        if len(tally.failures) >= args.failures:
            return


def _ticking(tally: Tally, args: argparse.Namespace) -> Iterator[Case]:
    """Cases until time or count is up; says on a terminal how it goes."""
    start = shown = time.monotonic()
    most = None if args.seconds is not None else args.count or COUNT
    for index in count(args.first):
        if args.seconds is None and tally.drawn == most:
            break
        if args.seconds is not None and tally.seconds >= args.seconds:
            break
        yield draw(args.seed, index, args.tokens)
        now = time.monotonic()
        tally.seconds = now - start
        if sys.stderr.isatty() and now - shown > _PROGRESS_SECONDS:
            shown = now
            of = "" if most is None else f" of {most}"
            line = f"{tally.drawn}{of} drawn, {tally.drawn / tally.seconds:.1f} a second"
            print(f"\r{line}, {len(tally.failures)} failed ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _replay(backends: Sequence[Backend], case: Case, *, as_json: bool) -> int:
    results = [(backend.name, judge(backend, case).result) for backend in backends]
    held = all(result.outcome is not Outcome.FAILED for _, result in results)
    if as_json:
        ran = {
            name: {
                "outcome": result.outcome.value,
                "error": None if result.errors is None else one_digit(result.errors.norm),
                "why": list(result.why),
            }
            for name, result in results
        }
        print_json({"held": held, "case": to_text(case), "backends": ran})
    else:
        print_table(
            ("backend", "outcome", "error", "why"),
            [
                (
                    name,
                    result.outcome.value,
                    None if result.errors is None else one_digit(result.errors.norm),
                    "; ".join(result.why),
                )
                for name, result in results
            ],
        )
    return 0 if held else 1


def _replay_line(failure: Failure, args: argparse.Namespace) -> str:
    way = [flag for flag in ("standin", "interpreter") if getattr(args, flag)]
    flags = " ".join(f"--{flag} " for flag in way)
    return f"splitkv fuzz --backend {failure.backend} {flags}--case {_quoted(failure.shrunk.case)}"


def _quoted(case: Case) -> str:
    return shlex.quote(to_text(case))


def _as_json(tally: Tally, args: argparse.Namespace) -> dict[str, object]:
    return {
        "held": not tally.failures,
        "seed": args.seed,
        "first": args.first,
        "tokens": args.tokens,
        "drawn": tally.drawn,
        "seconds": round(tally.seconds, 2),
        "features": {feature.name: tally.features[feature] for feature in Feature},
        "backends": {
            backend.name: {
                "counts": _counts(tally, backend),
                "refusals": dict(tally.refusals.get(backend.name, Counter()).most_common()),
                "worst_error": _worst(tally, backend),
            }
            for backend in tally.backends
        },
        "close": [
            {
                "backend": one.backend,
                "case": to_text(one.case),
                "why": list(one.why),
                "excess": one_digit(one.excess),
            }
            for one in tally.close
        ],
        "failures": [
            {
                "backend": failure.backend,
                "drawn": to_text(failure.drawn),
                "drawn_why": list(failure.why),
                "case": to_text(failure.shrunk.case),
                "why": list(failure.shrunk.result.why),
                "tries": failure.shrunk.tries,
                "replay": _replay_line(failure, args),
            }
            for failure in tally.failures
        ],
    }


def _counts(tally: Tally, backend: Backend) -> dict[str, int]:
    """By the names of ``_KINDS``; what was close has passed too."""
    found = tally.outcomes.get(backend.name, Counter())
    close = sum(one.backend == backend.name for one in tally.close)
    outcomes = (found[kind] for kind in (Outcome.PASSED, Outcome.FAILED, Outcome.REFUSED))
    return dict(zip(_KINDS, (*outcomes, close), strict=True))


def _worst(tally: Tally, backend: Backend) -> float | None:
    worst = tally.worst.get(backend.name)
    return None if worst is None else one_digit(worst)


def _show(tally: Tally, args: argparse.Namespace) -> None:
    rate = tally.drawn / tally.seconds if tally.seconds else 0.0
    last = args.first + tally.drawn - 1
    print_table(
        ("backend", *_KINDS, "worst error"),
        [
            (backend.name, *_counts(tally, backend).values(), _worst(tally, backend))
            for backend in tally.backends
        ],
        title=f"seed {args.seed}, requests {args.first} to {last}, {rate:.1f} a second",
    )
    for backend in tally.backends:
        _show_refusals(backend, tally.refusals.get(backend.name, Counter()))
    for failure in tally.failures:
        print(f"{failure.backend} failed: {'; '.join(failure.why)}")
        print(f"  drawn:    {to_text(failure.drawn)}")
        print(f"  smallest: {'; '.join(failure.shrunk.result.why)}")
        if failure.shrunk.tries >= MOST_TRIES:
            print(f"  ({MOST_TRIES} tries were spent: there may be a smaller one)")
        print(_replay_line(failure, args))


def _show_refusals(backend: Backend, reasons: Counter[str]) -> None:
    if not reasons:
        return
    shown = reasons.most_common(SHOWN_REASONS)
    print_table(("requests", f"why {backend.name} refused"), [(n, why) for why, n in shown])
    if len(reasons) > len(shown):
        print(f"and {len(reasons) - len(shown)} more reasons; --json has all of them")

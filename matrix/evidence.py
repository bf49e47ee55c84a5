"""Recorded runs, one JSON file per backend and device: what the support matrix stands on."""

import ast
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from splitkv.backends.base import Backend
from splitkv.matrix.case import Case
from splitkv.matrix.draw import digest as inputs_digest
from splitkv.matrix.machine import this_machine
from splitkv.matrix.parity import Outcome, Result

ROOT = Path(__file__).parent.parent
"""The package: in a checkout a folder of links, in an installation the files."""
FOLDER = Path(__file__).parent / "evidence"


class Kind(Enum):
    """What a recorded run is worth, best first."""

    DEVICE = "device"
    INTERPRETER = "interpreter"
    """the kernels themselves, run by Triton's interpreter"""
    STAND_IN = "stand-in"
    """our host code against an imitation of the vendor's operators"""
    AOT = "aot"
    """the kernels compile for the device; nothing ran"""


@dataclass(frozen=True, slots=True)
class Run:
    """One case. Digests: of its definition, and of its tensors; errors to one digit."""

    case: str
    case_digest: str
    inputs_digest: str
    outcome: Outcome
    error: float | None = None
    worst: float | None = None
    lse_error: float | None = None
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """All cases of one backend on one device. date: the day, UTC. sources: digest of what ran."""

    backend: str
    kind: Kind
    device: str
    driver: str | None
    date: str
    versions: Mapping[str, str]
    seed: int
    sources: str
    runs: tuple[Run, ...]

    @property
    def path(self) -> Path:
        """Where it is kept: named after the device, or after its kind where there was none."""
        named = self.device if self.kind in (Kind.DEVICE, Kind.AOT) else self.kind.value
        slug = re.sub(r"[^a-z0-9]+", "-", named.lower()).strip("-")
        return FOLDER / f"{self.backend}@{slug}.json"


def record(
    backend: Backend,
    device: torch.device,
    cases: Iterable[Case],
    results: Iterable[Result],
    seed: int,
) -> Evidence:
    """What has just been run on this machine.

    Raises:
        ValueError: a case is missing (device or library absent): there is nothing to record.
    """
    runs = []
    for case, result in zip(cases, results, strict=True):
        if result.outcome is Outcome.MISSING:
            raise ValueError(f"nothing to record for {backend.name}: {'; '.join(result.why)}")
        runs.append(_run(case, result, seed))
    libraries = ("triton",) if Kind(backend.evidence) is Kind.INTERPRETER else ()
    machine = this_machine(device, libraries)
    return Evidence(
        backend.name,
        Kind(backend.evidence),
        machine.device,
        machine.driver,
        datetime.now(UTC).date().isoformat(),
        machine.versions,
        seed,
        sources_digest(backend.name),
        tuple(runs),
    )


def _run(case: Case, result: Result, seed: int) -> Run:
    of_case = (case.id, case.digest, inputs_digest(case, seed), result.outcome)
    found = result.errors
    if found is None:
        return Run(*of_case, why=result.why)
    return Run(
        *of_case,
        one_digit(found.norm),
        one_digit(found.worst),
        one_digit(found.lse),
        result.why,
    )


def save(evidence: Evidence, path: Path | None = None) -> Path:
    """Write ``evidence``, one line per run; returns where."""
    head: dict[str, Any] = asdict(evidence)
    head["kind"] = evidence.kind.value
    lines = [json.dumps(_without_none(run), ensure_ascii=False) for run in head.pop("runs")]
    text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    text += ',\n  "runs": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}\n"
    path = path or evidence.path
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path) -> Evidence:
    """Read what ``save`` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no evidence file: not JSON ({error})") from error
    if not isinstance(fields, dict) or not {"runs", "kind", "backend"} <= fields.keys():
        raise ValueError(f"{path} is no evidence file: no runs, kind and backend in it")
    runs = tuple(
        Run(**run | {"outcome": Outcome(run["outcome"]), "why": tuple(run.get("why", ()))})
        for run in fields.pop("runs")
    )
    return Evidence(**fields | {"kind": Kind(fields["kind"]), "runs": runs})


def load_all(folder: Path = FOLDER) -> tuple[Evidence, ...]:
    """Every recorded file, best kind first, then by name."""
    found = [load(path) for path in sorted(folder.glob("*.json"))]
    return tuple(sorted(found, key=lambda evidence: list(Kind).index(evidence.kind)))


def one_digit(error: float) -> float | None:
    """``error`` to one significant digit, None where it is infinite: later digits are noise."""
    return float(f"{error:.0e}") if math.isfinite(error) else None


def differences(mine: Evidence, theirs: Evidence) -> list[str]:
    """Where these runs do not bear out another host's: other inputs, or passed there, not here."""
    if mine.seed != theirs.seed:
        return [f"seed {mine.seed} here, {theirs.seed} there: not the same inputs"]
    known = {run.case: run for run in theirs.runs}
    found = []
    for run in mine.runs:
        other = known.get(run.case)
        if other is None or other.outcome is not Outcome.PASSED:
            continue
        if run.inputs_digest != other.inputs_digest:
            found.append(
                f"{run.case}: inputs {run.inputs_digest} here, {other.inputs_digest} there"
            )
        elif run.outcome is not Outcome.PASSED:
            found.append(f"{run.case}: {run.outcome.value} here, passed on {theirs.device}")
    return found


def sources_digest(backend: str, root: Path = ROOT) -> str:
    """Of ``common``, the backend's files and its kernels, whatever their comments and layout."""
    found = hashlib.sha256()
    for path in _sources(backend, root):
        found.update(path.relative_to(root).as_posix().encode())
        is_code = path.suffix == ".py"
        text = (
            canonical(path.read_text(encoding="utf-8")).encode() if is_code else path.read_bytes()
        )
        found.update(hashlib.sha256(text).digest())
    return found.hexdigest()[:12]


def _sources(backend: str, root: Path) -> Iterator[Path]:
    yield from sorted((root / "common").glob("*.py"))
    yield root / "backends" / "base.py"
    yield from sorted((root / "backends").glob(f"{backend}*.py"))
    kernels = root / f"kernels_{backend}"
    yield from sorted(p for p in kernels.rglob("*") if p.suffix in (".py", ".json", ".yaml"))


def canonical(source: str) -> str:
    """The syntax tree of ``source`` without docstrings, the same in every version of Python."""
    return repr(_plain(ast.parse(source)))


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(entry) for entry in node if not _is_docstring(entry)]
    if not isinstance(node, ast.AST):
        return node
    filled = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    return (type(node).__name__, [(name, _plain(value)) for name, value in filled.items()])


def _is_docstring(node: Any) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.value if isinstance(value, Enum) else value
        for name, value in fields.items()
        if value not in (None, (), [])
    }

"""The support matrix as text: declarations and runs in, SUPPORT.md and support.yaml out. Pure."""

from collections.abc import Mapping, Sequence

import yaml

from splitkv.backends.base import Backend
from splitkv.common.support import Support, dtype_name
from splitkv.matrix.case import Case
from splitkv.matrix.cells import (
    Cell,
    RouteCell,
    Row,
    Standing,
    Word,
    cell,
    chip_routes,
    chips,
    current_runs,
    of_chip,
    of_today,
    routes,
    tables,
)
from splitkv.matrix.evidence import Evidence, Kind
from splitkv.matrix.parity import Outcome, refusals

HEAD = """\
<!-- Written by `python -m splitkv.matrix`; do not edit. -->
# Support matrix

What each backend takes, why it refuses the rest, and on what evidence. A cell joins the backend's
declaration (in code, every feature stated) with recorded runs of the cases in `matrix/cases.py`:

- **passed on a device**: every run gave the float64 reference's answer, within twice what plain
  PyTorch in the same dtype is off. The error is the norm of the difference over the answer's norm,
  the worst case counts.
- **checked in the interpreter**: the kernels ran in Triton's interpreter, not on a device.
- **checked against a stand-in**: our host code ran against an imitation of the vendor's operators.
  It says nothing about a device.
- **compiles for a target**: nothing ran.
- **declared, not run**: the declaration says yes, no run bears it out yet.
- **broken**: declared yes, and a run of today's code failed.
- **no**: *not yet* (not implemented here), *upstream* (needs a vendor change) or *never* (not meant
  to), and the reason. Refusals are runs too: their words are compared.
"""


def support_page(
    backends: Sequence[Backend],
    evidence: Sequence[Evidence],
    cases: Sequence[Case],
    sources: Mapping[str, str],
) -> str:
    """SUPPORT.md. ``sources``: today's digest of each backend's code, which runs may predate."""
    recorded, evidence = evidence, of_today(evidence, sources)
    parts = [HEAD]
    for title, rows in tables(cases).items():
        parts.append(_table(title, rows, backends, evidence, cases))
    for backend in backends:
        if rows := routes(backend, cases):
            parts.append(_table(f"Route of `{backend.name}`", rows, [backend], evidence, cases))
        parts += _chip_tables(backend, evidence, cases)
    parts.append("## Declared ranges\n\n" + _ranges(backends))
    parts.append("## Runs\n\n" + _runs(recorded, cases, sources))
    for backend in backends:
        if listed := _combinations(backend, evidence, cases):
            parts.append(f"## Combinations that `{backend.name}` refuses\n\n" + listed)
    return "\n".join(parts)


def support_yaml(
    backends: Sequence[Backend],
    evidence: Sequence[Evidence],
    cases: Sequence[Case],
    sources: Mapping[str, str],
) -> str:
    """support.yaml: the same, for programs."""
    content = support_data(backends, evidence, cases, sources)
    head = "# Written by `python -m splitkv.matrix`; do not edit.\n"
    return head + yaml.safe_dump(content, sort_keys=False, width=110, allow_unicode=True)


def support_data(
    backends: Sequence[Backend],
    evidence: Sequence[Evidence],
    cases: Sequence[Case],
    sources: Mapping[str, str],
) -> dict[str, object]:
    """What support.yaml holds."""
    recorded, evidence = evidence, of_today(evidence, sources)
    return {
        "backends": {backend.name: _declared(backend.support) for backend in backends},
        "tables": {
            title: {
                row.title: {
                    backend.name: _cell_fields(cell(row, backend, evidence, cases))
                    for backend in backends
                }
                for row in rows
            }
            for title, rows in tables(cases).items()
        },
        "routes": {
            backend.name: {
                row.title: _cell_fields(cell(row, backend, evidence, cases))
                for row in routes(backend, cases)
            }
            for backend in backends
        },
        "chips": {
            backend.name: {chip: _chip_fields(chip, one, evidence, cases) for chip, one in found}
            for backend in backends
            if (found := list(chips(backend).items()))
        },
        "runs": [_run_fields(entry, cases, sources) for entry in recorded],
    }


def broken(
    backends: Sequence[Backend], evidence: Sequence[Evidence], cases: Sequence[Case]
) -> list[str]:
    """Every broken cell, as ``backend: row: what failed``."""
    return [
        f"{backend.name}: {row.title}: {found.sentence}"
        for rows in tables(cases).values()
        for row in rows
        for backend in backends
        if (found := cell(row, backend, evidence, cases)).word is Word.BROKEN
    ]


def cell_text(found: Cell) -> str:
    """The words of one cell."""
    if found.word is Word.NO:
        return f"no, {found.sentence}"
    if found.word is Word.BROKEN:
        return f"**broken**: {found.sentence}"
    if found.word is Word.DECLARED:
        return str(found.word.value)
    texts = "; ".join(map(_standing_text, found.standing))
    if found.word is Word.PASSED:
        return f"passed on {texts}"
    return f"compiles for {texts}" if found.word is Word.COMPILES else f"{found.word.value} {texts}"


def _standing_text(standing: Standing) -> str:
    entry = standing.evidence
    libraries = [f"{name} {entry.versions[name]}" for name in _COMPUTE if name in entry.versions]
    details = [entry.date, *libraries]
    if standing.error is not None:
        details.append(f"worst error {_short(standing.error)}")
    details.append(f"{standing.passed} of {standing.cases} cases")
    text = f"({', '.join(details)})"
    return f"{entry.device} {text}" if entry.kind in (Kind.DEVICE, Kind.AOT) else text


def _short(error: float) -> str:
    """``2e-3``; ``0`` where there is none."""
    mantissa, exponent = f"{error:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}" if error else "0"


_COMPUTE = ("torch", "triton", "torch_npu", "cann")
"""Of the recorded versions those that a cell names; the table of runs has all."""


def _table(
    title: str,
    rows: Sequence[Row],
    backends: Sequence[Backend],
    evidence: Sequence[Evidence],
    cases: Sequence[Case],
) -> str:
    lines = [[title, *(f"`{backend.name}`" for backend in backends)]]
    for row in rows:
        cells = [cell(row, backend, evidence, cases) for backend in backends]
        lines.append([row.title, *map(cell_text, cells)])
    return f"## {title}\n\n" + _markdown(lines)


def _chip_tables(
    backend: Backend, evidence: Sequence[Evidence], cases: Sequence[Case]
) -> list[str]:
    """The features and the routes of a backend whose answers depend on the chip, chip by chip."""
    by_chip = chips(backend)
    if not by_chip:
        return []
    head = [f"Chip: features of `{backend.name}`", *by_chip]
    lines = [head]
    for row in tables(cases)["Feature"]:
        found = (cell(row, one, of_chip(evidence, chip), cases) for chip, one in by_chip.items())
        lines.append([row.title, *map(cell_text, found)])
    features = f"## {head[0]}\n\n" + _markdown(lines)
    head = [f"Chip: routes of `{backend.name}`", *by_chip]
    columns = [chip_routes(chip, evidence, cases) for chip in by_chip]
    lines = [head]
    lines += [
        [name, *(_route_text(column[name], cases) for column in columns)] for name in columns[0]
    ]
    return [features, f"## {head[0]}\n\n{_ROUTES_NOTE}\n" + _markdown(lines)]


_ROUTES_NOTE = """\
What a route takes of the cases, were it the only one; runs count for the route that was chosen in
them. `splitkv explain --soc` says why a route is not chosen.
"""


def _route_text(found: RouteCell, cases: Sequence[Case]) -> str:
    text = cell_text(found.cell)
    return f"{text}; takes {found.takes} of {len(cases)} cases" if found.takes else text


def _chip_fields(
    chip: str, backend: Backend, evidence: Sequence[Evidence], cases: Sequence[Case]
) -> dict[str, object]:
    runs = of_chip(evidence, chip)
    features = {
        row.title: _cell_fields(cell(row, backend, runs, cases)) for row in tables(cases)["Feature"]
    }
    routes = {
        name: {**_cell_fields(found.cell), "takes": found.takes}
        for name, found in chip_routes(chip, evidence, cases).items()
    }
    return {"features": features, "routes": routes}


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = [" | ".join(entry.replace("|", "\\|") for entry in line) for line in lines]
    rule = " | ".join("---" for _ in lines[0])
    return "".join(f"| {line} |\n" for line in (head, rule, *body))


def _ranges(backends: Sequence[Backend]) -> str:
    declared = {backend.name: _declared(backend.support) for backend in backends}
    names = list(next(iter(declared.values())))
    lines = [["", *(f"`{name}`" for name in declared)]]
    lines += [[name, *(str(ranges[name]) for ranges in declared.values())] for name in names]
    return _markdown(lines)


def _declared(support: Support) -> dict[str, str]:
    return {
        "dtype of q": ", ".join(map(dtype_name, support.dtypes)),
        "dtype of the cache": ", ".join(map(dtype_name, support.kv_dtypes)),
        "D": str(support.head_dim),
        "Dv": str(support.head_dim_v),
        "G": str(support.group),
        "P": str(support.page_size),
        "S": str(support.num_queries),
    }


def _runs(evidence: Sequence[Evidence], cases: Sequence[Case], sources: Mapping[str, str]) -> str:
    head = ["backend", "device", "kind", "day", "driver", "versions", "seed"]
    head += ["passed", "failed", "refused", "not run yet"]
    fields = [_run_fields(entry, cases, sources) for entry in evidence]
    lines = [[_plain(line[name]) for name in head] for line in fields]
    stale = [f"\n{line['stale']}\n" for line in fields if line["stale"]]
    return _markdown([head, *lines]) + "".join(stale)


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    return "" if value is None else str(value)


def _run_fields(
    entry: Evidence, cases: Sequence[Case], sources: Mapping[str, str]
) -> dict[str, object]:
    current = current_runs(entry, cases)
    known = {run.case for run in entry.runs}
    new = [case.id for case in cases if case.id not in known]
    counts = {
        outcome.value: sum(run.outcome is outcome for run in current)
        for outcome in (Outcome.PASSED, Outcome.FAILED, Outcome.REFUSED)
    }
    return {
        "backend": entry.backend,
        "device": entry.device,
        "kind": entry.kind.value,
        "day": entry.date,
        "driver": entry.driver,
        "versions": dict(entry.versions),
        "seed": entry.seed,
        **counts,
        "not run yet": len(new),
        "stale": _stale(entry, len(current), len(cases) - len(new), sources),
    }


def _stale(entry: Evidence, current: int, known: int, sources: Mapping[str, str]) -> str | None:
    """One sentence on what has changed since the run, None where nothing has. known: of the cases
    those that the run has; others are new, which takes nothing from what it says.
    """
    found = []
    if entry.sources != sources[entry.backend]:
        found.append(
            f"its {current} runs predate the last change to common/, backends/{entry.backend}*.py "
            f"or kernels_{entry.backend}/"
        )
        failed = [run.case for run in entry.runs if run.outcome is Outcome.FAILED]
        if failed:
            found.append(f"{', '.join(failed)} failed then and has not run since")
    if current < known:
        found.append(f"{known - current} cases have changed since")
    if not found:
        return None
    return f"`{entry.backend}` on {entry.device} ({entry.kind.value}): {'; '.join(found)}."


def _combinations(backend: Backend, evidence: Sequence[Evidence], cases: Sequence[Case]) -> str:
    """Reasons of more than one fact, or of tensors, which no row has, with the cases they stop."""
    found = [
        (reason, case.id)
        for case in cases
        for reason in backend.refusals(case.spec)
        if reason not in backend.support.refusals(case.spec)
    ]
    taken = [case for case in cases if not refusals(backend, case)]
    for entry in evidence:
        if entry.backend == backend.name:
            refused = [x for x in current_runs(entry, taken) if x.outcome is Outcome.REFUSED]
            found += [(reason, run.case) for run in refused for reason in run.why]
    by_reason: dict[str, dict[str, None]] = {}
    for reason, case_id in found:
        by_reason.setdefault(reason, {})[case_id] = None
    return "".join(f"- {reason}: {', '.join(ids)}\n" for reason, ids in by_reason.items())


def _cell_fields(found: Cell) -> dict[str, object]:
    fields: dict[str, object] = {"cell": found.word.value}
    if found.sentence:
        fields["why"] = found.sentence
    if found.standing:
        fields["runs"] = [
            {
                "device": standing.evidence.device,
                "day": standing.evidence.date,
                "passed": standing.passed,
                "cases": standing.cases,
                "worst_error": standing.error,
            }
            for standing in found.standing
        ]
    return fields

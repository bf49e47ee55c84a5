"""What was found of our Ascend kernels without an NPU, as the support page tells it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from splitkv.kernels_ascend.kernels.budget import UB_BYTES
from splitkv.matrix.evidence import ROOT

RECORD = Path(__file__).parent / "ascend_kernels.json"
"""Written by ``tests_ascend_kernels/recorded.py``; ``make ascend-kernels`` compares it."""


def load() -> dict[str, Any]:
    """The committed record."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def digest(root: Path = ROOT) -> str:
    """Of the kernels' sources, byte by byte."""
    found = hashlib.sha256()
    for path in sorted((root / "kernels_ascend" / "kernels").glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def kernel_rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By kernel: variants, of them compiled for each target, most bytes of the unified buffer,
    cases whose lowered code gave the reference's answer, of how many, and mutants rejected.
    """
    rows: dict[str, dict[str, Any]] = {}
    for kernel in ("merge", "split"):
        variants = [row for name, row in record["hivm"].items() if name.startswith(kernel)]
        targets = [name for name in variants[0] if name != "cores"]
        planned = {
            target: [row[target] for row in variants if isinstance(row[target], int)]
            for target in targets
        }
        answers = record["linalg"][kernel].values()
        rows[kernel] = {
            "variants": len(variants),
            "compiled": {target: len(sizes) for target, sizes in planned.items()},
            "ub_bytes": max(max(sizes, default=0) for sizes in planned.values()),
            "cases": len(answers),
            "right": sum(_is_magnitude(answer) for answer in answers),
            "mutants_rejected": len(record["mutants_rejected"][kernel]),
        }
    return rows


def section(record: dict[str, Any], today: str) -> str:
    """The page's words. ``today``: digest of the sources as they are now."""
    made_by = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    stale = "" if record["sources"] == today else " **The sources have changed since.**"
    rows = kernel_rows(record)
    targets = list(rows["merge"]["compiled"])
    head = ["kernel", *(f"HIVM, {target}" for target in targets)]
    head += [f"most of {UB_BYTES} B unified buffer", "linalg on a CPU", "mutants rejected"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for kernel, row in rows.items():
        cells = [kernel, *(f"{row['compiled'][one]} of {row['variants']}" for one in targets)]
        cells += [str(row["ub_bytes"]), f"{row['right']} of {row['cases']}"]
        lines.append("| " + " | ".join([*cells, str(row["mutants_rejected"])]) + " |")
    words = (
        "Merge of any number of states, and split decode with soft cap, ALiBi, bias, tree masks "
        "and anchors. They compile to HIVM, the last stage before the vendor's closed assembler, "
        f"and their linalg, run on a CPU, gives the reference's answer ({made_by}). No NPU has "
        f"run them.{stale}"
    )
    return f"## Own kernels of `ascend`\n\n{words}\n\n" + "\n".join(lines) + "\n"


def _is_magnitude(answer: object) -> bool:
    if not isinstance(answer, str):
        return False
    try:
        float(answer)
    except ValueError:
        return False
    return True

"""The generated files: what they must hold now, whether they do, and writing them."""

import difflib
from pathlib import Path

from splitkv.backends.registry import BACKENDS
from splitkv.matrix import kernel_record
from splitkv.matrix.cases import CASES
from splitkv.matrix.cells import of_today
from splitkv.matrix.evidence import Evidence, load_all, sources_digest
from splitkv.matrix.render import broken, support_data, support_page, support_yaml

FOLDER = Path(__file__).parent


def pages() -> dict[Path, str]:
    """What each generated file must hold now."""
    evidence, today = load_all(), _sources()
    kernels = kernel_record.section(kernel_record.load(), kernel_record.digest())
    return {
        FOLDER / "SUPPORT.md": support_page(BACKENDS, evidence, CASES, today) + "\n" + kernels,
        FOLDER / "support.yaml": support_yaml(BACKENDS, evidence, CASES, today),
    }


def data() -> dict[str, object]:
    """What support.yaml must hold now."""
    return support_data(BACKENDS, load_all(), CASES, _sources())


def write() -> list[Path]:
    """Write the files; returns where."""
    wanted = pages()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return list(wanted)


def check() -> list[str]:
    """A diff from the files to what they must hold, and every broken cell."""
    found: list[str] = []
    for path, text in pages().items():
        held = path.read_text(encoding="utf-8") if path.is_file() else ""
        new = f"{path.name} as generated"
        found += difflib.unified_diff(
            held.splitlines(), text.splitlines(), path.name, new, lineterm=""
        )
    if found:
        found.append("the support matrix is out of date: run python -m splitkv.matrix")
    return found + [f"broken: {line}" for line in broken(BACKENDS, evidence_of_today(), CASES)]


def evidence_of_today() -> tuple[Evidence, ...]:
    """What is recorded, as cells take it."""
    return of_today(load_all(), _sources())


def _sources() -> dict[str, str]:
    """Today's digest of each backend's code."""
    return {backend.name: sources_digest(backend.name) for backend in BACKENDS}

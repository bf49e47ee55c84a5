"""Records of one device in one JSON file, a line per point; a point measured again replaces itself.

A run that is cut short loses nothing: every point is written when it is done, and a later run skips
what this code has measured already.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.grid.record import Record
from splitkv.matrix.evidence import canonical, sources_digest

FOLDER = Path(__file__).parent.parent / "results"
"""What is committed."""
_HERE = Path(__file__).parent
_REPORTING = {
    *("__main__.py", "claims.py", "earlier.py", "plots.py", "report.py", "results.py", "warm.py"),
}
"""Files of this folder that no figure depends on."""


@dataclass(slots=True)
class Results:
    """Records by point, of ``device``."""

    device: str
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return file_name(self.device)

    def add(self, record: Record) -> None:
        """Keep ``record`` in place of an earlier one of that point."""
        self.records[record.id] = record

    def has(self, point: str, digest: str, asked: Sequence[str], modes: Sequence[str]) -> bool:
        """Whether this code has measured the point already, with these peers and modes."""
        known = self.records.get(point)
        return (
            known is not None
            and known.digest == digest
            and set(asked) <= set(known.asked)
            and set(modes) <= set(known.modes)
        )

    def save(self, folder: Path) -> Path:
        """Write all records; a reader never sees half a file."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(record.to_json()) for _, record in sorted(self.records.items())]
        text = (
            f'{{"device": {json.dumps(self.device)}, "points": [\n' + ",\n".join(lines) + "\n]}\n"
        )
        path = folder / self.file_name
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        return partial.replace(path)

    def merge(self, paths: Iterable[Path]) -> None:
        """Take over the records of other files of this device, later files before earlier ones.

        Raises:
            ValueError: a file of another device.
        """
        for path in paths:
            other = load(path)
            if other.device != self.device:
                raise ValueError(f"{path} holds figures of {other.device}, not of {self.device}")
            self.records |= other.records


def file_name(device: str, kind: str = "grid") -> str:
    """``grid_nvidia-h200.json``: of signs that no file transfer minds."""
    return f"{kind}_{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def load(path: Path) -> Results:
    """Read what ``save`` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        records = [Record.from_json(entry) for entry in fields["points"]]
        device = fields["device"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no grid results: {error!r}") from error
    return Results(device, {record.id: record for record in records})


def code_digest(backend: str) -> str:
    """Of what computes (``common``, the backend, its kernels) and of what times."""
    found = hashlib.sha256(sources_digest(backend).encode())
    package = _HERE.parent.parent / "cli"
    timing = [package / "bench_shapes.py", package / "bench_timing.py"]
    grid = [path for path in sorted(_HERE.rglob("*.py")) if path.name not in _REPORTING]
    for path in (*timing, *grid):
        found.update(canonical(path.read_text(encoding="utf-8")).encode())
    return found.hexdigest()[:12]

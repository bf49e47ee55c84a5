"""What is kept of a measured point."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "splitkv"
AGAIN = "splitkv again"
"""The same candidate once more: what differs between the two is noise."""
SPLITS = "splitkv splits only"
READING = "reading"


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one layout and mode.

    us: median microseconds per call, with its 20 % and 80 % quantiles low and high. tb_s: K and V
    that any method must read, over ``us``. share: of the rate of reading as many bytes in the same
    turns. error: |difference| / |answer|, of ours against float32, of a peer against ours.
    temporary_bytes: device memory that one call takes and gives back; held_bytes: that its plan
    keeps (None where nobody counts).
    """

    mode: str
    layout: str
    way: str
    us: float
    low: float
    high: float
    tb_s: float
    share: float
    error: float | None = None
    temporary_bytes: int | None = None
    held_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """What was asked for and not timed."""

    layout: str
    way: str
    why: str


@dataclass(frozen=True, slots=True)
class Record:
    """One point.

    digest: of the code that computed and timed. sets: of K and V in rotation. plans: per layout
    what the planner said. aa: per mode the largest difference of medians between ours and ours
    again, as a share. asked: peers.
    """

    id: str
    digest: str
    date: str
    driver: str | None
    versions: Mapping[str, str]
    kv_bytes: int
    sets: int
    turns: int
    modes: tuple[str, ...]
    asked: tuple[str, ...]
    plans: Mapping[str, Mapping[str, Any]]
    aa: Mapping[str, float]
    rows: tuple[Row, ...]
    absent: tuple[Absent, ...] = field(default=())

    def row(self, mode: str, layout: str, way: str) -> Row | None:
        """That row, or None where it was not timed."""
        wanted = (mode, layout, way)
        return next((row for row in self.rows if (row.mode, row.layout, row.way) == wanted), None)

    def peers(self, mode: str, layout: str) -> list[Row]:
        """Other libraries' rows, fastest first."""
        own = (OURS, AGAIN, SPLITS, READING)
        found = [r for r in self.rows if (r.mode, r.layout) == (mode, layout) and r.way not in own]
        return sorted(found, key=lambda row: row.us)

    def merge_share(self, mode: str, layout: str) -> float | None:
        """Share of our time that is not the split kernel's; None where there is nothing apart."""
        whole, splits = self.row(mode, layout, OURS), self.row(mode, layout, SPLITS)
        if whole is None or splits is None:
            return None
        return max(0.0, 1 - splits.us / whole.us)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; what a row does not say is left out."""
        rows = [{k: v for k, v in asdict(row).items() if v is not None} for row in self.rows]
        return asdict(self) | {"rows": rows}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Record":
        """What ``to_json`` made, read back.

        Raises:
            TypeError: it is something else.
        """
        made = {
            "modes": tuple(fields["modes"]),
            "asked": tuple(fields["asked"]),
            "rows": tuple(Row(**row) for row in fields["rows"]),
            "absent": tuple(Absent(**entry) for entry in fields["absent"]),
        }
        return cls(**fields | made)

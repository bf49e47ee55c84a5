"""What is claimed of the anchors, as rules over a record: held, missed, or not measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.grid.earlier import PAGED
from benchmarks.grid.measure import GRAPH
from benchmarks.grid.points import ANCHORS, Point
from benchmarks.grid.record import OURS, Record

PAGED_LAYOUTS = ("p16", "p128")
LAYOUTS = ("contiguous", *PAGED_LAYOUTS)
CUDNN = "torch cudnn"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule at one point and layout. value and limit: as the rule says; held: value <= limit."""

    claim: str
    point: str
    layout: str
    value: float
    limit: float

    @property
    def held(self) -> bool:
        return self.value <= self.limit


Rule = Callable[[Point, Record], Iterator[Verdict]]


def verdicts(records: dict[str, Record]) -> list[Verdict]:
    """Every rule at every anchor that was measured in graph mode."""
    found = []
    for point in ANCHORS:
        record = records.get(point.id)
        if record is not None and GRAPH in record.modes:
            found += [verdict for rule in RULES for verdict in rule(point, record)]
    return found


def _us(record: Record, layout: str, way: str = OURS) -> float | None:
    row = record.row(GRAPH, layout, way)
    return None if row is None else row.us


def faster_than_paged_peers(point: Point, record: Record) -> Iterator[Verdict]:
    """Our time over the fastest peer of the run, in the same layout: below 1."""
    for layout in PAGED_LAYOUTS:
        ours, peers = _us(record, layout), record.peers(GRAPH, layout)
        if ours is not None and peers:
            yield Verdict(
                "over the fastest paged peer of this run", point.id, layout, ours / peers[0].us, 1.0
            )


def faster_than_before(point: Point, record: Record) -> Iterator[Verdict]:
    """Our time over the fastest paged peer as it was measured before: below 1."""
    for layout in PAGED_LAYOUTS:
        if (ours := _us(record, layout)) is not None and point.id in PAGED:
            before, _ = PAGED[point.id]
            yield Verdict(
                "over the fastest paged peer of 2026-11-30", point.id, layout, ours / before, 1.0
            )


def near_cudnn(point: Point, record: Record) -> Iterator[Verdict]:
    """Contiguous within 3 % of cuDNN, and ahead of it at 1x1024 and 1x8192."""
    ours, cudnn = _us(record, "contiguous"), _us(record, "contiguous", CUDNN)
    if ours is not None and cudnn is not None:
        limit = 1.0 if point.case in ("1x1024", "1x8192") else 1.03
        yield Verdict("over cuDNN", point.id, "contiguous", ours / cudnn, limit)


def share_of_reading(point: Point, record: Record) -> Iterator[Verdict]:
    """Reading's rate over ours: below 1 / the claimed share."""
    share = claimed_share(point)
    for layout in LAYOUTS:
        row = record.row(GRAPH, layout, OURS)
        if share is not None and row is not None:
            yield Verdict("reading's rate over ours", point.id, layout, 1 / row.share, 1 / share)


def claimed_share(point: Point) -> float | None:
    """Of the rate of reading as many bytes; None where nothing is claimed."""
    size, heads = point.shape.kv_bytes, point.heads
    if heads == "8:1x128" and (point.case == "1x131072" or point.case.startswith("rag")):
        return 0.85
    if not point.shape.uniform:
        return 0.92 if heads in ("32:8x128", "28:4x128") else None
    if size >= 256e6:
        return 0.95
    return {32 << 20: 0.75, 4 << 20: 0.55}.get(size)


def pages_cost_little(point: Point, record: Record) -> Iterator[Verdict]:
    """Pages of 128 within 2 % of contiguous, of 16 within 4 %."""
    contiguous = _us(record, "contiguous")
    for layout, limit in (("p128", 1.02), ("p16", 1.04)):
        if (ours := _us(record, layout)) is not None and contiguous is not None:
            yield Verdict("over contiguous", point.id, layout, ours / contiguous, limit)


def predicted_well(point: Point, record: Record) -> Iterator[Verdict]:
    """Predicted time within 20 % of the measured one from 64 MB on."""
    for layout in LAYOUTS:
        ours = _us(record, layout)
        if ours is not None and point.shape.kv_bytes >= 64e6:
            off = abs(record.plans[layout]["predicted_us"] / ours - 1)
            yield Verdict("prediction off by", point.id, layout, off, 0.2)


RULES: tuple[Rule, ...] = (
    faster_than_paged_peers,
    faster_than_before,
    near_cudnn,
    share_of_reading,
    pages_cost_little,
    predicted_well,
)

"""Results as people read them: a table, what became of the claims, and all rows as CSV."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.grid.claims import verdicts
from benchmarks.grid.measure import GRAPH
from benchmarks.grid.record import OURS, READING, Record
from benchmarks.grid.results import Results

_COLUMNS = (
    *("point", "layout", "MB", "us", "TB/s", "of reading", "merge", "busy", "predicted us"),
    *("fastest peer", "us", "over it", "eager us"),
)


def write(results: Results, folder: Path) -> list[Path]:
    """``.csv`` and ``.md`` beside the JSON file; returns their paths."""
    stem = folder / results.file_name
    table, rows = stem.with_suffix(".md"), stem.with_suffix(".csv")
    table.write_text("\n".join(markdown(results)) + "\n", encoding="utf-8")
    with rows.open("w", newline="", encoding="utf-8") as file:
        flat = list(flat_rows(results))
        writer = csv.DictWriter(file, fieldnames=list(flat[0]) if flat else ["point"])
        writer.writeheader()
        writer.writerows(flat)
    return [table, rows]


def flat_rows(results: Results) -> Iterator[dict[str, object]]:
    """Every row of every point, with the point's facts."""
    for record in results.records.values():
        facts = {"point": record.id, "kv_bytes": record.kv_bytes, "turns": record.turns}
        for row in record.rows:
            yield {**facts, **asdict(row), "digest": record.digest, "date": record.date}


def markdown(results: Results) -> Iterator[str]:
    """Lines of the page."""
    records = results.records
    yield f"# Decode on {results.device}"
    yield ""
    yield from _provenance(list(records.values()))
    yield ""
    yield "| " + " | ".join(_COLUMNS) + " |"
    yield "|" + " --- |" * len(_COLUMNS)
    for record in records.values():
        for layout in record.plans:
            yield "| " + " | ".join(_cells(record, layout)) + " |"
    yield ""
    yield from _claims(records)
    yield from _absences(list(records.values()))


def _provenance(records: list[Record]) -> Iterator[str]:
    yield (
        "Medians of interleaved turns on one machine, bfloat16, one query per request. us: kernels "
        "in a graph replay, or eager calls where the mode says so; TB/s: of the K and V that any "
        "method must read; of reading: share of the rate of reading as many bytes in the same "
        "turns; merge: share of the time past the split kernel; busy: mean over slowest worker, by "
        "the plan."
    )
    yield ""
    kinds = Counter(
        (r.date, r.digest, r.driver, ", ".join(f"{k} {v}" for k, v in r.versions.items()), r.turns)
        for r in records
    )
    for (date, digest, driver, versions, turns), count in sorted(kinds.items(), key=str):
        yield f"* {count} points, {date}, code {digest}, driver {driver}, {turns} turns: {versions}"
    noise = [value for record in records for value in record.aa.values()]
    if noise:
        yield f"* the same candidate timed twice differs by at most {max(noise):.1%}"


def _cells(record: Record, layout: str) -> Iterator[str]:
    mode = GRAPH if GRAPH in record.modes else record.modes[0]
    yield from (record.id, layout, f"{record.kv_bytes / 1e6:.1f}")
    row, plan = record.row(mode, layout, OURS), record.plans[layout]
    if row is None:
        yield from ("-",) * (len(_COLUMNS) - 3)
        return
    merge = record.merge_share(mode, layout)
    yield from (f"{row.us:.4g}", f"{row.tb_s:.3g}", f"{row.share:.0%}")
    yield "-" if merge is None else f"{merge:.0%}"
    yield from (f"{plan['balance']:.0%}", f"{plan['predicted_us']:.4g}")
    peers = record.peers(mode, layout)
    best = peers[0] if peers else None
    yield from (
        ("-",) * 3
        if best is None
        else (
            best.way,
            f"{best.us:.4g}",
            f"{row.us / best.us:.2f}",
        )
    )
    eager = record.row("eager", layout, OURS)
    yield "-" if eager is None else f"{eager.us:.4g}"


def _claims(records: dict[str, Record]) -> Iterator[str]:
    found = verdicts(records)
    if not found:
        return
    yield "## Claims"
    yield ""
    yield "| claim | held | missed | worst |"
    yield "| --- | --- | --- | --- |"
    for claim in dict.fromkeys(verdict.claim for verdict in found):
        mine = [verdict for verdict in found if verdict.claim == claim]
        held = sum(verdict.held for verdict in mine)
        worst = max(mine, key=lambda verdict: verdict.value / verdict.limit)
        yield (
            f"| {claim} | {held} | {len(mine) - held} | {worst.value:.3f} (limit {worst.limit:.3f})"
            f" at {worst.point} {worst.layout} |"
        )
    yield ""


def _absences(records: list[Record]) -> Iterator[str]:
    why = Counter((entry.way, entry.why) for record in records for entry in record.absent)
    if why:
        yield "## Not timed"
        yield ""
    for (way, reason), count in sorted(why.items()):
        yield f"* {way}, {count} times: {reason}"


def summary(records: Sequence[Record], most: int = 10_000) -> str:
    """A line for each point and layout, and what became of the claims, in ``most`` signs.

    Peers are named by the last word of their name, fastest first; the last number is our time over
    the fastest one's.
    """
    lines = ["point layout us of-reading | peers' us | ours/fastest"]
    for record in records:
        mode = GRAPH if GRAPH in record.modes else record.modes[0]
        for layout in record.plans:
            row, found = record.row(mode, layout, OURS), record.peers(mode, layout)
            mine = "-" if row is None else f"{row.us:.4g} {row.share:.0%}"
            others = " ".join(f"{peer.way.split()[-1]} {peer.us:.4g}" for peer in found)
            ratio = f"{row.us / found[0].us:.3f}" if row is not None and found else "-"
            lines.append(f"{record.id} {layout} {mine} | {others} | {ratio}")
    ends = list(_claims({record.id: record for record in records}))
    room = most - sum(len(line) + 1 for line in ends)
    kept: list[str] = []
    for index, line in enumerate(lines):
        room -= len(line) + 1
        if room < 60:  # of the line that says so
            kept.append(f"and {len(lines) - index} lines more, which --report writes to a table")
            break
        kept.append(line)
    return "\n".join(kept + ends)


def line(record: Record) -> str:
    """One point for a terminal."""
    mode = GRAPH if GRAPH in record.modes else record.modes[0]
    parts = [f"{record.id:24}"]
    for layout in record.plans:
        row = record.row(mode, layout, OURS)
        if row is not None:
            parts.append(f"{layout} {row.us:.4g} us {row.share:.0%}")
        if peers := record.peers(mode, layout):
            parts.append(f"({peers[0].way} {peers[0].us:.4g})")
    reading = record.row(mode, "contiguous", READING)
    parts.append(f"reading {reading.us:.4g}" if reading else "")
    return "  ".join(parts)

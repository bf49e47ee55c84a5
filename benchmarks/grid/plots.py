"""Plots of the results: share of reading and time over the fastest peer, by bytes (extra
``bench``).
"""

from pathlib import Path

from benchmarks.grid.measure import GRAPH
from benchmarks.grid.record import OURS, Record
from benchmarks.grid.results import Results


def draw(results: Results, folder: Path) -> list[Path]:
    """One picture per layout; returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    records = sorted(results.records.values(), key=lambda record: record.kv_bytes)
    layouts = list(dict.fromkeys(layout for record in records for layout in record.plans))
    written = []
    for layout in layouts:
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
        for way, points in _series(records, layout).items():
            size, share = zip(*points, strict=True)
            left.semilogx(size, share, "o", label=way, markersize=4)
        left.set(xlabel="K and V, MB", ylabel="share of the rate of reading", ylim=(0, 1.05))
        if left.lines:
            left.legend(fontsize=7)
        size, ratio = _over_fastest(records, layout)
        right.semilogx(size, ratio, "o", markersize=4)
        right.axhline(1.0, color="black", linewidth=0.8)
        right.set(xlabel="K and V, MB", ylabel="our time over the fastest peer's")
        figure.suptitle(f"{results.device}, {layout}")
        path = (folder / results.file_name).with_suffix(f".{layout}.png")
        figure.savefig(path, dpi=110, bbox_inches="tight")
        plt.close(figure)
        written.append(path)
    return written


def _mode(record: Record) -> str:
    return GRAPH if GRAPH in record.modes else record.modes[0]


def _series(records: list[Record], layout: str) -> dict[str, list[tuple[float, float]]]:
    """(MB, share) of every way."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        own = record.row(_mode(record), layout, OURS)
        rows = [*([own] if own else []), *record.peers(_mode(record), layout)]
        for row in rows:
            found.setdefault(row.way, []).append((record.kv_bytes / 1e6, row.share))
    return found


def _over_fastest(records: list[Record], layout: str) -> tuple[list[float], list[float]]:
    sizes, ratios = [], []
    for record in records:
        own = record.row(_mode(record), layout, OURS)
        peers = record.peers(_mode(record), layout)
        if own is not None and peers:
            sizes.append(record.kv_bytes / 1e6)
            ratios.append(own.us / peers[0].us)
    return sizes, ratios

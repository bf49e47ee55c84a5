"""What commands print: JSON, tables (rich's where it is installed), and progress on stderr."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TypeVar

Item = TypeVar("Item")

_PIPE_WIDTH = 120
"""Columns of a table that does not go to a terminal."""


def print_json(value: object) -> None:
    """Write ``value`` to stdout as JSON; NaN and infinities are refused, they are not JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """Write a table to stdout; a cell is shown as ``str`` does, and None as nothing."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if find_spec("rich") is None:
        _print_plain(columns, cells, title)
    else:
        _print_rich(columns, cells, title)


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Go through ``items``, with a progress bar if stderr is a terminal and rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description, total=total, console=Console(stderr=True))


def _print_plain(columns: Sequence[str], cells: list[list[str]], title: str | None) -> None:
    if title:
        print(title)
    lines = [list(columns), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(text.rstrip())


def _print_rich(columns: Sequence[str], cells: list[list[str]], title: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for line in cells:
        table.add_row(*map(Text, line))  # Text: a shape like [B] is not markup
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)

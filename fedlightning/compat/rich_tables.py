"""Tables that rich cuts off where the terminal is too narrow. The process that watches runs imports this: no torch here."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_WIDEST = 10_000


def print_whole(console: Console, table: Table) -> None:
    """Print a table with nothing cut off: on a terminal that is too narrow its lines go on in the next ones."""
    width, room = console.width, console.options.update(max_width=_WIDEST)
    shortest = longest = 0
    for column in table.columns:
        cells = [Measurement.get(console, room, cell) for cell in (column.header, *column.cells)]
        whole, word = max(cell.maximum for cell in cells), max(cell.minimum for cell in cells)
        longest, shortest = longest + whole, shortest + (whole if column.no_wrap else word)
    borders = Measurement.get(console, room, table).maximum - longest
    try:
        console.width = max(width, shortest + borders)
        console.print(table, highlight=False, crop=False)
    finally:
        console.width = width

"""The terminal that commands print to."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

from fedlightning.compat.rich_tables import print_whole


def console() -> Console:
    """Return the terminal, with 100 columns if the output is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=100)


def say(screen: Console, text: RenderableType, **style: Any) -> None:
    """Print a text as it is: a terminal breaks its lines, and nothing in it is set in colour by itself."""
    screen.print(text, soft_wrap=True, highlight=False, **style)


def shown(path: Path) -> Path:
    """Return a path as it is shown: relative to the working directory if it is inside."""
    return path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path


FOLDED: dict[str, Any] = {"overflow": "fold"}
WHOLE: dict[str, Any] = {"no_wrap": True}
NUMBER: dict[str, Any] = {"justify": "right", "no_wrap": True}
"""Kinds of columns: long texts, names, and numbers."""


def print_table(screen: Console, columns: Mapping[str, Mapping[str, Any]], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with nothing cut off.

    Args:
        screen: The terminal.
        columns: Title -> kind of a column.
        rows: The cells, with rich's markup.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title, kind in columns.items():
        table.add_column(title, **kind)
    for cells in rows:
        table.add_row(*cells)
    print_whole(screen, table)

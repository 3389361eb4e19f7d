"""What `fedlightning reproduce` prints: the list of tables, a table with its verdicts, and the sum of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from fedlightning.commands.terminal import say
from fedlightning.compat.rich_tables import print_whole
from fedlightning.experiments.reproduce.formatting import chance, left_out, reasons, row_of, times, verdict_counts
from fedlightning.experiments.reproduce.record import counts, read_record
from fedlightning.experiments.reproduce.results import Line
from fedlightning.experiments.reproduce.tables import Table
from fedlightning.experiments.reproduce.verdicts import BAD, BY_CHANCE, GOOD

_COLOURS = {**dict.fromkeys(GOOD, "green"), **dict.fromkeys(BAD, "bold red"), "inconclusive": "yellow"}


def listed(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return the tables with their last verdicts, for programs."""
    return [
        {
            "name": table.name,
            "title": table.title,
            "paper": table.source.paper,
            "sets": list(table.sets),
            "minutes": dict(table.minutes),
            "counts": counts(list(read_record(table.path).values())),
        }
        for table in tables
    ]


def list_tables(tables: Sequence[Table], screen: Console) -> None:
    """Print the tables that can be run."""
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("table", no_wrap=True)
    grid.add_column("paper", overflow="fold")
    grid.add_column("about", overflow="fold")
    grid.add_column("sets: minutes", overflow="fold")
    grid.add_column("last verdicts", overflow="fold")
    for table in tables:
        last = verdict_counts(list(read_record(table.path).values())) or "none yet"
        paper = table.source.paper.partition(",")[0]
        grid.add_row(table.name, escape(paper), escape(table.title), times(table), last)
    print_whole(screen, grid)
    say(
        screen,
        "Run one: fedlightning reproduce NAME --data-root DIR --jobs 2. A table of your own: docs/how-to/reproduce.md.",
    )


def show_table(table: Table, lines: Sequence[Line], screen: Console) -> None:
    """Print a table with its verdicts, and why cells disagree."""
    say(screen, f"\n{table.name}: {table.title}", style="bold", markup=False)
    say(screen, f"{table.source.paper}, {table.source.table}. {table.source.link}".strip(), markup=False)
    if table.tuned_on_test:
        say(screen, "The paper chose on test data; its numbers are too good by what that gains.", markup=False)
    shown = [line for line in lines if line.asked]
    for kind in ("cell", "order"):
        _show_lines([row_of(line) for line in shown if line.is_order == (kind == "order")], kind, screen)
    for text in (*reasons(shown), *left_out(lines)):
        say(screen, f"  {text}", markup=False)


def _show_lines(rows: Sequence[Mapping[str, str]], kind: str, screen: Console) -> None:
    if not rows:
        return
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column(kind, overflow="fold")
    if kind == "cell":
        grid.add_column("published", justify="right", no_wrap=True)
    grid.add_column("ours" if kind == "cell" else "difference", justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    for row in rows:
        verdict = f"[{_COLOURS.get(row['verdict'], 'dim')}]{row['verdict']}[/]"
        published = [row["published"]] if kind == "cell" else []
        grid.add_row(escape(row["name"]), *published, escape(row["ours"]), verdict)
    print_whole(screen, grid)


def show_summary(content: Mapping[str, Any], lost: Sequence[str], moved: Sequence[str], screen: Console) -> None:
    """Print how many cells agree, how many would disagree by chance, and what was lost or moved since the last record."""
    lines = [line for table in content["tables"] for line in (*table["cells"], *table["orders"])]
    asked = [line for line in lines if line["asked"]]
    say(screen, f"\nAll: {verdict_counts(asked) or 'nothing was asked for'}.")
    say(screen, chance(content["chance"], round(content["chance"] / BY_CHANCE)))
    for text in (*moved, *lost):
        say(screen, f"! {text}", style="bold red", markup=False)

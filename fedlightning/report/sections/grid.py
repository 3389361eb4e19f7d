"""Section of a grid: methods by variants, such as defences by attacks, or methods by budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlightning.report.cells import Column
from fedlightning.report.context import Context
from fedlightning.report.html import Section


def grid(context: Context) -> Section | None:
    """Show the mean of every method under every variant, a row a method."""
    cells = {run.name: run.cell for run in context.study.data.runs if run.cell is not None}
    if not cells:
        return None
    rows: dict[str, dict[str, Any]] = {row: {"row": row} for row, _ in cells.values()}
    line_by_method = {line["method"]: line for line in context.overview}
    for method, (row, column) in cells.items():
        line = line_by_method.get(method, {})
        rows[row] |= {f"in {column}": line.get("mean"), f"radius {column}": line.get("ci95_radius")}
    variants = dict.fromkeys(column for _, column in cells.values())
    columns = [
        Column("row", "method", "text"),
        *(Column(f"in {name}", name, radius=f"radius {name}", better=context.better) for name in variants),
    ]
    table = context.table(
        "grid",
        f"Test {context.metric} of each method under each variant",
        columns,
        list(rows.values()),
        _few(cells, line_by_method),
        missing=lambda row, column: _why(context, cells, row["row"], column.title),
    )
    return context.section("grid", "Methods by variants", "Grid", [table])


def _few(cells: Mapping[str, tuple[str, str]], line_by_method: Mapping[str, Any]) -> list[str]:
    """Return a note on the cells that are the mean of fewer seeds than others."""
    counts = {name: line_by_method.get(name, {}).get("n_seeds", 0) for name in cells}
    most = max(counts.values())
    few = [f"{' under '.join(cells[name])} ({count} of {most})" for name, count in counts.items() if 0 < count < most]
    return [f"Fewer seeds than the others: {', '.join(few)}."] if few else []


def _why(context: Context, cells: Mapping[str, tuple[str, str]], row: str, variant: str) -> str:
    """Return why a cell has no score."""
    method = next((name for name, cell in cells.items() if cell == (row, variant)), None)
    if method is None:
        return "not in the grid"
    return context.missing({"method": method}, Column("mean", variant)) or "no score"

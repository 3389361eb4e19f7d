"""Section about clients whose models have different architectures."""

from __future__ import annotations

from collections.abc import Sequence

from fedlightning.report.cells import Column, interval_of, is_number, summary
from fedlightning.report.context import METHOD, SEEDS, Context, Row
from fedlightning.report.figures.dots import Dot, dot_plot
from fedlightning.report.html import Picture, Section


def architectures(context: Context) -> Section | None:
    """Show the scores of the clients of each architecture."""
    rows = context.study.architectures()
    if not rows:
        return None
    better = context.better
    columns = [
        METHOD,
        Column("architecture", "architecture", "text"),
        Column("parameters", "parameters", "count"),
        Column("number", "clients", "count", help="clients with this architecture"),
        Column("mean", "mean", radius="ci95_radius", better=better, help="of their deployed models, ± half the interval"),
        Column("worst", "worst", better=better, help="worst-served of these clients"),
        Column("gain", "gain over Local", "difference", interval="gain_ci95",
               help="minus what the same clients get by training alone, paired by seed"),
        SEEDS,
    ]  # fmt: skip
    shown = [row | {"number": len(row["clients"])} for row in rows]
    table = context.table("architectures", f"Test {context.metric} of the clients of each architecture", columns, shown)
    pictures = [
        _dots(context, rows, "mean", "", f"Mean test {context.metric} by architecture", "mean over clients"),
        _dots(
            context, rows, "gain", "gain_", "Gain over Local by architecture", f"difference of test {context.metric}"
        ),
    ]
    gallery = context.gallery([picture for picture in pictures if picture is not None], table, open=True)
    return context.section(
        "architectures",
        "Small and large models",
        "Architectures",
        [table if gallery is None else gallery],
        "Clients have models of different architectures. Whoever has a small one may gain from those with large ones, or "
        "the other way round; a mean over all clients hides it. The clients of one architecture hold data of their own, so "
        "the gain over Local compares methods on the same clients.",
    )


def _dots(context: Context, rows: Sequence[Row], key: str, prefix: str, title: str, axis: str) -> Picture | None:
    """Draw one number of every line with its interval; `None` if no line has it."""
    numbered = [row for row in rows if is_number(row[key])]
    if not numbered:
        return None
    lines = [
        context.line(row["method"], [Dot(row[key], interval_of(row, f"{prefix}ci95"))], _name(row)) for row in numbered
    ]
    words = summary([(_name(row), row[key]) for row in numbered])
    name = "architectures" if key == "mean" else f"architectures-{key}"
    return context.picture(
        name, title, f"Dots: {title.lower()}: {words}.", lambda: dot_plot(lines, axis, zero=key == "gain")
    )


def _name(row: Row) -> str:
    return f"{row['method']}, {row['architecture']}"

"""The page of a call of `fedlightning reproduce`: each table with a figure of published values against ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from fedlightning.experiments.reproduce.published_tables import Table
from fedlightning.experiments.reproduce.results import (
    BAD,
    GOOD,
    Line,
    TableRun,
    expected_by_chance,
    left_out,
    list_headings,
    ours,
    reasons,
    row_of,
    sentence_of_plan,
    verdict_counts,
)
from fedlightning.report import html
from fedlightning.report.cells import Column
from fedlightning.report.drawing import inline, panel, rows_of, save, settle, svg, use_style
from fedlightning.report.html import Gallery, Page, Picture, Prose, Section, Trouble, render
from fedlightning.report.styles import BAD as RED
from fedlightning.report.styles import COLOURS, INK, MUTED, shorten

_ONE_AXIS = 5.0
"""Up to this quotient of the largest and the smallest published value, values share an axis."""
_FARTHEST = 6.0
"""Tolerances from the published value beyond which a dot is drawn at the edge."""


def published_against_ours(lines: Sequence[Line]) -> Figure:
    """Draw a line for each cell: a diamond and a band for what was published, a dot and an interval for ours.

    Cells of very different size have no common axis: their distances from the published value are drawn, in tolerances.

    Args:
        lines: Cells that have a value and a published value.
    """
    sizes = [abs(float(line.published or 0)) for line in lines]
    together = min(sizes) > 0 and max(sizes) / min(sizes) <= _ONE_AXIS and len({line.tolerance for line in lines}) <= 3
    figure, axes = panel(height=min(14.0, 0.9 + 0.3 * max(2, len(lines))), width=6.2)
    for place, line in enumerate(lines):
        published, verdict = float(line.published or 0), line.verdict
        centre, unit = (0.0, 1.0) if together else (published, max(line.tolerance, 1e-300))
        at = (published - centre) / unit
        reach = line.tolerance / unit
        axes.plot([at - reach, at + reach], [place, place], color=MUTED, alpha=0.28, linewidth=9, solid_capstyle="butt")
        axes.plot([at], [place], marker="D", color=MUTED, markersize=4.5, linestyle="")
        values = [verdict.mean, verdict.low, verdict.high]
        mean, low, high = (None if value is None else (value - centre) / unit for value in values)
        colour = COLOURS[0] if verdict.word in GOOD else RED if verdict.word in BAD else INK
        if mean is None:
            continue
        limit = np.inf if together else _FARTHEST
        if low is not None and high is not None:
            ends = np.clip([low, high], -limit, limit)
            axes.plot(ends, [place, place], color=colour, linewidth=1.6)
        marker = "o" if abs(mean) <= limit else ">" if mean > 0 else "<"
        axes.plot([np.clip(mean, -limit, limit)], [place], marker=marker, color=colour, markersize=5, linestyle="")
    rows_of(axes, [shorten(line.name, 44) for line in lines])
    if together:
        axes.set_xlabel("value")
    else:
        axes.set_xlim(-_FARTHEST * 1.08, _FARTHEST * 1.08)
        axes.set_xlabel("tolerances from published")
    return figure


FILE = "report.html"
_LEGEND = (
    "Diamonds: published values, with the tolerance as a band. Dots: ours, mean over seeds with the interval (Student's t, "
    "95 %, and 97.5 % where a table is looked at twice). A cell agrees if the interval lies inside the band, and disagrees "
    "if it lies entirely outside."
)


def write_page(out: Path, tables: Sequence[TableRun], lost: Sequence[str], moved: Sequence[str]) -> Path:
    """Write the page and its figures into a folder.

    Args:
        out: The folder.
        tables: Tables with what was found.
        lost: Sentences on cells that once agreed and do not now.
        moved: Sentences on tolerances and published values that were changed after a run.
    """
    every = [line for table in tables for line in table.lines]
    problems = [Trouble("Held against the recorded verdicts", None, [*moved, *lost])] if moved or lost else []
    counted = verdict_counts(line.verdict.word for line in every if line.asked)
    page = Page(
        title="Published tables, run again",
        subtitle=f"{len(tables)} tables: {counted or 'nothing was asked for'}. {expected_by_chance(every)}",
        answers={},
        problems=problems,
        sections=[_section(table.table, table.lines, table.seeds, out) for table in tables],
        kicker="Reproduction of published results",
    )
    path = out / FILE
    path.write_text(render(page), encoding="utf-8")
    return path


def _section(table: Table, lines: Sequence[Line], seeds: Sequence[int], out: Path) -> Section:
    name = html.slug(table.name)
    shown = [line for line in lines if line.asked]
    parts: list[Any] = []
    for orders, title in ((False, "Cells"), (True, "Orders, paired over seeds")):
        kind_lines = [line for line in shown if line.is_order == orders]
        columns = [Column(key, heading, "text") for key, heading in list_headings(orders).items()]
        slug = f"{name}-{'orders' if orders else 'cells'}"
        parts += (
            [html.Table(slug, title, columns, list(map(row_of, kind_lines)), notes=reasons(kind_lines))]
            if kind_lines
            else []
        )
        drawn = [line for line in kind_lines if line.verdict.mean is not None and not orders]
        parts += [Gallery([_picture(table, drawn, out)], _numbers(name, drawn), _LEGEND)] if drawn else []
    parts.append(Prose(terms=_terms(table, seeds, lines), title="About this table"))
    return Section(name, table.title, table.name, table.claim, parts)


def _picture(table: Table, cells: Sequence[Line], out: Path) -> Picture:
    name = html.slug(table.name) + "-figure"
    with use_style():
        figure = published_against_ours(cells)
    settle(figure)
    text = svg(figure)
    save(figure, text, out / "figures", name)
    alt = "; ".join(f"{line.name}: published {line.published:g}, ours {ours(line)}" for line in cells[:8])
    return Picture(name, "Published and ours", alt, Markup(inline(text, name, alt)))


def _numbers(name: str, lines: Sequence[Line]) -> html.Table:
    """Return the table of what the figure is drawn from: all digits, and the value of every seed."""
    rows = [
        {
            "name": line.name,
            "mean": line.verdict.mean,
            "ci95": [line.verdict.low, line.verdict.high],
            "values": ", ".join(f"{seed}: {value:.6g}" for seed, value in line.values.items()),
        }
        for line in lines
    ]
    columns = [
        Column("name", "cell", "text"),
        Column("mean", "mean", decimals=6),
        Column("ci95", "95 % interval", "interval", decimals=6),
        Column("values", "seed: value", "text"),
    ]
    return html.Table(f"{name}-numbers", "Means, intervals and the value of every seed", columns, rows)


def _terms(table: Table, seeds: Sequence[int], lines: Sequence[Line]) -> list[tuple[str, str]]:
    source = table.source
    readings = {
        "source": "read in the source",
        "re-run": "read in a re-run by others",
        "memory": "from memory: not judged",
    }
    pairs = [
        ("Published in", f"{source.paper}, {source.table}. {source.link}. Numbers {readings[source.read]}."),
        ("Setting", table.setting),
        ("Ours differs", " ".join(table.departures)),
        ("Detects (planted and seen)", "; ".join(table.detects)),
        ("Is meant to detect (not planted)", "; ".join(table.aims_at)),
        ("Cannot detect", "; ".join(table.cannot_detect)),
        ("Chosen on test data", "The paper chose values or rounds on test data." if table.tuned_on_test else ""),
        ("Seeds", "nothing is random" if table.exact else ", ".join(map(str, seeds))),
        ("Plan", "" if table.exact else sentence_of_plan(table)),
        ("Left out", " ".join(left_out(lines))),
        ("Runs that differ", " ".join(f"{run.name}: {run.differs}" for run in table.runs.values() if run.differs)),
    ]
    return [(term, text) for term, text in pairs if text]

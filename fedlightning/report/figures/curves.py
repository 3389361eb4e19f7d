"""Figures of scores over rounds, or over costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedlightning.report.cells import is_number
from fedlightning.report.drawing import count_along_x, label_logarithms, legend_below, panel, upright
from fedlightning.report.styles import Style, short_names

Point = tuple[float, float | None, Sequence[float] | None]
"""x, mean, interval."""


def curves(
    lines: Mapping[str, Sequence[Point]],
    styles: Mapping[str, Style],
    xlabel: str,
    ylabel: str,
    whole: bool = False,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    runs: Mapping[str, Sequence[Sequence[tuple[float, float | None]]]] | None = None,
    ticks: Mapping[int, str] | None = None,
) -> Figure:
    """Draw a line for each method with a band for its interval. A value that is not defined breaks the line.

    Args:
        lines: Method -> points of its mean.
        styles: Method -> style.
        xlabel: What the x axis is.
        ylabel: What the y axis is.
        whole: Whether x is counted.
        limits: Ends of the y axis.
        log: Whether the y axis is logarithmic.
        runs: Method -> points of each run, drawn as thin lines in place of bands: few runs have intervals that reach
            far beyond any value.
        ticks: Names of places below, as far as there is room.
    """
    figure, axes = panel()
    names = short_names(lines, 20)
    for method, points in lines.items():
        if not points:
            continue
        style = styles[method]
        x = np.array([point[0] for point in points], dtype=float)
        y = np.array([point[1] if is_number(point[1]) else np.nan for point in points], dtype=float)
        band = np.array([_ends(point[2]) for point in points], dtype=float)
        for run in (runs or {}).get(method, ()):
            values = [value if is_number(value) else np.nan for _, value in run]
            axes.plot([place for place, _ in run], values, color=style.colour, linewidth=0.7, alpha=0.45)
        if runs is None and bool(np.isfinite(band).any()):
            axes.fill_between(x, band[:, 0], band[:, 1], color=style.colour, alpha=0.13, linewidth=0)
        every = max(1, len(x) // 8)
        axes.plot(
            x, y, color=style.colour, linestyle=style.line, marker=style.marker, markevery=every, markersize=4.5,
            label=names[method],
        )  # fmt: skip
    if ticks and not upright(list(ticks.values()), 42):
        axes.set_xticks(list(ticks), list(ticks.values()))
    elif whole:
        count_along_x(axes)
    if log:
        axes.set_yscale("log")
        label_logarithms(axes.yaxis)
    if limits is not None:
        axes.set_ylim(*limits)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    legend_below(figure, axes)
    return figure


def _ends(interval: Sequence[float] | None) -> tuple[float, float]:
    if interval is None or not all(map(is_number, interval)):
        return (np.nan, np.nan)
    return (interval[0], interval[1])

"""Figures of fairness over clients: distributions, and mean against worst client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedlightning.study.report.cells import is_number
from fedlightning.study.report.drawing import legend_below, panel
from fedlightning.study.report.styles import INK, Style, short_names


def distribution(
    values: Mapping[str, Sequence[float]], styles: Mapping[str, Style], xlabel: str, ylabel: str, zero: bool = False
) -> Figure:
    """Draw empirical distribution functions, a line a method: the share of clients at or below a value."""
    figure, axes = panel()
    if zero:
        axes.axvline(0, color=INK, linewidth=1)
    names = short_names(values, 20)
    everything = [value for of in values.values() for value in of]
    low, high = (min(everything), max(everything)) if everything else (0.0, 1.0)
    room = 0.04 * (high - low) or 0.05
    for method, of in values.items():
        if not len(of):
            continue
        x = np.sort(np.asarray(of, dtype=float))
        share = np.arange(1, len(x) + 1) / len(x)
        style = styles[method]
        axes.step(
            [low - room, *x, high + room], [0, *share, 1], where="post", color=style.colour, linestyle=style.line,
            marker=style.marker, markevery=_some(len(x)), label=names[method],
        )  # fmt: skip
    axes.set_xlim(low - room, high + room)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    legend_below(figure, axes)
    return figure


def against(
    points: Mapping[str, tuple[float | None, float | None]], styles: Mapping[str, Style], xlabel: str, ylabel: str,
    log: bool = False, equal: bool = False,
) -> Figure:  # fmt: skip
    """Draw a marker for each method at (x, y), named in the legend."""
    figure, axes = panel()
    names = short_names(points, 20)
    known = {m: (float(x or 0), float(y or 0)) for m, (x, y) in points.items() if is_number(x) and is_number(y)}
    for method, (x, y) in known.items():
        style = styles[method]
        axes.plot(
            [x], [y], linestyle="", marker=style.marker, color=style.colour, markersize=8.5, markeredgecolor="white",
            mew=0.6, label=names[method],
        )  # fmt: skip
    if log and known and all(x > 0 for x, _ in known.values()):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(_only_of_short_axes)
    axes.margins(0.1)
    if equal and known:
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=INK, linewidth=0.9, zorder=0)
        axes.set_xlim(low, high)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    legend_below(figure, axes)
    return figure


def _only_of_short_axes(value: float, place: float = 0) -> str:
    """Label minor ticks at 2 and 5 times a power of ten only, which are few enough for any axis."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _some(count: int, at_most: int = 12) -> list[int]:
    """Return the places of markers: all of few values, a regular choice of many; none at the two ends of the line."""
    step = max(1, -(-count // at_most))
    return list(range(1, count + 1, step))

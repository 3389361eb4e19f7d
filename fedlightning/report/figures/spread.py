"""Figures of one number of each method against another."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlightning.report.cells import is_number
from fedlightning.report.drawing import label_logarithms, legend_below, panel
from fedlightning.report.styles import INK, Style, short_names

NEAR = 0.015
"""Share of an axis within which a marker hides another one."""


def against(
    points: Mapping[str, tuple[float | None, float | None]], styles: Mapping[str, Style], xlabel: str, ylabel: str,
    log: bool = False, equal: bool = False,
) -> Figure:  # fmt: skip
    """Draw a marker for each method at (x, y), named in the legend; what another one would hide is larger than it."""
    figure, axes = panel()
    names = short_names(points, 20)
    place_by_method = {
        m: (float(x or 0), float(y or 0)) for m, (x, y) in points.items() if is_number(x) and is_number(y)
    }
    spans = [max(values) - min(values) or 1.0 for values in zip(*place_by_method.values(), strict=True)]
    places = list(place_by_method.values())
    for number, (method, (x, y)) in enumerate(place_by_method.items(), 1):
        style = styles[method]
        above = sum(abs(x - a) < NEAR * spans[0] and abs(y - b) < NEAR * spans[1] for a, b in places[number:])
        axes.plot(
            [x], [y], linestyle="", marker=style.marker, color=style.colour, markersize=8.5 + 6 * above,
            markeredgecolor="white", mew=0.6, label=names[method],
        )  # fmt: skip
    if log and place_by_method and all(x > 0 for x, _ in place_by_method.values()):
        axes.set_xscale("log")
        label_logarithms(axes.xaxis)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.margins(0.1)
    if equal and place_by_method:
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=INK, linewidth=0.9, zorder=0, label="all clients alike")
        axes.set_xlim(low, high)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    legend_below(figure, axes)
    return figure

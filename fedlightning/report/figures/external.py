"""Figures of internal-external validation: a panel for each site that was never seen, a line for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedlightning.report.drawing import legend_below
from fedlightning.report.styles import MUTED, Style, short_names

MOST_PANELS = 9
COLUMNS = 2
Curves = Mapping[str, Mapping[str, Any]]
"""By site and method: what :func:`fedlightning.study.external.curves_of` returns."""


def calibration_curves(found: Curves, styles: Mapping[str, Style]) -> Figure:
    """Draw the share of events against the mean predicted probability of each bin; a perfect curve is the diagonal."""

    def draw(axes: Axes, methods: Mapping[str, Any], names: Mapping[str, str]) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=(0, (1.2, 1.2)), label="perfect")
        for method, of in methods.items():
            x, y = zip(*of["calibration"], strict=True)
            _plot(axes, styles[method], x, y, names[method], marker=styles[method].marker)
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)

    return _panels(found, draw, "predicted probability", "share with the event")


def decision_curves(found: Curves, styles: Mapping[str, Style]) -> Figure:
    """Draw the net benefit over thresholds, beside that of treating all and of treating none."""

    def draw(axes: Axes, methods: Mapping[str, Any], names: Mapping[str, str]) -> None:
        shared = np.array(next(iter(methods.values()))["benefit"])
        axes.plot(shared[:, 0], shared[:, 2], color=MUTED, linewidth=1.1, label="treat all")
        axes.axhline(0, color=MUTED, linewidth=1.1, linestyle=(0, (5, 1.5)), label="treat none")
        for method, of in methods.items():
            values = np.array(of["benefit"])
            _plot(axes, styles[method], values[:, 0], values[:, 1], names[method])
        top = max(float(np.array(of["benefit"])[:, 1].max()) for of in methods.values())
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.25 * max(top, 0.05), 1.1 * max(top, 0.05))  # what treating all loses has no lower end

    return _panels(found, draw, "threshold probability", "net benefit")


def _plot(axes: Axes, style: Style, x: Any, y: Any, label: str, marker: str = "") -> None:
    axes.plot(x, y, color=style.colour, linestyle=style.line, marker=marker, markersize=4, linewidth=1.3, label=label)


def _panels(
    found: Curves, draw: Callable[[Axes, Mapping[str, Any], Mapping[str, str]], None], xlabel: str, ylabel: str
) -> Figure:
    sites = sorted(found, key=lambda site: -next(iter(found[site].values()))["samples"])[:MOST_PANELS]
    names = short_names(dict.fromkeys(method for site in sites for method in found[site]), 20)
    titles = short_names(sites, 16)  # beside its samples, one must not reach the next panel
    lines = -(-len(sites) // COLUMNS)
    figure = Figure(figsize=(5.0, 0.5 + 2.0 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, COLUMNS, squeeze=False, sharex=True)
    for place, axes in enumerate(grid.flat):
        if place >= len(sites):
            axes.axis("off")
            continue
        site = sites[place]
        draw(axes, found[site], names)
        axes.set_title(f"{titles[site]} ({next(iter(found[site].values()))['samples']} samples)", fontsize=9)
        last = place + COLUMNS >= len(sites)
        axes.tick_params(labelbottom=last)
        axes.set_xlabel(xlabel if last else "", fontsize=9)
        axes.set_ylabel("" if place % COLUMNS else ylabel, fontsize=9)
    legend_below(figure, grid.flat[0])
    return figure

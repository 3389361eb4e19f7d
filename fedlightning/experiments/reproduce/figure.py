"""The figure of a table: published values with their tolerance, and ours with their interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedlightning.experiments.reproduce.results import Line
from fedlightning.experiments.reproduce.verdicts import BAD, GOOD
from fedlightning.report.drawing import panel, rows_of
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
        axes.set_xlabel("distance from published, in tolerances")
    return figure

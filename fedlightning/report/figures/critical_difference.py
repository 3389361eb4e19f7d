"""The critical-difference diagram over data sets (Demšar 2006)."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from fedlightning.report.drawing import panel
from fedlightning.report.styles import INK, Style, short_names


def critical_difference(
    ranks: Mapping[str, float], p_values: Mapping[str, Mapping[str, float]], styles: Mapping[str, Style]
) -> Figure:
    """Draw methods on an axis of average ranks (1 is best). A bar joins those that do not differ at p = 0.05."""
    import pandas  # type: ignore[import-untyped]
    from scikit_posthocs import critical_difference_diagram

    names = short_names(ranks, 20)
    methods = list(ranks)
    table = pandas.DataFrame(
        [[1.0 if a == b else p_values[a][b] for b in methods] for a in methods],
        index=[names[m] for m in methods],
        columns=[names[m] for m in methods],
    )
    figure, axes = panel(height=1.1 + 0.16 * len(methods))
    axes.grid(visible=False)
    critical_difference_diagram(
        {names[m]: ranks[m] for m in methods},
        table,
        ax=axes,
        color_palette={names[m]: styles[m].colour for m in methods},
        label_fmt_left="{label}  {rank:.2f}",
        label_fmt_right="{rank:.2f}  {label}",
        text_h_margin=0.02 * max(1.0, max(ranks.values()) - min(ranks.values())),
        label_props={"fontsize": 9},
        elbow_props={"linewidth": 1.4},
        crossbar_props={"color": INK, "linewidth": 2.6},
    )
    for text in axes.texts:
        text.set_color(INK)  # as text, the colours of methods have too little contrast
    axes.tick_params(labelsize=9)
    return figure

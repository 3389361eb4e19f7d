"""The figure of a sensitivity: F over the layers, the ratio of neighbours, and where a threshold would cut."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity

BLUE, GREEN, RED = "#4477aa", "#228833", "#cc3311"
SMALLEST = 1e-3
"""Ratios nearer to 1 than this are drawn as 1 + SMALLEST."""
THRESHOLDS = (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2, 4, 10, 30, 100, 1e3, 1e4, 1e5, 1e6)


def draw(
    measured: Sensitivity, threshold: float | None = None, path: str | Path | None = None, split: int | None = None
) -> Any:
    """Draw the three panels.

    Example:
        >>> from fedlightning.callbacks import Sensitivity
        >>> found = Sensitivity(["body", "head"], [10, 5], [1.0, 3.0])
        >>> [axis.get_title() for axis in draw(found, threshold=1.05).axes][2]
        'federated layers $p(t)$'
    """
    from matplotlib.figure import Figure

    count = len(measured.layers)
    if split is None and threshold is not None:
        split = measured.transition(threshold)
    shown = threshold if threshold is not None and math.isfinite(threshold) else None
    names = short(measured.layers)
    above = [max(value - 1, SMALLEST) for value in measured.ratios if math.isfinite(value)]
    top = 2.5 * max([*above, 0.5, shown - 1 if shown else 0.0])
    figure = Figure(figsize=(4.6 + 0.9 * min(max(count, 7), 14), 4.0 if count <= 12 else 5.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_cumulative(left, measured, names, split)
    _draw_ratios(middle, measured, names, top, shown)
    _draw_transition(right, measured, names, top, shown)
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    gradients = "weights only" if measured.weights_only else "weights and biases"
    figure.suptitle(f"federation sensitivity ({measured.method}, {gradients})", fontsize=10, color="#555555")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_cumulative(axis: Any, measured: Sensitivity, names: list[str], split: int | None) -> None:
    f, count = measured.cumulative, len(names)
    base = next((value for value in f if value > 0), 1.0)
    axis.plot(range(1, count + 1), [value / base if value > 0 else math.nan for value in f], "o-", color=BLUE)
    axis.set_yscale("log" if f[-1] > 10 * base else "linear")
    axis.set_title("cumulative sensitivity $F_l / F_1$", fontsize=10)
    axis.set_xlim(0.4, count + 0.6)
    _layer_ticks(axis, range(1, count + 1), names)
    if split is not None:
        shared = f"p = {split}: {'nothing' if split == 0 else 'all' if split == count else names[split - 1]}"
        where = "federated" if split in (0, count) else "federated up to here"
        axis.axvspan(0.4, split + 0.5, color=BLUE, alpha=0.12, lw=0)
        axis.text(0.03, 0.97, f"{where}\n{shared}", transform=axis.transAxes, va="top", fontsize=8, color=BLUE)


def _draw_ratios(axis: Any, measured: Sensitivity, names: list[str], top: float, threshold: float | None) -> None:
    count = len(names)
    axis.set_ylim(SMALLEST * 0.7, top)
    _threshold_axis(axis, "y")
    for gap, value in enumerate(measured.ratios, 1):
        if math.isnan(value):
            continue
        height = max(min(value - 1, 0.8 * top), SMALLEST)
        axis.plot([gap, gap], [SMALLEST * 0.7, height], "-", color=GREEN, lw=1.5)
        axis.plot([gap], [height], "o" if math.isfinite(value) else "^", color=GREEN)
        text = "∞" if math.isinf(value) else f"{value:.3g}" if value >= 1.1 else f"{value:.4g}"
        if count <= 12:
            axis.annotate(text, (gap, height), (4, 3), textcoords="offset points", fontsize=8)
    axis.set_title("ratio $F_{l+1} / F_l$", fontsize=10)
    axis.set_xlim(0.5, max(count, 2) - 0.3)
    _layer_ticks(axis, range(1, count), [f"{b} / {a}" if count <= 12 else b for a, b in pairwise(names)])
    if threshold is not None:
        axis.axhline(threshold - 1, color=RED, linestyle="--", lw=1)


def _draw_transition(axis: Any, measured: Sensitivity, names: list[str], top: float, threshold: float | None) -> None:
    count = len(names)
    grid = [SMALLEST * (top / SMALLEST) ** (step / 500) for step in range(501)]
    axis.step(grid, [measured.transition(1 + excess) for excess in grid], where="post", color=BLUE)
    axis.set_xlim(SMALLEST, top)
    _threshold_axis(axis, "x")
    axis.set_title("federated layers $p(t)$", fontsize=10)
    axis.set_xlabel("threshold $t$", fontsize=9)
    axis.set_ylim(0.5, count + 0.5)
    labels = [f"{k}: {name}" for k, name in enumerate(names, 1)]
    axis.set_yticks(range(1, count + 1), labels, fontsize=7 if count > 12 else 8)
    if threshold is not None:
        axis.axvline(threshold - 1, color=RED, linestyle="--", lw=1, label=f"t = {threshold:g}")
        axis.legend(fontsize=8, loc="lower right")


def short(names: list[str]) -> list[str]:
    """Return layer names without the modules that they have in common.

    Example:
        >>> short(["net.conv1", "net.fc"])
        ['conv1', 'fc']
    """
    paths = [name.split(".") for name in names]
    while paths and all(len(path) > 1 and path[0] == paths[0][0] for path in paths):
        paths = [path[1:] for path in paths]
    return [".".join(path) for path in paths]


def _layer_ticks(axis: Any, places: range, labels: list[str]) -> None:
    size = 6 if len(labels) > 12 else 8
    axis.set_xticks(places, labels, rotation=40, ha="right", rotation_mode="anchor", fontsize=size)


def _threshold_axis(axis: Any, which: str) -> None:
    """A logarithmic axis of t - 1, labelled with t: thresholds near 1 can be told apart."""
    getattr(axis, f"set_{which}scale")("log")
    low, high = getattr(axis, f"get_{which}lim")()
    ticks = [t for t in THRESHOLDS if low <= t - 1 <= high]
    getattr(axis, f"set_{which}ticks")([t - 1 for t in ticks], [f"{t:g}" for t in ticks])
    getattr(axis, f"set_{which}ticks")([], minor=True)
    axis.tick_params(axis=which, labelsize=8)

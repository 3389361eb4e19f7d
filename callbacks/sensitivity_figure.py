"""The figure of a sensitivity: F over the layers, the ratio of neighbours, and where a threshold would cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlightning.callbacks.sensitivity import Sensitivity


def draw(found: Sensitivity, threshold: float | None = None, path: str | Path | None = None) -> Any:
    """Three panels; see :meth:`Sensitivity.plot`."""
    from matplotlib.figure import Figure

    names, count = found.layers, len(found.layers)
    f = found.cumulative
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    cumulative, ratio, staircase = figure.subplots(1, 3)

    base = next((value for value in f if value > 0), 1.0)
    cumulative.semilogy(range(1, count + 1), [value / base if value > 0 else math.nan for value in f], "o-", color="#4477aa")
    cumulative.set_title("cumulative sensitivity $F_l / F_1$", fontsize=10)
    cumulative.set_xticks(range(1, count + 1), names, rotation=35, ha="right", fontsize=8)

    ratios = [value if math.isfinite(value) else math.nan for value in found.ratios]
    ratio.plot(range(1, count), ratios, "o-", color="#228833")
    ratio.set_title("ratio $F_{l+1} / F_l$", fontsize=10)
    labels = [f"{a} | {b}" for a, b in zip(names, names[1:], strict=False)]
    ratio.set_xticks(range(1, count), labels, rotation=35, ha="right", fontsize=8)
    if any(value == value and value > 0 for value in ratios):
        ratio.set_yscale("log")

    finite = [value for value in ratios if value == value]
    top = max([2.0, threshold or 0.0, *finite]) * 1.3
    grid = [1.001 * (top / 1.001) ** (step / 400) for step in range(401)]
    staircase.step(grid, [found.transition(t) for t in grid], where="post", color="#4477aa")
    staircase.set_xscale("log")
    staircase.set_title("federated layers $p(t)$", fontsize=10)
    staircase.set_xlabel("threshold $t$")
    staircase.set_yticks(range(1, count + 1), [f"{k}: {name}" for k, name in enumerate(names, 1)], fontsize=8)

    if threshold is not None and math.isfinite(threshold):
        split = found.transition(threshold)
        if split < count:
            cumulative.axvline(split + 0.5, color="#cc3311", linestyle="--", label=f"t = {threshold:g}: p = {split}")
            cumulative.legend(fontsize=8)
        ratio.axhline(threshold, color="#cc3311", linestyle="--")
        staircase.axvline(threshold, color="#cc3311", linestyle="--")
    for axis in (cumulative, ratio, staircase):
        axis.grid(alpha=0.3)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure

"""Figures of tables of layers; for each there is a function that returns its numbers as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlightning.callbacks.diagnostics.layer_values import ALL, LayerRow
from fedlightning.callbacks.diagnostics.layers import Runs, ratio_rows, sensitivities, transition_ranges
from fedlightning.callbacks.diagnostics.sensitivity_figure import BLUE, GREEN, RED, SMALLEST, _threshold_axis, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "sensitivity_online_cumulative": "cumulative sensitivity $F_l$, online",
    "sensitivity_cumulative": "cumulative sensitivity $F_l$, mean gradient",
    "grad_var_samples_per_parameter": "gradient variance over batches, per parameter",
    "grad_var_params": "gradient variance over parameters",
    "hessian_trace_per_parameter": "Hessian trace per parameter",
    "cka": "linear CKA with the other clients",
}


def layer_numbers(
    rows: Sequence[LayerRow], round: int | None = None, stage: str = "L2", quantities: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the numbers that :func:`plot_layers` draws.

    Example:
        >>> rows = [LayerRow(1, "L2", client, 1, "net.0", "cka", value) for client, value in (("0", 0.5), ("1", 1.0))]
        >>> layer_numbers(rows)[0]["mean"]
        0.75
    """
    if round is None:
        round = max((row.round for row in rows if row.stage == stage), default=0)
    here = [row for row in rows if (row.round, row.stage) == (round, stage) and row.client != ALL]
    if quantities is None:
        quantities = [name for name in PANELS if any(row.quantity == name for row in here)]
    numbers = []
    for quantity in quantities:
        of_quantity = sorted((row for row in here if row.quantity == quantity), key=lambda row: row.layer_index)
        for index, layer in dict.fromkeys((row.layer_index, row.layer) for row in of_quantity):
            members = [row for row in of_quantity if row.layer == layer and math.isfinite(row.value)]
            if members:
                values, errors = [row.value for row in members], [row.std_error for row in members]
                numbers.append(
                    {
                        "quantity": quantity,
                        "layer_index": index,
                        "layer": layer,
                        "mean": math.fsum(values) / len(values),
                        "std_error": math.hypot(*errors) / len(errors),
                        "min": min(values),
                        "max": max(values),
                        "clients": len(values),
                    }
                )
    return numbers


def plot_layers(
    rows: Sequence[LayerRow],
    round: int | None = None,
    stage: str = "L2",
    threshold: float | None = None,
    quantities: Sequence[str] | None = None,
) -> Figure:
    """Draw one panel per quantity over the layers: the mean over the clients, their range, and the transition.

    The layers that PLayer-FL would federate at `threshold` are shaded; p is of the sensitivity summed over the clients
    in that round. Vertical axes are logarithmic, for a Hessian trace with negative values symmetrically so.

    Example:
        >>> values = {"net.0": 0.9, "net.1": 0.4}
        >>> rows = [LayerRow(1, "L2", "0", index, name, "cka", values[name]) for index, name in enumerate(values, 1)]
        >>> [axis.get_title() for axis in plot_layers(rows).axes]
        ['linear CKA with the other clients']
    """
    from matplotlib.figure import Figure

    numbers = layer_numbers(rows, round, stage, quantities)
    if not numbers:
        raise ValueError(f"There is no row of round {round} at stage {stage} to draw. Check the round and the stage.")
    if round is None:
        round = max(row.round for row in rows if row.stage == stage)
    names = list(dict.fromkeys(row["quantity"] for row in numbers))
    layers = dict(sorted({row["layer_index"]: row["layer"] for row in numbers}.items()))
    split = None if threshold is None else _transition(rows, round, stage, threshold)
    across = min(3, len(names))
    down = -(-len(names) // across)
    width = 1.6 + 0.35 * min(max(len(layers), 6), 20)
    figure = Figure(figsize=(across * width, 3.3 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, quantity in zip(axes, names, strict=False):
        _draw_panel(axis, [row for row in numbers if row["quantity"] == quantity])
        axis.set_title(PANELS.get(quantity, quantity), fontsize=9)
        axis.set_xticks(list(layers), short(list(layers.values())), rotation=40, ha="right", rotation_mode="anchor")
        axis.tick_params(which="both", labelsize=8 if len(layers) <= 12 else 6)
        axis.set_xlim(min(layers) - 0.5, max(layers) + 0.5)
        axis.grid(alpha=0.3)
        if split is not None:
            axis.axvspan(0.5, split + 0.5, color=BLUE, alpha=0.12, lw=0)
            axis.axvline(split + 0.5, color=RED, linestyle="--", lw=1)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    marked = "" if split is None else f"; shaded: the p = {split} layers before the transition at t = {threshold:g}"
    figure.suptitle(f"round {round}, stage {stage}: mean and range over clients{marked}", fontsize=9, color="#555555")
    return figure


def _draw_panel(axis: Any, numbers: Sequence[dict[str, Any]]) -> None:
    places, means = [row["layer_index"] for row in numbers], [row["mean"] for row in numbers]
    lows, highs = [row["min"] for row in numbers], [row["max"] for row in numbers]
    errors = [row["std_error"] if math.isfinite(row["std_error"]) else 0.0 for row in numbers]
    axis.fill_between(places, lows, highs, color=GREEN, alpha=0.2, lw=0)
    axis.errorbar(places, means, yerr=errors if any(errors) else None, fmt="o-", color=GREEN, capsize=2)
    if numbers[0]["quantity"] == "cka":
        axis.set_ylim(min(0.0, *lows), 1.02)
    elif min(lows) > 0:
        axis.set_yscale("log")
    elif min(lows) < 0:
        axis.set_yscale("symlog", linthresh=max(min(abs(value) for value in means), 1e-12))


def _transition(rows: Sequence[LayerRow], round: int, stage: str, threshold: float) -> int | None:
    for quantity in ("sensitivity_online", "sensitivity"):
        for client in dict.fromkeys([ALL, *(row.client for row in rows)]):  # a plain run has no sum over clients
            sensitivity_by_round = sensitivities([row for row in rows if row.round == round], quantity, stage, client)
            if sensitivity_by_round:
                return sensitivity_by_round[round].transition(threshold)
    return None


def plot_transition(
    runs: Runs, threshold: float | None = None, quantity: str | None = None, stage: str = "L2"
) -> Figure:
    """Draw for each run the ratio of every gap over the rounds, and p as a function of round and threshold.

    A colour that goes straight up through the second panel is a transition that does not move, and its width is the
    range of thresholds that give it. Numbers: :func:`~fedlightning.callbacks.diagnostics.layers.ratio_rows` and
    :func:`~fedlightning.callbacks.diagnostics.layers.transition_ranges`.

    Example:
        >>> values = {"net.0": 1.0, "net.1": 0.5}
        >>> rows = [LayerRow(1, "L2", ALL, k, n, "sensitivity", v) for k, (n, v) in enumerate(values.items(), 1)]
        >>> [axis.get_title() for axis in plot_transition({"seed 0": rows}, threshold=1.05).axes]
        ['ratio $F_{l+1}/F_l$', 'federated layers $p(t)$']
    """
    from matplotlib.figure import Figure

    if quantity is None:
        quantity = "sensitivity_online" if ratio_rows(runs, "sensitivity_online", stage) else "sensitivity"
    ratios, ranges = ratio_rows(runs, quantity, stage), transition_ranges(runs, quantity, stage)
    if not ratios:
        raise ValueError(f"No run has '{quantity}' of all clients at stage {stage} with two layers or more to draw.")
    names = list(dict.fromkeys(row["run"] for row in ratios))
    finite = [row["ratio"] - 1 for row in ratios if math.isfinite(row["ratio"])]
    top = 2.5 * max([*finite, 0.5, (threshold or 1.0) - 1])
    figure = Figure(figsize=(9.5, 2.9 * len(names) + 0.4), layout="constrained")
    axes = figure.subplots(len(names), 2, squeeze=False)
    for (left, right), run in zip(axes, names, strict=True):
        _draw_ratios(left, [row for row in ratios if row["run"] == run], top, threshold)
        _draw_curve(right, [row for row in ranges if row["run"] == run], top, threshold)
        left.set_ylabel(run, fontsize=9)
    axes[0][0].set_title("ratio $F_{l+1}/F_l$", fontsize=10)
    axes[0][1].set_title("federated layers $p(t)$", fontsize=10)
    return figure


def _draw_ratios(axis: Any, rows: Sequence[dict[str, Any]], top: float, threshold: float | None) -> None:
    gaps = dict.fromkeys((row["layer_index"], row["layer"], row["next"]) for row in rows)
    names = short(list(dict.fromkeys(name for _, layer, two in gaps for name in (layer, two))))
    for index, _, _ in gaps:
        points = [(row["round"], row["ratio"]) for row in rows if row["layer_index"] == index]
        heights = [max(min(ratio - 1, top), SMALLEST) if not math.isnan(ratio) else ratio for _, ratio in points]
        axis.plot([number for number, _ in points], heights, ".-", lw=1, label=f"{names[index]} / {names[index - 1]}")
    axis.set_ylim(SMALLEST * 0.7, top)
    _threshold_axis(axis, "y")
    if threshold is not None:
        axis.axhline(threshold - 1, color=RED, linestyle="--", lw=1, label=f"t = {threshold:g}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("round", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncols=2 if len(gaps) > 4 else 1)


def _draw_curve(axis: Any, ranges: Sequence[dict[str, Any]], top: float, threshold: float | None) -> None:
    from matplotlib import colormaps

    layers = {row["p"]: row["layer"] for row in ranges}
    colours = colormaps["viridis"](np.linspace(0.05, 0.95, max(layers)))
    shown = dict(zip(sorted(layers), short([layers[p] for p in sorted(layers)]), strict=True))
    rounds = sorted({row["round"] for row in ranges})
    height = min((b - a for a, b in pairwise(rounds)), default=1)
    for p, name in shown.items():
        bars = [row for row in ranges if row["p"] == p]
        left = [max(row["low"] - 1, SMALLEST) for row in bars]
        wide = [max(min(row["high"] - 1, top) - low, 0.0) for row, low in zip(bars, left, strict=True)]
        places = [row["round"] for row in bars]
        axis.barh(places, wide, left=left, height=height, color=colours[p - 1], lw=0, label=f"{p}: {name}")
    axis.set_xlim(SMALLEST, top)
    _threshold_axis(axis, "x")
    axis.set_xlabel("threshold $t$", fontsize=9)
    axis.set_ylabel("round", fontsize=9)
    axis.yaxis.get_major_locator().set_params(integer=True)
    if threshold is not None:
        axis.axvline(threshold - 1, color=RED, linestyle="--", lw=1)
    axis.legend(fontsize=7, title="p: last shared layer", title_fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))

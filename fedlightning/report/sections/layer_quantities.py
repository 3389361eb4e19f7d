"""Section about layer diagnostics: sensitivity and other quantities over layers, and the transition layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlightning.report.cells import Column, is_number, summary
from fedlightning.report.context import METHOD, Context, Row
from fedlightning.report.figures.curves import Point, curves
from fedlightning.report.html import Gallery, Section, Table

if TYPE_CHECKING:
    from fedlightning.callbacks.diagnostics.layers import LayerRow

STAGE = "L2"


def layers(context: Context) -> Section | None:
    """Show figures over layers of the last round, the thresholds that give each transition, and rank correlations."""
    paths = {key: scored.run.path for key, scored in context.study.data.finished.items()}
    if not any(path is not None and (path / "layers.csv").exists() for path in paths.values()):
        return None  # before callbacks are imported, and with them Lightning
    from fedlightning.callbacks.diagnostics.layers import correlation_rows, read_layers, transition_ranges
    from fedlightning.callbacks.diagnostics.sensitivity_figure import short

    order = [row["method"] for row in context.overview]
    tables: dict[tuple[str, int], list[LayerRow]] = {}
    for method, seed in sorted(paths, key=lambda key: (order.index(key[0]), key[1])):
        path = paths[method, seed]
        rows = [] if path is None else read_layers(path)
        if any(row.stage == STAGE for row in rows):
            tables[method, seed] = rows
    if not tables:
        return None
    names = {f"{method}, seed {seed}": rows for (method, seed), rows in tables.items()}
    ranges = _last_round([_named(row) for row in transition_ranges(names)])
    layers_shared = list(dict.fromkeys(row["layer"] for row in ranges))
    brief = dict(zip(layers_shared, short(layers_shared), strict=True))
    ranges = [row | {"layer": brief[row["layer"]]} for row in ranges]
    correlations = correlation_rows(names)
    return context.section(
        "layers",
        "Which layers are shared, and why",
        "Layers",
        [_over_layers(context, tables), _transitions(context, ranges), _correlations(context, correlations)],
        "Federation sensitivity of each layer after local training (PLayer-FL, equations 2 and 3) beside other "
        "diagnostics, of the last round that was diagnosed.",
    )


def _over_layers(context: Context, tables: dict[tuple[str, int], list[LayerRow]]) -> Gallery | None:
    from fedlightning.callbacks.diagnostics.layer_figures import layer_numbers
    from fedlightning.callbacks.diagnostics.sensitivity_figure import short

    methods = list(dict.fromkeys(method for method, _ in tables))
    rows: list[dict[str, Any]] = []
    quantities: dict[str, None] = {}
    for method in methods:
        each = [layer_numbers(rows, stage=STAGE) for (name, _), rows in tables.items() if name == method]
        quantities |= dict.fromkeys(row["quantity"] for lines in each for row in lines)
        layers = sorted({row["layer_index"]: row["layer"] for lines in each for row in lines}.items())
        names = short([layer for _, layer in layers])
        for (index, _), name in zip(layers, names, strict=True):
            line: dict[str, Any] = {"method": method, "layer_index": index, "layer": name, "n_seeds": len(each)}
            for quantity in quantities:
                means = [
                    r["mean"] for lines in each for r in lines if (r["quantity"], r["layer_index"]) == (quantity, index)
                ]
                line[quantity] = float(np.mean(means)) if means and all(map(is_number, means)) else None
            rows.append(line)
    ticks = {row["layer_index"]: row["layer"] for row in rows} if len({row["layer"] for row in rows}) < 9 else {}
    pictures = []
    for quantity in quantities:
        points: dict[str, list[Point]] = {
            method: [
                (row["layer_index"], row[quantity], None)
                for row in rows
                if row["method"] == method and row.get(quantity) is not None
            ]
            for method in methods
        }
        title = _in_words(quantity)
        numbers = summary([(f"{row['method']} {row['layer']}", row.get(quantity)) for row in rows])
        pictures.append(
            context.picture(
                f"layers-{quantity.replace('_', '-')}",
                title[:1].upper() + title[1:],
                f"Lines: {title} over layers: {numbers}.",
                partial(curves,
                    {method: p for method, p in points.items() if p}, context.styles, "layer", "mean over clients",
                    whole=True, log=_wide([row.get(quantity) for row in rows]), ticks=ticks,
                ),
            )
        )  # fmt: skip
    columns = [METHOD, Column("layer_index", "no.", "count"), Column("layer", "layer", "text")]
    columns += [Column(quantity, _in_words(quantity), "figures") for quantity in quantities]
    columns.append(Column("n_seeds", "seeds", "count"))
    return context.gallery(pictures, context.table("layers", "Diagnostics by layer, means over clients", columns, rows))


def _transitions(context: Context, rows: Sequence[Row]) -> Table | None:
    columns = [
        METHOD,
        Column("seed", "seed", "count"),
        Column("round", "round", "count"),
        Column("p", "layers shared", "count"),
        Column("layer", "the last of them", "text"),
        Column("low", "from t", decimals=4, group="for thresholds"),
        Column("high", "below t", decimals=4, group="for thresholds"),
    ]
    shown = [dict(row) | {"high": "∞" if row["high"] == float("inf") else row["high"]} for row in rows]
    caption = "How many layers a threshold t shares: the wider its range, the more stable the transition"
    return context.table("transitions", caption, columns, shown, seeds=False) if rows else None


def _correlations(context: Context, rows: Sequence[Row]) -> Table | None:
    columns = [
        Column("b", "sensitivity with", "text"),
        Column("rho", "Spearman’s ρ", "difference", interval="ci95"),
        Column("positive", "share of groups above 0", decimals=2),
        Column("groups", "groups", "count", help="(run, round, client)"),
        Column("runs", "runs", "count"),
    ]
    shown = [dict(row) | {"b": _in_words(row["b"]), "ci95": [row["low"], row["high"]]} for row in rows]
    caption = "Do other diagnostics order the layers as sensitivity does? Mean rank correlation, bootstrap interval"
    return context.table("layer-correlations", caption, columns, shown, seeds=False) if rows else None


def _in_words(quantity: str) -> str:
    from fedlightning.callbacks.diagnostics.layer_figures import PANELS

    return PANELS.get(quantity, quantity.replace("_", " ")).replace("$F_l$", "F")


def _named(row: Row) -> dict[str, Any]:
    method, _, seed = row["run"].rpartition(", seed ")
    return dict(row) | {"method": method, "seed": int(seed)}


def _last_round(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    last = {row["run"]: row["round"] for row in sorted(rows, key=lambda row: row["round"])}
    return [row for row in rows if row["round"] == last[row["run"]]]


def _wide(values: Sequence[float | None]) -> bool:
    """Return True if values are positive and span more than a factor of ten."""
    numbers = [value for value in values if value is not None]
    return bool(numbers) and min(numbers) > 0 and max(numbers) > 10 * min(numbers)

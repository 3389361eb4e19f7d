"""Sections about training: learning curves by stage, and costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fedlightning.report.cells import Column, Kind, interval_of, is_number, number, summary
from fedlightning.report.context import METHOD, Context, Row
from fedlightning.report.figures.curves import Point, curves
from fedlightning.report.html import Section, Table
from fedlightning.study.columns import LOCAL, POOLED
from fedlightning.study.learning_curves import seed_curves

SPENT: dict[str, tuple[str, Kind]] = {
    "rounds": ("rounds", "count"),
    "mb": ("MB", "amount"),
    "local_steps": ("steps", "count"),
    "seconds": ("s", "amount"),
}
"""Columns of the costs until a target, with their titles and kinds."""
STAGES = {"G": "G: the server's model", "L1": "L1: as received", "L2": "L2: after local training"}


def learning_curves(context: Context) -> Section | None:
    """Show validation scores over rounds, with a panel for each stage and kind of data."""
    rows = context.study.curves()
    runs = seed_curves(context.study.data) if context.few_seeds else None
    panels = [
        (stage, data)
        for data in (LOCAL, POOLED)
        for stage in STAGES
        if any((row["stage"], row["data"]) == (stage, data) and is_number(row["mean"]) for row in rows)
    ]
    pictures = []
    for stage, data in panels:
        chosen = [row for row in rows if (row["stage"], row["data"]) == (stage, data)]
        lines = lines_of(context, chosen, "round")
        last = [(method, points[-1][1]) for method, points in lines.items()]
        pictures.append(
            context.picture(
                f"curves-{stage.lower()}-{data}",
                STAGES[stage] + (", pooled data" if data == POOLED else ""),
                f"Lines: validation {context.metric} over rounds at stage {stage}; in the last round {summary(last)}.",
                partial(
                    curves,
                    lines,
                    context.styles,
                    "round",
                    f"validation {context.metric}",
                    whole=True,
                    runs=None if runs is None else {method: runs.get((method, stage, data), []) for method in lines},
                ),
            )
        )
    columns = [
        METHOD,
        Column("stage", "stage", "text"),
        Column("data", "data", "text"),
        Column("round", "round", "count"),
        Column("mean", "mean", decimals=4, radius="ci95_radius"),
        Column("mb", "MB so far", "amount"),
        Column("local_steps", "steps so far", "count"),
        Column("seconds", "seconds so far", "amount"),
        Column("n_seeds", "seeds", "count"),
    ]
    table = context.table("curves", f"Validation {context.metric} by round", columns, rows)
    return context.section(
        "curves",
        "Learning curves",
        "Curves",
        [context.gallery(pictures, table, f"Mean over clients{_spread(context)}.")],
    )


def _spread(context: Context) -> str:
    if len(context.study.data.seeds) < 2:
        return ""
    return "; thin lines: single seeds" if context.few_seeds else "; band: 95\u00a0% interval over seeds"


def costs(context: Context) -> Section | None:
    """Show what a run sends and computes, the score against megabytes sent, and the costs of reaching targets."""
    rows = context.overview
    price = context.table(
        "price",
        "What one run of a method takes, mean over seeds",
        [
            METHOD,
            Column("mean", f"mean test {context.metric}", better=context.better),
            Column("mb_up", "up", "amount", group="MB sent"),
            Column("mb_down", "down", "amount", group="MB sent"),
            Column("mb_total", "in all", "amount", group="MB sent", better="low"),
            Column("local_steps", "local steps", "count"),
            Column("seconds", "seconds", "amount"),
            Column("peak_memory_mb", "peak memory, MB", "count"),
        ],
        rows,
    )
    stage, spent = _spent(context)
    way = None
    if any(len(points) > 1 for points in spent.values()):
        picture = context.picture(
            "cost-curve",
            f"Validation {context.metric} against what was sent so far (stage {stage})",
            f"Lines: validation {context.metric} at stage {stage} against megabytes sent so far; at the end "
            + summary([(method, points[-1][1]) for method, points in spent.items()]),
            lambda: curves(
                spent,
                context.styles,
                "MB so far",
                f"validation {context.metric}",
                runs={} if context.few_seeds else None,
            ),
        )
        columns = [METHOD, Column("round", "round", "count"), Column("mb", "MB so far", "amount")]
        columns.append(Column("mean", "mean", decimals=4, radius="ci95_radius"))
        table = context.table(
            "cost-curve", f"Validation {context.metric} and MB by round", columns, _of_stage(context, stage)
        )
        way = context.gallery(
            [picture], table, f"Mean over clients and seeds{'' if context.few_seeds else _spread(context)}."
        )
    return context.section("cost", "What it costs", "Cost", [price, way, _to_target(context)])


def _to_target(context: Context) -> Table | None:
    """Return a table of the costs of reaching each target: a row a method."""
    costs = context.study.costs()
    spent = SPENT | ({"time": ("virtual s", "amount")} if any("time" in row for row in costs) else {})
    targets = list(dict.fromkeys((row["target"], row["share"], row["of"]) for row in costs))
    lines: dict[str, dict[str, Any]] = {row["method"]: {"method": row["method"]} for row in context.overview}
    columns = [METHOD]
    for place, (target, share, of) in enumerate(targets):
        group = number(target, 3) + (f" ({share:.0%} of {of}’s best)" if of else "")
        columns += [
            Column(f"{key} {place}", title, kind, group=group, better="low") for key, (title, kind) in spent.items()
        ]
        for row in costs:
            if row["target"] == target:
                method = row["method"]
                never = (
                    not row["reached"] and method not in context.diverged and bool(context.study.data.seeds_of(method))
                )
                lines[row["method"]] |= {f"{key} {place}": row[key] for key in spent}
                lines[row["method"]] |= {f"rounds {place}": "not reached"} if never else {}
    if not targets:
        return None
    return context.table(
        "costs",
        f"What it takes to reach a validation {context.metric} with models as received (L1)",
        columns,
        list(lines.values()),
        ["Targets are validation scores: none is chosen on test data."],
    )


def lines_of(context: Context, rows: Sequence[Row], x: str) -> dict[str, list[Point]]:
    """Return method -> points of a curve over `x`, in the order of the overview."""
    order = [row["method"] for row in context.overview]
    lines: dict[str, list[Point]] = {}
    for method in order:
        points = [
            (row[x], row["mean"], interval_of(row)) for row in rows if row["method"] == method and is_number(row[x])
        ]
        if points:
            lines[method] = sorted(points, key=lambda point: point[0])
    return lines


def _of_stage(context: Context, stage: str) -> list[Row]:
    return [row for row in context.study.curves() if row["stage"] == stage and row["data"] == LOCAL]


def _spent(context: Context) -> tuple[str, dict[str, list[Point]]]:
    """Return curves over megabytes at L1, which most runs evaluate, else at the first stage that was evaluated."""
    for stage in ("L1", "G", "L2"):
        rows = [row for row in _of_stage(context, stage) if is_number(row.get("mb"))]
        if rows:
            return stage, lines_of(context, rows, "mb")
    return "", {}

"""Fairness over clients and incentives to take part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedlightning.evaluation.report.cells import Column, is_number
from fedlightning.evaluation.report.context import METHOD, Context, Row, summary
from fedlightning.evaluation.report.figures.spread import against, distribution
from fedlightning.evaluation.report.html import Prose, Section


def fairness(context: Context) -> Section | None:
    """Spread, worst clients, participation rate, opt-outs, and who is above a threshold."""
    order = [row["method"] for row in context.overview]
    rows = sorted(context.study.fairness(), key=lambda row: order.index(row["method"]))
    better = context.better
    scores = {m: _known(of.values()) for m, of in context.by_client("score").items() if m not in context.diverged}
    appeal: dict[str, list[float]] = {}
    for row in sorted(context.study.appeal(), key=lambda row: order.index(row["method"])):
        appeal.setdefault(row["method"], []).extend(_known([row["pma"]]))
    appeal = {method: values for method, values in appeal.items() if values}
    points = {row["method"]: (row.get("mean"), row.get("worst")) for row in context.overview}
    pictures = [
        context.picture(
            "fairness-worst",
            "Mean against the worst-served client",
            "Marks: mean and worst client of each method; worst: " + summary([(m, y) for m, (_, y) in points.items()]),
            lambda: against(
                points, context.styles, f"mean {context.metric}", f"worst client’s {context.metric}", equal=True
            ),
        ),
        context.picture(
            "fairness-scores",
            f"How {context.metric} is spread over clients",
            f"Lines: share of clients at or below a {context.metric}; medians: {_medians(scores)}.",
            lambda: distribution(scores, context.styles, f"test {context.metric}", "share of clients"),
        ),
    ]
    if appeal:
        pictures.append(
            context.picture(
                "fairness-appeal",
                "Personal model appeal (PMA)",
                f"Lines: share of clients at or below an appeal; left of 0 FedAvg is better; medians: {_medians(appeal)}.",
                lambda: distribution(
                    appeal, context.styles, f"{context.metric} minus FedAvg’s", "share of clients", zero=True
                ),
            )
        )
    columns = [
        METHOD,
        Column("mean", "mean", better=better),
        Column("std", "std", decimals=4, better="low", help="standard deviation over clients"),
        Column("variance", "variance", decimals=5, better="low"),
        Column("worst", "worst", better=better),
        Column("tenth_percentile", "10th pct.", better=better),
        Column("best", "best", better=better),
        Column("ipr", "IPR", "percent", better="high", help="incentivised participation rate"),
        Column("pma", "PMA mean", "difference", help="personal model appeal"),
        Column("opt_outs", "opt out", "percent", better="low"),
        Column(
            "gma", "GMA", "amount", better="high", help="clients whom the global model serves better than their own"
        ),
        *_thresholds(rows),
    ]
    table = context.table("fairness", "Spread over clients, and incentives", columns, rows)
    notes = [] if appeal else [
        "PMA and opt-outs are empty: they need a FedAvg run on the same splits, seeds and rounds."
    ]  # fmt: skip
    return context.section(
        "fairness",
        "Fairness and incentives",
        "Fairness",
        [context.gallery(pictures, table), Prose(notes, tone="warn") if notes else None],
        "Is everybody served, and would everybody take part? A low variance alone is not fair: a uniformly bad model has "
        "one too.",
    )


def _thresholds(rows: Sequence[Row]) -> list[Column]:
    """Columns of FLIU's rho: clients strictly above a threshold."""
    keys = [key for key in (rows[0] if rows else {}) if key.startswith("above_")]
    return [Column(key, f"> {key.removeprefix('above_')}", "amount", group="clients above (ρε)") for key in keys]


def _medians(values: Mapping[str, Sequence[float]]) -> str:
    return summary([(method, float(np.median(of))) for method, of in values.items()])


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and is_number(value)]

"""Section about fairness over clients and incentives to take part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedlightning.report.cells import Column, counted, is_number, summary
from fedlightning.report.context import METHOD, Context, Row
from fedlightning.report.figures.client_maps import strips
from fedlightning.report.figures.spread import against
from fedlightning.report.html import Gallery, Prose, Section
from fedlightning.report.sections.clients import by_client_table
from fedlightning.report.sections.scores import incentives_in_words


def fairness(context: Context) -> Section | None:
    """Show spread over clients, worst clients, participation rate, opt-outs, and counts above thresholds."""
    rows = context.sort_rows(context.study.fairness())
    by_method = {
        method: column for method, column in context.by_client("score").items() if method not in context.diverged
    }
    scores = {method: _keep_numbers(column.values()) for method, column in by_method.items()}
    appeal = _appeal(context)
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
            f"Marks: test {context.metric} of each client; medians: {_medians(scores)}.",
            lambda: strips(by_method, context.styles, f"test {context.metric}, one mark per client"),
        ),
    ]
    table = context.table(
        "fairness", "Spread over clients, and incentives", _columns(context, rows), rows, incentives_in_words(rows)
    )
    notes = [
        "Personal model appeal and opt-outs are left out: they need a FedAvg run on the same splits, seeds and rounds."
    ]
    return context.section(
        "fairness",
        "Fairness and incentives",
        "Fairness",
        [context.gallery(pictures, table, "Lines across marks: medians."), appeal or Prose(notes, tone="warn")],
        "Is everybody served, and would everybody take part? A low variance alone is not fair: a uniformly bad model has "
        "one too.",
    )


def _columns(context: Context, rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the table of fairness."""
    better = context.better
    return [
        METHOD,
        Column("mean", "mean", better=better),
        Column("weighted_mean", "weighted", better=better, help="mean weighted by test samples"),
        Column("median", "median", better=better),
        Column("std", "std", decimals=4, better="low", help="standard deviation over clients"),
        Column("variance", "variance", decimals=5, better="low"),
        Column("worst", "worst", better=better),
        Column("tenth_percentile", context.tenth, better=better),
        Column("best", "best", better=better),
        Column("ipr", "IPR", "percent", better="high", help="incentivised participation rate"),
        Column("pma", "PMA mean", "difference", help="personal model appeal"),
        Column("opt_outs", "opt out", "percent", better="low"),
        counted("gma", "GMA", rows, better="high", help="clients whom the global model serves better than their own"),
        *_thresholds(rows),
    ]


def _appeal(context: Context) -> Gallery | None:
    """Show the distribution of PMA over clients and each client's value; `None` without a comparable FedAvg run."""
    by_client: dict[str, dict[str, float | None]] = {}
    for row in context.sort_rows(context.study.appeal()):
        by_client.setdefault(row["method"], {})[row["client"]] = row["pma"]
    appeals = {method: values for method, column in by_client.items() if (values := _keep_numbers(column.values()))}
    if not appeals:
        return None
    clients = list(dict.fromkeys(client for method in appeals for client in by_client[method]))
    shown = {method: by_client[method] for method in appeals}
    picture = context.picture(
        "fairness-appeal",
        "Personal model appeal (PMA)",
        f"Marks: appeal of each client; left of 0 FedAvg is better; medians: {_medians(appeals)}.",
        lambda: strips(shown, context.styles, f"{context.over('FedAvg')}, one mark per client", zero=True),
    )
    caption = "Personal model appeal of each client, mean over seeds: positive where FedAvg’s global model is worse"
    table = by_client_table(context, "appeal", caption, shown, clients, "difference", "high")
    return context.gallery(
        [picture], table, "Left of 0: clients that FedAvg’s global model serves better (opt-outs). Lines: medians."
    )


def _thresholds(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of FLIU's rho: clients strictly above, and strictly below, each threshold."""
    keys = [key for key in (rows[0] if rows else {}) if key.startswith(("above_", "below_"))]
    return [
        counted(key, f"{sign}\u00a0{level}", rows, group=f"clients {side} (ρε)")
        for side, sign in (("above", ">"), ("below", "<"))
        for level in (key.removeprefix(f"{side}_") for key in keys if key.startswith(side))
        for key in (f"{side}_{level}",)
    ]


def _medians(values: Mapping[str, Sequence[float]]) -> str:
    return summary([(method, float(np.median(numbers))) for method, numbers in values.items()])


def _keep_numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if is_number(value)]

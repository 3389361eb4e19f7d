"""Sections about significance: paired differences over seeds, and ranks over data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from fedlightning.errors import missing_package
from fedlightning.report.cells import Column, interval_of, is_number, number, p_value, summary
from fedlightning.report.context import METHOD, Context, Row
from fedlightning.report.figures.dots import Dot, Line, dot_plot
from fedlightning.report.html import Prose, Section
from fedlightning.study.differences import best_method
from fedlightning.study.ranks import ranks
from fedlightning.study.roles import NEEDED
from fedlightning.study.study import Study


def differences(context: Context) -> Section | None:
    """Show a forest plot for each reference (the best method and two baselines) with every method's paired difference."""
    study = context.study
    candidates = [best_method(study.data), *(study.data.baselines.get(role) for role in NEEDED)]
    references = [reference for reference in dict.fromkeys(candidates) if reference is not None]
    rows = [row for reference in references for row in study.differences(reference)]
    if not rows:  # one method has nothing to differ from
        return None
    pictures = [
        context.picture(
            f"differences-{context.slugs[reference]}",
            f"Against {reference}",
            f"Dots: mean paired difference of test {context.metric} to {reference}: "
            + summary([(row["method"], row["mean"]) for row in rows if row["reference"] == reference]),
            partial(
                dot_plot,
                _lines(context, [row for row in rows if row["reference"] == reference]),
                f"difference of test {context.metric}" + ("" if context.higher else " (lower is better)"),
                zero=True,
            ),
        )
        for reference in references
    ]
    columns = [
        METHOD,
        Column("reference", "minus", "text"),
        Column("mean", "difference", "difference", decimals=4, interval="ci95"),
        Column("p", "p", "p", group="over seeds", help="paired t-test; corrected where splits overlap"),
        Column("p_holm", "Holm", "p", group="over seeds", help="adjusted for all comparisons with the same reference"),
        Column("p_wilcoxon", "signed ranks", "p", group="over seeds"),
        Column("p_clients", "signed ranks", "p", group="over clients", help="would other clients like these gain too?"),
        Column("n", "seeds", "count"),
    ]
    table = context.table("differences", f"Paired differences of mean test {context.metric} over seeds", columns, rows)
    single = bool(rows) and max(row["n"] or 0 for row in rows) < 2
    caveat = Prose(["There is one seed: differences are shown, but nothing can be said about chance."], tone="warn")
    return context.section(
        "statistics",
        "Are the differences real?",
        "Differences",
        [caveat if single else None, context.gallery(pictures, table, _READING)],
        "Every difference is taken within a seed (same splits, same initialisation) and averaged over seeds. Tests over "
        "seeds ask whether training again would show the same; the test over clients, whether others like these would gain. "
        "Neither says the other.",
    )


_READING = (
    "Bars: 95 % interval of the paired difference; one that crosses 0 is within the variation between seeds. "
    "Ticks: single seeds."
)


def rank_section(context: Context, studies: Mapping[str, Study]) -> Section | None:
    """Show average ranks over data sets, the Friedman test and the critical-difference diagram."""
    title = "Ranks over data sets"
    try:
        ranking = ranks(studies)
    except ValueError as error:
        return context.section("ranks", title, "Ranks", [Prose([f"There are no ranks. {error}"], tone="warn")])
    left = [f"{method} is not ranked: {why}." for method, why in ranking["left_out"].items()]
    order = ranking["methods"]
    rows = [
        {"method": method, "rank": ranking["ranks"][method]}
        | {f"in {name}": value for name, value in zip(ranking["names"], ranking["scores"][method], strict=True)}
        for method in order
    ]
    columns = [METHOD, Column("rank", "average rank", decimals=2, better="low")]
    columns += [
        Column(f"in {name}", name, group=f"mean test {context.metric}", better=context.better)
        for name in ranking["names"]
    ]
    table = context.table("ranks", "Average ranks (1 is best) and the means behind them", columns, rows)
    sentences = [_friedman(ranking)]
    gallery = None
    if find_spec("scikit_posthocs") is not None:
        from fedlightning.report.figures.critical_difference import critical_difference

        picture = context.picture(
            "ranks",
            "Critical-difference diagram",
            "Average ranks, 1 is best: " + summary([(m, ranking["ranks"][m]) for m in order], 2),
            lambda: critical_difference(ranking["ranks"], ranking["pairwise"], context.styles),
        )
        gallery = context.gallery(
            [picture], table, "A bar joins methods that Nemenyi’s test cannot tell apart (p ≥ 0.05)."
        )
    else:
        sentences.append(missing_package("The critical-difference diagram needs scikit-posthocs", "report"))
    warning = Prose(left, tone="warn") if left else None
    return context.section("ranks", title, "Ranks", [Prose(sentences), warning, gallery or table])


def _friedman(ranking: Mapping[str, Any]) -> str:
    finite = is_number(ranking["iman_davenport"])  # infinite: all data sets agree, which few do by chance
    p = ranking["iman_davenport_p"] if finite else ranking["p_value"]
    verdict = (
        "the methods do not all rank alike"
        if p < 0.05
        else "this does not tell the methods apart, and with few data sets only large differences can"
    )
    form = (
        f"In the less conservative form of Iman and Davenport F = {number(ranking['iman_davenport'], 2)}, p = {p_value(p)}: "
        if finite
        else f"All {ranking['blocks']} agree on the order, where the form of Iman and Davenport gives no p-value; by χ²: "
    )
    return (
        f"Friedman test over {ranking['datasets']} {ranking['blocks']}: χ² = {number(ranking['statistic'], 2)}, "
        f"p = {p_value(ranking['p_value'])}. {form}{verdict}. "
        f"Nemenyi’s critical difference of average ranks at {ranking['alpha']:g}: "
        f"{number(ranking['critical_difference'], 2)}."
    ).replace("= <", "<")


def _lines(context: Context, rows: Sequence[Row]) -> list[Line]:
    return [
        context.line(
            row["method"],
            [Dot(row["mean"], interval_of({"ci95": row.get("ci95"), "n_seeds": row["n"]}))],
            runs=list((row.get("per_seed") or {}).values()),
        )
        for row in context.best_first(rows)
    ]

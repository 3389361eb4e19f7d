"""Sections about scores: overview, all metrics, stages of a round, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedlightning.report.cells import Column, interval_of, is_number, summary
from fedlightning.report.context import METHOD, SEEDS, Context, Row
from fedlightning.report.figures.dots import Dot, common_limits, dot_plot
from fedlightning.report.figures.spread import against
from fedlightning.report.html import Picture, Section
from fedlightning.scores.metric_names import bare, higher_is_better, metric_label
from fedlightning.study.columns import GLOBAL, LOCAL, POOLED, STAGES
from fedlightning.study.target_units import describe_units, target_of


def overview(context: Context) -> Section | None:
    """Show one row a method, best first, beside a figure of means with their intervals."""
    rows = context.overview
    lines = [
        context.line(row["method"], [_dot(context, row["mean"], row, "ci95")], runs=context.seed_means(row["method"]))
        for row in rows
    ]
    seeds = max((row["n_seeds"] for row in rows), default=0)
    level = context.study.reference()
    alt = f"Dots: mean test {context.metric} of {summary([(row['method'], row['mean']) for row in rows])}."
    picture = context.picture(
        "overview",
        f"Mean test {context.metric} of deployed models",
        alt,
        lambda: dot_plot(
            lines, f"test {context.metric}, mean over clients", at=None if level is None else (level.name, level.level)
        ),
    )
    pictures = [picture]
    points = {row["method"]: (row["mb_total"], row["mean"]) for row in rows}
    if any(is_number(x) and x for x, _ in points.values()):
        pictures.append(
            context.picture(
                "overview-price",
                "… and what was sent for it",
                f"Marks: megabytes sent by {summary([(method, x) for method, (x, _) in points.items()], 1)}.",
                lambda: against(points, context.styles, "MB up and down in a run", f"test {context.metric}"),
            )
        )
    bars = "" if context.few_seeds else "Bars: 95\u00a0% interval over seeds. "
    whiskers = f"{bars}Ticks: single seeds." if seeds > 1 else "One seed, so no intervals."
    table = context.table(
        "overview",
        "All methods, best mean first" if len(rows) > 1 else "Deployed models in numbers",
        _columns(context, len(rows) > 1),
        rows,
        [
            *([_BOLD] if len(rows) > 1 else []),
            *_not_asked(context),
            *incentives_in_words(rows),
            *_units(context),
            *_deployed(rows),
            *_defined(context),
        ],
    )
    return context.section(
        "overview",
        "Overview",
        "Overview",
        [context.gallery(pictures, table, whiskers, open=True)],
        "Each client's deployed model on its own test data. The deployed model is chosen by a rule that is fixed before "
        "test data are looked at: the client's checkpoint with the best validation score if the run keeps one, else the "
        "last model received.",
    )


def _columns(context: Context, several: bool) -> list[Column]:
    """Return the columns of the overview, with the difference to the best of several methods."""
    better = context.better
    gaps = [
        Column(
            "gap", "difference", "difference", interval="gap_ci95", group="to the best mean", help="paired over seeds"
        ),
        Column("gap_p", "p", "p", group="to the best mean", help="over seeds, not adjusted"),
    ]
    added = "sum of the two scores" if context.higher else "the two scores added"
    return [
        METHOD,
        Column("mean", "mean", radius="ci95_radius", group="own test data", better=better,
               help="mean over seeds of the mean over clients, ± half the 95 % interval over seeds"),
        Column("median", "median", group="own test data", better=better, help="median client"),
        Column("tenth_percentile", context.tenth, group="own test data", better=better, help="from the bad end"),
        Column("worst", "worst", group="own test data", better=better, help="worst-served client"),
        Column(POOLED, "mean", group="all clients’ data", better=better, help="deployed models on all clients' test data"),
        Column("sum", "sum", group="all clients’ data", better=better, help=added),
        Column(GLOBAL, "mean", group="global model", better=better, help="the server's model on each client's data"),
        *(gaps if several else []),
        Column("ipr", "IPR", "percent", group="incentives", better="high", help="incentivised participation rate"),
        Column("opt_outs", "opt out", "percent", group="incentives", better="low", help="clients worse off than with FedAvg"),
        Column("mb_total", "MB", "amount", group="price of a run", help="sent up and down"),
        Column("local_steps", "steps", "count", group="price of a run", help="optimizer steps of all clients"),
        Column("seconds", "s", "amount", group="price of a run", help="wall clock"),
        SEEDS,
    ]  # fmt: skip


_BOLD_ONLY = "Bold: the best of the column, of methods with all seeds on the same test data."
_BOLD = f"{_BOLD_ONLY} The difference to the best mean is paired over seeds; its p is not adjusted."


def incentives_in_words(rows: Sequence[Row]) -> list[str]:
    """Return the note that says what the abbreviations of incentives are, of those that a table has."""
    words = {
        "ipr": "IPR (incentivised participation rate): clients better off than both alone and with FedAvg",
        "opt_outs": "opt out: clients worse off than with FedAvg’s global model",
        "pma": "PMA (personal model appeal): a client’s score minus what FedAvg’s global model gives it",
        "gma": "GMA (global model appeal): clients whom the global model serves better than their own",
    }
    meanings = [text for key, text in words.items() if any(is_number(row.get(key)) for row in rows)]
    return [f"{'; '.join(meanings)}."] if meanings else []


def _not_asked(context: Context) -> list[str]:
    """Return the note that central training is never called the best, if there is such a method."""
    central = context.study.data.baselines.get("central")
    if central is None:
        return []
    return [
        f"{central} moves all data to one place, so it is not asked who is best: best is the best of the other methods."
    ]


def _units(context: Context) -> list[str]:
    """Return the note that says in what units errors of a regression are."""
    return describe_units((target_of(run.config) for run in context.study.data.runs), context.study.data.metric)


def _deployed(rows: Sequence[Row]) -> list[str]:
    """Return the line below the table that says which model each method deploys."""
    methods_by_model: dict[str, list[str]] = {}
    for row in rows:
        if row["checkpoint"] is not None:
            methods_by_model.setdefault(f"{row['checkpoint']} ({row['stage']})", []).append(row["method"])
    each = [
        f"{which} of {'all' if len(methods_by_model) == 1 else ', '.join(methods)}"
        for which, methods in methods_by_model.items()
    ]
    return [f"Deployed: {'; '.join(each)}."] if each else []


def _defined(context: Context) -> list[str]:
    """Return a note for each metric that is undefined on some clients' data: over how many its means are."""
    counts_by_metric: dict[str, set[tuple[int, int]]] = {}
    for line in context.study.results():
        if line["data"] == LOCAL and line["split"] == context.study.data.split and line["undefined"]:
            counts_by_metric.setdefault(bare(line["metric"]), set()).add((line["clients"], line["clients_of"]))
    return [
        f"{metric_label(name)} is not defined on every client's data: its means are over "
        f"{' or '.join(f'{some} of {total}' for some, total in sorted(counts))} clients."
        for name, counts in counts_by_metric.items()
    ]


def measured(context: Context) -> Section | None:
    """Show every metric of the deployed models, calibration error among them."""
    rows = context.sort_rows(context.study.measured())
    names = [key.removesuffix("_radius") for key in (rows[0] if rows else {}) if key.endswith("_radius")]
    if len(names) < 2:
        return None
    columns = [METHOD]
    columns += [
        Column(name, metric_label(name), radius=f"{name}_radius",
               better="high" if higher_is_better(name) else "low")
        for name in names
    ]  # fmt: skip
    table = context.table(
        "measured", "Mean over clients, each on its own test data", columns, rows, [_BOLD_ONLY, *_defined(context)]
    )
    return context.section(
        "measured",
        "Everything that was measured",
        "Metrics",
        [table],
        "The same deployed models by every metric of the runs."
        + " The calibration error is the expected one, over 15 bins." * ("ece" in names),
    )


def stages(context: Context) -> Section | None:
    """Show G, L1 and L2 side by side, on local and on pooled data."""
    rows = context.sort_rows(context.study.stages())
    pictures = [
        _grouped(
            context,
            f"stages-{data}",
            f"On {words}",
            [stage for stage in STAGES if any(row["stage"] == stage and is_number(row[data]) for row in rows)],
            {
                method: [
                    _dot(context, row[data], row, f"{data}_ci95", row["stage"])
                    for row in rows
                    if row["method"] == method
                ]
                for method in dict.fromkeys(row["method"] for row in rows)
            },
        )
        for data, words in ((LOCAL, "each client’s own data"), (POOLED, "all clients’ data"))
        if any(is_number(row[data]) for row in rows)
    ]
    columns = [METHOD, Column("stage", "stage", "text")]
    columns += [
        Column(data, title, radius=f"{data}_radius", decimals=4)
        for data, title in ((LOCAL, "own data"), (POOLED, "all clients’ data"), ("sum", "sum"))
    ]
    table = context.table(
        "stages",
        f"Test {context.metric} of the latest models by stage",
        [*columns, Column("n_seeds", "seeds", "count")],
        rows,
    )
    return context.section(
        "stages",
        "Before and after aggregation",
        "Stages",
        [context.gallery(pictures, table)],
        "G: the server's model after aggregation. L1: what a client holds after receiving it. L2: the same after local "
        "training. All of the last round, and never averaged with each other.",
    )


def checkpoints(context: Context) -> Section | None:
    """Show the latest models beside those with the best global and the best local validation score."""
    rows = context.sort_rows(context.study.checkpoints())
    kinds = {
        "latest": "latest (L1)",
        "latest_global": "latest (G)",
        "best_global": "best global",
        "best_local": "best local",
    }
    kinds = {kind: title for kind, title in kinds.items() if any(is_number(row[kind]) for row in rows)}
    if len(kinds) < 2:
        return None
    picture = _grouped(
        context, "checkpoints", "On each client’s own data", list(kinds.values()),
        {r["method"]: [_dot(context, r[k], r, f"{k}_ci95", title) for k, title in kinds.items()] for r in rows},
    )  # fmt: skip
    columns = [METHOD, *(Column(kind, title, radius=f"{kind}_radius", decimals=4) for kind, title in kinds.items())]
    columns.append(
        Column("selection", "selection", "difference", interval="selection_ci95", decimals=4,
               help="score of the deployed model minus that of the latest")
    )  # fmt: skip
    columns += [Column("deployed", "deployed", "text"), Column("n_seeds", "seeds", "count")]
    table = context.table(
        "checkpoints", f"Test {context.metric} by checkpoint", columns, rows, _selection(context, rows)
    )
    return context.section(
        "checkpoints",
        "Which checkpoint to deploy",
        "Checkpoints",
        [context.gallery([picture], table)],
        "Latest: after the last round. Best global: the round with the best validation score of the server's model. Best "
        "local: each client's own best round. All are chosen on validation data and scored on test data.",
    )


def _selection(context: Context, rows: Sequence[Row]) -> list[str]:
    """Return the line that says for which methods selection gained, and for which it cost."""
    clauses = []
    for word, sign in (("gained", 1), ("cost", -1)):
        gains = [
            f"{row['method']} {abs(row['selection']):.4f}"
            for row in rows
            if is_number(row["selection"]) and row["selection"] * (sign if context.higher else -sign) > 0
        ]
        clauses += [f"{word} {', '.join(gains)}"] if gains else []
    return [f"Against the latest models, selection {'; it '.join(clauses)}."] if clauses else []


def _dot(context: Context, mean: float | None, row: Row, interval: str, group: str = "") -> Dot:
    """Return a mean with its interval; without, where there are few seeds."""
    return Dot(mean, None if context.few_seeds else interval_of(row, interval), group)


def _grouped(
    context: Context, name: str, title: str, groups: Sequence[str], dots: Mapping[str, Sequence[Dot]]
) -> Picture:
    """Draw a line a method, with a dot for each group."""
    lines = [context.line(method, method_dots) for method, method_dots in dots.items()]
    words = summary([(f"{line.label} {dot.group}", dot.mean) for line in lines for dot in line.dots])
    return context.picture(
        name,
        title,
        f"Test {context.metric}: {words}.",
        lambda: dot_plot(lines, f"test {context.metric}", groups=groups, limits=common_limits(lines)),
    )

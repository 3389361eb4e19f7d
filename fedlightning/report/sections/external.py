"""Section about internal-external validation, in the order of TRIPOD+AI (Collins et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedlightning.report.cells import Column, is_number, number
from fedlightning.report.context import METHOD, SEEDS, Context, Row
from fedlightning.report.drawing import legend_below
from fedlightning.report.figures.dots import Dot, dot_plot
from fedlightning.report.html import Gallery, Prose, Section, Table
from fedlightning.report.styles import MUTED, Style, short_names
from fedlightning.study import external_validation as tables
from fedlightning.study.calibration import MIN_EVENTS, RESAMPLES
from fedlightning.study.external_validation import MIN_SAMPLES, MOST_CLASSES

MOST_PANELS = 9
COLUMNS = 2
Curves = Mapping[str, Mapping[str, Any]]
"""By site and method: what :func:`fedlightning.study.external_validation.curves_of` returns."""


def calibration_curves(curves: Curves, styles: Mapping[str, Style]) -> Figure:
    """Draw the share of events against the mean predicted probability of each bin; a perfect curve is the diagonal."""

    def draw(axes: Axes, methods: Mapping[str, Any], names: Mapping[str, str]) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=(0, (1.2, 1.2)), label="perfect")
        for method, curve in methods.items():
            x, y = zip(*curve["calibration"], strict=True)
            _plot(axes, styles[method], x, y, names[method], marker=styles[method].marker)
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)

    return _panels(curves, draw, "predicted probability", "share with the event")


def decision_curves(curves: Curves, styles: Mapping[str, Style]) -> Figure:
    """Draw the net benefit over thresholds, beside that of treating all and of treating none."""

    def draw(axes: Axes, methods: Mapping[str, Any], names: Mapping[str, str]) -> None:
        shared = np.array(next(iter(methods.values()))["benefit"])
        axes.plot(shared[:, 0], shared[:, 2], color=MUTED, linewidth=1.1, label="treat all")
        axes.axhline(0, color=MUTED, linewidth=1.1, linestyle=(0, (5, 1.5)), label="treat none")
        for method, curve in methods.items():
            values = np.array(curve["benefit"])
            _plot(axes, styles[method], values[:, 0], values[:, 1], names[method])
        top = max(float(np.array(curve["benefit"])[:, 1].max()) for curve in methods.values())
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.25 * max(top, 0.05), 1.1 * max(top, 0.05))  # what treating all loses has no lower end

    return _panels(curves, draw, "threshold probability", "net benefit")


def _plot(axes: Axes, style: Style, x: Any, y: Any, label: str, marker: str = "") -> None:
    axes.plot(x, y, color=style.colour, linestyle=style.line, marker=marker, markersize=4, linewidth=1.3, label=label)


def _panels(
    curves: Curves, draw: Callable[[Axes, Mapping[str, Any], Mapping[str, str]], None], xlabel: str, ylabel: str
) -> Figure:
    sites = sorted(curves, key=lambda site: -next(iter(curves[site].values()))["samples"])[:MOST_PANELS]
    names = short_names(dict.fromkeys(method for site in sites for method in curves[site]), 20)
    titles = short_names(sites, 16)  # beside its samples, one must not reach the next panel
    lines = -(-len(sites) // COLUMNS)
    figure = Figure(figsize=(5.0, 0.5 + 2.0 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, COLUMNS, squeeze=False, sharex=True)
    for place, axes in enumerate(grid.flat):
        if place >= len(sites):
            axes.axis("off")
            continue
        site = sites[place]
        draw(axes, curves[site], names)
        axes.set_title(f"{titles[site]} ({next(iter(curves[site].values()))['samples']} samples)", fontsize=9)
        last = place + COLUMNS >= len(sites)
        axes.tick_params(labelbottom=last)
        axes.set_xlabel(xlabel if last else "", fontsize=9)
        axes.set_ylabel("" if place % COLUMNS else ylabel, fontsize=9)
    legend_below(figure, grid.flat[0])
    return figure


SITE = Column("site", "held-out site", "text")
AT = (0.1, 0.2, 0.3, 0.5)
"""Thresholds of the table of net benefit."""


def external(context: Context) -> Section | None:
    """Show what each method is worth at each site that it never saw."""
    rows = context.study.external()
    if not rows:
        return None
    parts = [make(context, rows) for make in (_participants, _outcome_and_model, _performance, _each_site)]
    parts += [*_calibration(context), *_usefulness(context), _subgroups(context), _limits(context)]
    return context.section(
        "external",
        "Internal-external validation",
        "Sites never seen",
        parts,
        "Every site was held out once, and the others trained. In the order of TRIPOD+AI: participants, outcome, model, "
        "performance, calibration, clinical usefulness, limits.",
    )


def _participants(context: Context, rows: Sequence[Row]) -> Table:
    sites = dict.fromkeys(row["site"] for row in rows)
    rows_by_place = {(row["client"], row["split"]): row for row in context.study.partition()}
    observed = {(line["site"], line["class"]): line["observed"] for line in context.study.calibrations()}
    lines = []
    for site in sites:
        line: dict[str, Any] = {"site": site}
        line |= {
            split: rows_by_place[site, split]["samples"]
            for split in ("train", "val", "test")
            if (site, split) in rows_by_place
        }
        lines.append(
            line | {f"class {label}": observed.get((site, label)) for label in tables.classes_of(context.study.data)}
        )
    columns = [Column("site", "site", "text")]
    columns += [Column(split, split, "count", group="samples") for split in ("train", "val", "test")]
    columns += [
        Column(f"class {label}", f"class {label}", group="share of test samples", decimals=2)
        for label in tables.classes_of(context.study.data)
    ]
    return context.table("external-participants", "Participants: samples of each site", columns, lines, seeds=False)


def _outcome_and_model(context: Context, rows: Sequence[Row]) -> Prose:
    first = next((run for run in context.study.data.left_out if run.config), None)
    model, data = ({}, {}) if first is None else (first.config.get("model") or {}, first.config.get("data") or {})
    target = (data.get("init_args") or {}).get("target")
    classes = tables.classes_of(context.study.data)
    what = f"column {target}" if target else "the labels of the data"
    way = "; each class against the rest" if classes else ""
    if classes == [1]:
        way = "; probabilities are those of class 1"
    trainer = {} if first is None else first.config.get("trainer") or {}
    net = ((model.get("init_args") or {}).get("net") or {}).get("class_path", "")
    names = " with ".join(filter(None, (model.get("class_path", "").rpartition(".")[2], net.rpartition(".")[2])))
    methods = ", ".join(dict.fromkeys(row["method"] for row in rows))
    outcome = f"{what} in {data.get('class_path', 'the data').rpartition('.')[2]}{way}."
    trained = f"{names or 'the model of the configurations'}, {trainer.get('max_rounds', '?')} rounds; {methods}."
    return Prose(terms=[("Outcome", outcome), ("Model", trained)])


def _performance(context: Context, rows: Sequence[Row]) -> Gallery | Table | None:
    lines = context.best_first(tables.sites_of(context.study.data))
    columns = [
        METHOD,
        Column("mean", "mean", group="sites never seen", better=context.better),
        Column("lowest", "lowest", group="sites never seen"),
        Column("lowest_site", "at", "text", group="sites never seen"),
        Column("highest", "highest", group="sites never seen"),
        Column("highest_site", "at", "text", group="sites never seen"),
        Column("member", "mean", group="the same sites as members"),
        Column("sites", "sites", "count", help="held-out sites with a score"),
    ]
    notes = [f"{row['method']}: {row['refused']}" for row in lines if row["refused"]]
    notes.append("Range over sites; no interval: these sites are not a sample of sites.")
    table = context.table(
        "external-methods", f"Test {context.metric} over held-out sites", columns, lines, notes, seeds=False
    )
    dots = []
    for line in lines:
        runs = [row["unseen"] for row in rows if row["method"] == line["method"]]
        dots.append(context.line(line["method"], [Dot(line["mean"], [line["lowest"], line["highest"]])], runs=runs))
    if not any(is_number(line["mean"]) for line in lines):
        return table
    numbers = "; ".join(f"{line['method']} {number(line['mean'])}" for line in lines if is_number(line["mean"]))
    picture = context.picture(
        "external",
        f"Test {context.metric} at sites never seen",
        f"Dots: mean over held-out sites, line from the lowest to the highest site: {numbers}.",
        lambda: dot_plot(dots, f"test {context.metric}; line: range of sites, ticks: each site"),
    )
    return context.gallery([picture], table, open=True)


def _each_site(context: Context, rows: Sequence[Row]) -> Table:
    columns = [
        METHOD,
        SITE,
        Column("samples", "test samples", "count"),
        Column("unseen", "score", interval="unseen_range", group="never seen", help="the model that it would deploy (L1)"),
        Column("global", "global model", group="never seen", help="the server's latest model"),
        Column("best_global", "best global", group="never seen", help="the one selected on the other sites' validation data"),
        Column("member", "score", interval="member_range", group="as a member", help="its deployed model where all train"),
        Column("gap", "difference", "difference", interval="gap_range", help="never seen minus as a member, same test data"),
        SEEDS,
    ]  # fmt: skip
    note = "[lowest, highest] over seeds, which vary the training, not the patients."
    return context.table(
        "external-sites", f"Test {context.metric} of each site", columns, rows, [note], seeds=False
    )  # fmt: skip


def _calibration(context: Context) -> list[Any]:
    rows = context.study.calibrations()
    why = tables.reasons(context.study.data)
    if not rows:
        return [Prose(why, title="Calibration", tone="warn")] if why else []
    columns = [METHOD, SITE, *_class_column(rows), Column("trained", "site", "text"), Column("samples", "samples", "count"),
        Column("events", "events", "count"), Column("observed", "observed", decimals=2, help="share with the event"),
        Column("expected", "expected", decimals=2, help="mean probability"),
        Column("slope", "slope", decimals=2, interval="slope_ci95",
               help="logistic recalibration; 1 is perfect, less is too extreme"),
        Column("intercept", "intercept", "difference", decimals=2, help="beside that slope"),
        Column("in_the_large", "in the large", "difference", decimals=2, interval="in_the_large_ci95",
               help="with slope 1; above 0: risks are too low"),
        Column("brier", "Brier", interval="brier_ci95", help="mean squared error of the probability"),
        Column("ece", "calibration error", help="15 bins of equal width"),
        Column("auroc", "AUROC", interval="auroc_ci95")]  # fmt: skip
    notes = [
        f"[95 % interval] over {RESAMPLES} resamples of the site's patients.",
        f"No slope with fewer than {MIN_EVENTS} samples of either kind, or where a probability parts them.",
        *why,
    ]
    table = context.table(
        "external-calibration", "Calibration by site, means over seeds", columns, rows, notes, seeds=False
    )
    caption = "Lines: share of events against mean predicted probability, in five bins, at each held-out site."
    return [_pictures(context, "calibration", "Calibration at sites never seen", caption, calibration_curves, table)]


def _usefulness(context: Context) -> list[Any]:
    rows = []
    for label in tables.classes_of(context.study.data)[:MOST_CLASSES]:
        for site, methods in tables.curves_of(context.study.data, label).items():
            for method, curve in methods.items():
                benefits = {t: (gain, everybody) for t, gain, everybody in curve["benefit"]}
                line = {"method": method, "site": site, "class": label}
                line |= {f"{t:g}": benefits[t][0] for t in AT} | {f"all {t:g}": benefits[t][1] for t in AT}
                rows.append(line)
    if not rows:
        return []
    columns = [METHOD, SITE, *_class_column(rows)]
    columns += [Column(f"{t:g}", f"{t:g}", "difference", group="net benefit at threshold") for t in AT]
    columns += [Column(f"all {t:g}", f"{t:g}", "difference", group="of treating all") for t in AT]
    note = (
        "True positives minus false positives weighted by the threshold's odds, for each sample; treating none has 0."
    )
    table = context.table(
        "external-benefit", "Clinical usefulness at sites never seen", columns, rows, [note], seeds=False
    )
    caption = (
        "Lines: net benefit over threshold probabilities, beside treating all and treating none, at each held-out site."
    )
    return [_pictures(context, "benefit", "Decision curves at sites never seen", caption, decision_curves, table)]


def _pictures(context: Context, name: str, title: str, alt: str, draw: Any, table: Table) -> Gallery | Table:
    classes = tables.classes_of(context.study.data)
    pictures = []
    for label in classes if len(classes) <= MOST_CLASSES else ():
        curves = tables.curves_of(context.study.data, label)
        what = "" if len(classes) == 1 else f", class {label}"
        pictures.append(
            context.picture(f"external-{name}-{label}", title + what, alt, partial(draw, curves, context.styles))
        )
    return context.gallery(pictures, table) or table


def _subgroups(context: Context) -> Table | None:
    rows = context.study.subgroups()
    columns = [METHOD, SITE, Column("column", "column", "text"), Column("value", "subgroup", "text"), *_class_column(rows),
        Column("samples", "samples", "count"), Column("events", "events", "count"),
        Column("observed", "observed", decimals=2), Column("expected", "expected", decimals=2),
        Column("in_the_large", "in the large", "difference", decimals=2), Column("brier", "Brier"),
        Column("auroc", "AUROC")]  # fmt: skip
    note = (
        f"Subgroups of fewer than {MIN_SAMPLES} test samples have no scores. None is compared with another by a test."
    )
    caption = "Subgroups at sites never seen, means over seeds"
    return context.table("external-subgroups", caption, columns, rows, [note], seeds=False) if rows else None


def _class_column(rows: Sequence[Row]) -> list[Column]:
    return [Column("class", "class", "text")] if len({row["class"] for row in rows}) > 1 else []


def _limits(context: Context) -> Prose:
    lines = context.study.external()
    sizes = [row["samples"] for row in lines if row["samples"]]
    few = f" The smallest has {min(sizes)} test samples." if sizes else ""
    return Prose(
        [
            f"{len({row['site'] for row in lines})} sites were held out, and they are not a sample of sites: a range says "
            f"what happened at these, not what to expect of the next.{few} Curves and slopes of less than about 200 events "
            "are uncertain (Collins et al. 2016).",
            "A held-out site is scored on its test samples only, so that both columns are of the same patients; its other "
            "samples are unused. Where each site scales its features by its own samples, so did this one, without labels; "
            "where sites agreed on statistics, it has those of the others.",
            "As a member a site deploys the model that it has chosen or fine-tuned on its own data; never seen, it gets the "
            "server's as it is. The difference is of both: of having trained, and of having chosen.",
        ],
        title="Limits",
    )  # fmt: skip

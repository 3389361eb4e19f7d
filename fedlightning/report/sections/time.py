"""Section about virtual time: scores against the clock, who was busy when, how stale updates were."""

from __future__ import annotations

from functools import partial

from fedlightning.report.cells import Column, counted, is_number, summary
from fedlightning.report.context import METHOD, SEEDS, Context
from fedlightning.report.figures.curves import curves
from fedlightning.report.html import Gallery, Section
from fedlightning.report.sections.training import STAGES, lines_of
from fedlightning.run.job_timeline import timeline_figure
from fedlightning.study.arrivals import steps_of, trips_of
from fedlightning.study.columns import LOCAL


def time(context: Context) -> Section | None:
    """Show validation scores against virtual seconds, and a timeline of each method."""
    rows = context.study.timeline()
    if not rows:
        return None
    columns = [
        METHOD,
        Column("time", "in all", "amount", group="virtual seconds"),
        Column("round_time", "a round", "amount", group="virtual seconds"),
        counted("arrivals", "arrivals", rows),
        Column("left_out", "left out", "percent", help="came too late, too stale, or failed"),
        Column("staleness", "mean", decimals=2, group="staleness", help="steps of the server since the message"),
        Column("most_stale", "largest", "count", group="staleness"),
        Column("busy", "busy", "percent", help="of the run, mean over clients that ever were at work"),
        SEEDS,
    ]
    table = context.table("time", "The runs on their virtual clocks", columns, rows)
    return context.section(
        "time",
        "What happened when",
        "Time",
        [table, _curve(context), _timelines(context, [row["method"] for row in rows])],
        "Seconds are those of a virtual clock, of the devices' models and not of this machine.",
    )


def _curve(context: Context) -> Gallery | None:
    timed = [row for row in context.study.curves() if row["data"] == LOCAL and is_number(row.get("time"))]
    stage = next((stage for stage in ("L1", "G", "L2") if any(row["stage"] == stage for row in timed)), "")
    rows = [row for row in timed if row["stage"] == stage]
    lines = lines_of(context, rows, "time")
    if not any(len(points) > 1 for points in lines.values()):
        return None
    words = f"validation {context.metric}"
    picture = context.picture(
        "time-curve",
        f"Validation {context.metric} against virtual seconds ({STAGES[stage]})",
        f"Lines: {words} against virtual seconds; at the end "
        + summary([(method, points[-1][1]) for method, points in lines.items()]),
        partial(curves, lines, context.styles, "virtual seconds", words, runs={} if context.few_seeds else None),
    )
    columns = [
        METHOD,
        Column("round", "round", "count"),
        Column("time", "virtual seconds", "amount"),
        Column("mean", "mean", decimals=4, radius="ci95_radius"),
    ]
    return context.gallery(
        [picture], context.table("time-curve", f"Validation {context.metric} by virtual time", columns, rows)
    )


def _timelines(context: Context, methods: list[str]) -> Gallery | None:
    pictures, several = [], len(context.study.data.seeds) > 1
    columns = [METHOD, Column("round", "round", "count"), Column("time", "virtual seconds", "amount")]
    rows = []
    for method in methods:
        seed = next(
            s for s in context.study.data.seeds_of(method) if trips_of(context.study.data.finished[method, s].run)
        )
        run = context.study.data.finished[method, seed].run
        trips, steps = trips_of(run), steps_of(run)
        rows += [{"method": method, "round": number, "time": end} for number, end in steps.items()]
        pictures.append(
            context.picture(
                f"timeline-{context.slugs[method]}",
                method + (f", seed {seed}" if several else ""),
                f"Bars: when each client was at work, over {max(steps.values()):.4g} virtual seconds and {len(trips)} "
                "visits; points below: the staleness of each update as it came.",
                partial(timeline_figure, trips, steps),
            )
        )
    reading = "Dark: download and computing; pale: upload; taken: used by the server. Lines: steps of the server."
    table = context.table("timeline", "Steps of the server" + (" at the first seed" if several else ""), columns, rows)
    return context.gallery(pictures, table, reading)

"""Sections about the setting: samples of each client, and how everything was made."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from fedlightning.errors import count_of
from fedlightning.report.cells import Column, number
from fedlightning.report.context import METHOD, Context
from fedlightning.report.figures.partition_bars import partition_bars
from fedlightning.report.html import Prose, Section
from fedlightning.study.crossing import setting
from fedlightning.study.differences import variances
from fedlightning.study.finished_runs import Run
from fedlightning.study.score_tables import class_names

_FILE = resources.files("fedlightning.report") / "definitions.toml"
DEFINITIONS = tuple(tomllib.loads(_FILE.read_text("utf-8")).items())
"""Terms of the report and what they mean, in one line each."""


def partition(context: Context) -> Section | None:
    """Show the training samples of each class at each client."""
    samples = context.study.partition()
    rows = [row for row in samples if row["split"] == "train"]
    if not rows:
        return None
    sizes = {(row["client"], row["split"]): row["samples"] for row in samples}
    count = len(rows[0]["classes"] or ())
    by_class = count > 1 and all(len(row["classes"] or ()) == count for row in rows)
    class_labels = class_names(context.study.data)
    names = class_labels if len(class_labels) == count else [str(index) for index in range(count)]
    names = names if by_class else ["samples"]
    counts = np.array([row["classes"] if by_class else [row["samples"]] for row in rows], dtype=np.int64)
    clients = [str(row["client"]) for row in rows]
    sample_sizes, distances = counts.sum(axis=1), total_variation(counts)
    lines = [
        {
            "client": client,
            "train": int(row.sum()),
            "val": sizes.get((client, "val")),
            "test": sizes.get((client, "test")),
        }
        | (
            {"tv": float(tv)} | {f"class {name}": int(n) for name, n in zip(names, row, strict=True)}
            if by_class
            else {}
        )
        for client, row, tv in zip(clients, counts, distances, strict=True)
    ]
    columns = [Column("client", "client", "text")]
    columns += [Column(split, split, "count", group="samples") for split in ("train", "val", "test")]
    columns += [Column("tv", "distance", decimals=2, help="total variation distance to the labels of all clients")]
    columns += [Column(f"class {name}", name, "count", group="training samples of class") for name in names if by_class]
    least, most = sample_sizes.min(), sample_sizes.max()
    caption = f"{count_of(clients, 'client')} with {least if least == most else f'{least} to {most}'} training samples"
    if by_class:
        mean_distance = distances[sample_sizes > 0].mean() if sample_sizes.any() else np.nan
        caption += f" of {count} classes; mean total variation distance to the labels of all {mean_distance:.2f}"
    picture = context.picture(
        "partition",
        "Training samples by client",
        f"Bars: {caption}.",
        lambda: partition_bars(clients, counts.tolist(), names),
    )
    table = context.table("partition", "Samples of each client", columns, lines, seeds=False)
    return context.section("partition", "Who holds what", "Data", [context.gallery([picture], table, f"{caption}.")])


def total_variation(counts: np.ndarray) -> np.ndarray:
    """Return the distance of each client's labels to those of all, as `PartitionReport` does.

    That one comes with the data modules and so with Lightning, whose import takes longer than most reports.

    Args:
        counts: Samples of each class, of shape `(clients, classes)`.

    Returns:
        Shape `(clients,)`; NaN for a client without samples.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = counts / counts.sum(axis=1, keepdims=True)
    return np.asarray(np.abs(shares - counts.sum(axis=0) / max(1, counts.sum())).sum(axis=1) / 2)


def variance(context: Context) -> Section | None:
    """Show where the variance of each method's score comes from, of crossed seeds."""
    rows = variances(context.study.data)
    columns = [
        METHOD,
        Column("source", "source", "text"),
        Column("std", "standard deviation", decimals=4, help="of the mean score, by this source alone"),
        Column("share", "of the variance", "percent"),
    ]
    caption = f"Variance of mean test {context.metric} by source"
    lead = "Seeds are crossed: every value of a source is run with every value of the others. Few values say little."
    table = [context.table("variance", caption, columns, rows)] if rows else []
    return context.section("variance", "Where the variance comes from", "Variance", table, lead)


def made(context: Context, about: Mapping[str, Any]) -> Section | None:
    """Show command, versions, seeds, step budgets, and the meaning of each number."""
    done = [run for run in context.study.data.runs if run.summary]
    options: dict[str, str] = {}
    for run in done:
        options.setdefault(run.name, _callbacks(run.summary.get("callbacks", {})))
    parts = [
        Prose(terms=[(term, text) for term, text in _facts(context, about, done) if text], title="The runs"),
        Prose(terms=[(name, text) for name, text in options.items() if text], title="The methods’ options"),
        Prose(terms=DEFINITIONS, title="The numbers"),
    ]
    return context.section(
        "made", "How this was made, and what each number means", "Method", [p for p in parts if p.terms]
    )


def _facts(context: Context, about: Mapping[str, Any], done: Sequence[Run]) -> list[tuple[str, str]]:
    data = [run.summary["data"] for run in done if "data" in run.summary]
    budgets = {run.name: run.summary.get("local_steps_total") for run in done}
    steps = {name: number(count, 0) for name, count in budgets.items() if count is not None}
    same = set(steps.values())
    varied = ", ".join(setting(key, 0)[0] for key in about.get("vary") or ())
    varies = f" Set by the seed: {varied}." if varied else ""
    return [
        ("command", str(about.get("command") or "")),
        (
            "data",
            _distinct(f"{entry.get('module', '')}, {entry.get('partition', '')}" for entry in data),
        ),
        ("seeds", context.study.data.seed_text + varies),
        ("scored", _distinct(_scored(run.summary.get("evaluation", {})) for run in done)),
        ("time", "; ".join(f"{run.name}, seed {run.seed}: {text}" for run in done if (text := _time(run.summary)))),
        ("checkpoint rule", context.study.data.checkpoint),
        ("rounds", _distinct(str(run.summary["rounds"]) for run in done if "rounds" in run.summary)),
        ("ended early", "; ".join(_stopped(run) for run in done if run.summary.get("stopped"))),
        (
            "step budget",
            f"{same.pop()} local steps in a run of every method"
            if len(same) == 1
            else "local steps in a run: " + ", ".join(f"{name} {count}" for name, count in steps.items())
            if steps
            else "",
        ),
        ("model", _distinct(str(run.summary.get("model", "")) for run in done)),
        (
            "versions",
            _distinct(", ".join(f"{k} {v}" for k, v in run.summary.get("versions", {}).items()) for run in done),
        ),
    ]


def _stopped(run: Run) -> str:
    stop = run.summary["stopped"]
    return f"{run.name}, seed {run.seed}: after round {stop['round']}, by {stop['by']}: {stop['reason']}"


def _scored(counts: Mapping[str, Any]) -> str:
    """Return how many clients were scored, where that is not all."""
    count, total = counts.get("clients"), counts.get("of")
    if (before := counts.get("in_training")) is not None:
        training = f"{before['clients']} in training and at stage L2"
        return f"{count} of {total} clients on test data, {training} (evaluation.clients)"
    return "" if count == total else f"{count} of {total} clients, the same in every round (evaluation.clients)"


def _time(summary: Mapping[str, Any]) -> str:
    """Return how much of a run's time its evaluation took."""
    spent, whole = summary.get("evaluation_seconds"), summary.get("seconds")
    return "" if not spent or not whole else f"{whole:.0f} s, of which evaluation took {spent:.0f} s"


def _callbacks(options_by_callback: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items() if value is not None)})"
        for name, options in options_by_callback.items()
    )


def _distinct(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(text for text in texts if text))

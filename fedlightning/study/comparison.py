"""Comparison of runs of this session, without their folders: a table on the terminal, a figure per client, files.

For runs on disk, several seeds and a report, see :class:`fedlightning.study.study.Study` and `fedlightning compare`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedlightning.compat.rich_tables import print_whole
from fedlightning.study.columns import GLOBAL, POOLED, interval_text
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import Run
from fedlightning.study.run_scores import SeedScore, estimate
from fedlightning.study.study import Study


class Comparison:
    """A comparison of runs on the same data, made from their summaries.

    The compared models are fixed before test data are seen: each client's `best_local` checkpoint if there is one, else
    its latest model (stage L1). The global model is `best_global`, else the latest (stage G).

    Args:
        metric: Score to compare, with or without its `test_` prefix.
        split: `"test"` or `"val"`.

    Example:
        >>> from fedlightning.scores.metric_names import summarise
        >>> from fedlightning.scores.rows import Row
        >>> comparison = Comparison()
        >>> for name, accuracies in {"Local": (0.5, 0.7), "APFL": (0.7, 0.9)}.items():
        ...     rows = [Row(5, "L1", "personal", "latest", "local", "test", f"client{i}", "test_accuracy", value, 10)
        ...             for i, value in enumerate(accuracies)]
        ...     comparison.add(name, {"results": summarise(rows)})
        >>> [(line["method"], line["mean"], line["best"]) for line in comparison.study.overview()]
        [('Local', 0.6, False), ('APFL', 0.8, True)]
    """

    def __init__(self, metric: str = "accuracy", split: str = "test") -> None:
        self.metric = metric
        self.split = split
        self.runs: list[Run] = []

    def add(self, name: str, summary: Mapping[str, Any]) -> None:
        """Add a run. Runs with the same name and different seeds are averaged."""
        self.runs.append(Run(name, int(summary.get("seed", 0)), None, dict(summary)))

    @property
    def study(self) -> Study:
        """The runs so far as a :class:`~fedlightning.study.study.Study`, with every table and statistic."""
        return Study(self.runs, metric=self.metric, split=self.split)

    def table(self) -> Table:
        """Return the comparison as a table, with the best value of each column in bold."""
        study = self.study
        many = len(study.data.seeds) > 1
        table = Table(
            title=f"{self.split} {study.data.metric}: mean and 95 % interval over {'seeds' if many else 'clients'}",
            title_justify="left",
        )
        for column in ("method", "deployed", "worst client", "on others' data", "global model", "MB sent", "s"):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        rows = study.overview()
        better = max if study.data.higher_is_better else min
        shown = {}
        for key in ("mean", "worst", POOLED, GLOBAL):
            scores = [row[key] for row in rows if row[key] is not None]
            shown[key] = [_cell(row[key], bool(scores) and row[key] == better(scores)) for row in rows]
        interval = partial(_interval, None if many else study.data.metric)
        for i, row in enumerate(rows):
            name = row["method"]
            table.add_row(
                name,
                shown["mean"][i] + interval(row["mean"], row["ci95"], study.data.deployed(name)),
                shown["worst"][i],
                shown[POOLED][i] + interval(row[POOLED], row[f"{POOLED}_ci95"], study.data.deployed(name, data=POOLED)),
                shown[GLOBAL][i] + interval(row[GLOBAL], row[f"{GLOBAL}_ci95"], study.data.shared(name)),
                _number(row["mb_total"], 1),
                _number(row["seconds"], 0),
            )
        return table

    def print(self) -> None:
        """Print the table, the meaning of its columns, and the problems of the runs."""
        console = Console(width=None if Console().is_terminal else 100)
        print_whole(console, self.table())
        console.print(
            "deployed: the model each client would use, selected on its own validation data (best_local), on its own "
            "test data.\non others' data: the same models on the union of all clients' test data. MB sent: up and down, "
            "all rounds.",
            highlight=False,
        )
        for problem in self.study.problems:
            if problem.kind not in _EXPECTED:
                console.print(f"[yellow]{problem.text}[/]", highlight=False)

    def write(self, path: Path) -> None:
        """Write `comparison.json` and `comparison.csv` into a folder; see
        :func:`fedlightning.study.comparison_files.write_comparison`.
        """
        write_comparison(self.study, path)

    def plot_clients(self, path: Path) -> None:
        """Draw one panel per run: the score of each client's deployed model on its own data, against the first run's."""
        import matplotlib.pyplot as plt

        study = self.study
        rows = study.clients()
        scores = {name: {r["client"]: r["score"] for r in rows if r["method"] == name} for name in study.data.methods}
        scores = {name: row for name, row in scores.items() if any(value is not None for value in row.values())}
        means = {row["method"]: row["mean"] for row in study.overview()}
        columns = min(4, len(scores))
        lines = -(-len(scores) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(3.1 * columns, 2.4 * lines), sharey=True, squeeze=False, layout="constrained"
        )
        first = next(iter(scores))
        for axis in axes.flat[len(scores) :]:
            axis.axis("off")
        for (name, row), axis in zip(scores.items(), axes.flat, strict=False):
            places = range(len(row))
            axis.bar(
                places,
                [math.nan if v is None else v for v in row.values()],
                color=_GREY if name == first else _BLUE,
            )
            if name != first:
                reference = [math.nan if (v := scores[first].get(client)) is None else v for client in row]
                axis.scatter(places, reference, marker="_", s=90, color=_RED, label=first, zorder=3)
                axis.legend(loc="lower right", fontsize=7)
            axis.set_title(f"{name}: {_number(means[name], 3)}", fontsize=10)
            axis.set_xticks(places, list(row), fontsize=7)
            axis.grid(axis="y", alpha=0.3)
        highest = max((v for row in scores.values() for v in row.values() if v is not None), default=1.0)
        if highest <= 1:
            axes.flat[0].set_ylim(0, 1.02)
        figure.supxlabel("client")
        figure.supylabel(f"{self.split} {study.data.metric}")
        figure.savefig(path, dpi=150)
        plt.close(figure)


_BLUE, _GREY, _RED = "#4477aa", "#999999", "#cc3311"
_EXPECTED = ("single_seed", "no_baseline", "uncomparable_baseline")
"""Kinds of problems that change no number of the table."""


def _cell(value: float | None, best: bool) -> str:
    return f"[bold]{_number(value, 3)}[/]" if best else _number(value, 3)


def _interval(
    metric: str | None, mean: float | None, over_seeds: list[float] | None, scores: Mapping[int, SeedScore]
) -> str:
    """Return the 95 % interval over seeds; with a metric, of the one seed there is, over the clients."""
    if mean is None or metric is None:
        return "" if mean is None else interval_text(mean, over_seeds)
    values = [value for score in scores.values() if score.sound for value in score.defined.values()]
    return interval_text(mean, estimate(values, metric=metric).ci95)


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"

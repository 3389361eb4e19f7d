"""Several runs side by side: one table for a person, one JSON for a machine, one figure per client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]


class Comparison:
    """Collects the summaries of runs on the same data.

    What a table shows of each run is fixed before looking at test data: the deployed model is each client's
    ``best_local`` checkpoint where there is one, else the latest (stage L1); the global model is ``best_global``, else
    the latest (stage G).

    Args:
        metric: the score to compare, with or without its ``test_`` prefix.
        split: ``"test"`` or ``"val"``.
    """

    def __init__(self, metric: str = "accuracy", split: str = "test") -> None:
        self.metric = metric
        self.split = split
        self.summaries: dict[str, Mapping[str, Any]] = {}

    def add(self, name: str, summary: Mapping[str, Any]) -> None:
        """Add a run.

        Args:
            name: its name in the table.
            summary: what ``summary.json`` holds.

        Raises:
            ValueError: if it was run on other clients or sizes than the ones before.
        """
        for other, seen in self.summaries.items():
            if seen["num_samples"] != summary["num_samples"]:
                raise ValueError(
                    f"'{name}' and '{other}' were run on different splits of the data, so their scores cannot be compared. "
                    "Use the same data module, partition and seed."
                )
        self.summaries[name] = summary

    def find(self, name: str, model: str, data: str = "local") -> Row | None:
        """The row of one run: ``model`` "personal" | "global" on ``data`` "local" | "pooled"."""
        stage, best = ("L1", "best_local") if model == "personal" else ("G", "best_global")
        rows = [
            row
            for row in self.summaries[name]["results"]
            if row["model"] == model
            and row["data"] == data
            and row["split"] == self.split
            and row["metric"] in (self.metric, f"{self.split}_{self.metric}")
        ]
        for checkpoint, wanted in ((best, None), ("latest", stage)):
            for row in rows:
                if row["checkpoint"] == checkpoint and wanted in (None, row["stage"]):
                    return row
        return None

    def table(self) -> Table:
        """The comparison as a table: the best of each column is bold."""
        table = Table(title=f"{self.split} {self.metric}, mean over clients ± standard deviation", title_justify="left")
        for column in ("method", "deployed", "worst client", "on others' data", "global model", "MB sent", "s"):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        cells: list[list[tuple[str, float | None]]] = []
        for name, summary in self.summaries.items():
            personal, pooled, shared = (
                self.find(name, "personal"),
                self.find(name, "personal", "pooled"),
                self.find(name, "global"),
            )
            worst = (
                min((v for v in personal["per_client"].values() if v is not None), default=None) if personal else None
            )
            cells.append(
                [
                    (_score(personal), personal["mean"] if personal else None),
                    ("-" if worst is None else f"{worst:.3f}", worst),
                    (_score(pooled, spread=False), pooled["mean"] if pooled else None),
                    (_score(shared), shared["mean"] if shared else None),
                    (f"{(summary['bytes_up'] + summary['bytes_down']) / 1e6:.1f}", None),
                    (f"{summary['seconds']:.0f}", None),
                ]
            )
        columns = list(zip(*cells, strict=True))
        best = [max((value for _, value in column if value is not None), default=None) for column in columns]
        for name, line in zip(self.summaries, cells, strict=True):
            shown = [f"[bold]{t}[/]" if v is not None and v == b else t for (t, v), b in zip(line, best, strict=True)]
            table.add_row(name, *shown)
        return table

    def print(self) -> None:
        """Print the table, and what its columns mean."""
        console = Console(width=None if Console().is_terminal else 100)
        console.print(self.table())
        console.print(
            "deployed: the model each client would use, selected on its own validation data (best_local), on its own "
            "test data.\non others' data: the same models on the union of all clients' test data. MB sent: up and down, "
            "all rounds.",
            highlight=False,
        )

    def write(self, path: Path) -> None:
        """Write every row of every run as JSON: ``{"results": [...]}``."""
        rows = [{"run": name, **row} for name, summary in self.summaries.items() for row in summary["results"]]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"results": rows}, indent=1))

    def plot_clients(self, path: Path) -> None:
        """One panel per run: every client's deployed model on its own test data, against the first run's."""
        import matplotlib.pyplot as plt

        names = [name for name in self.summaries if self.find(name, "personal") is not None]
        columns = min(4, len(names))
        lines = -(-len(names) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(3.1 * columns, 2.4 * lines), sharey=True, squeeze=False, layout="constrained"
        )
        reference = self.find(names[0], "personal")
        assert reference is not None
        for axis in axes.flat[len(names) :]:
            axis.axis("off")
        for name, axis in zip(names, axes.flat, strict=False):
            row = self.find(name, "personal")
            assert row is not None
            clients = list(row["per_client"])
            values = [row["per_client"][client] or 0.0 for client in clients]
            axis.bar(range(len(clients)), values, color="#4477aa" if name != names[0] else "#999999")
            if name != names[0]:
                marks = [reference["per_client"].get(client) for client in clients]
                axis.scatter(range(len(clients)), marks, marker="_", s=90, color="#cc3311", label=names[0], zorder=3)
                axis.legend(loc="lower right", fontsize=7)
            axis.set_title(f"{name}: {row['mean']:.3f}", fontsize=10)
            axis.set_xticks(range(len(clients)), clients, fontsize=7)
            axis.set_ylim(0, 1.02)
            axis.grid(axis="y", alpha=0.3)
        figure.supxlabel("client")
        figure.supylabel(f"{self.split} {self.metric}")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _score(row: Row | None, spread: bool = True) -> str:
    if row is None or row["mean"] is None:
        return "-"
    return f"{row['mean']:.3f} ± {row['std']:.3f}" if spread else f"{row['mean']:.3f}"

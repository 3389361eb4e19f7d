"""Finished runs, read back from their folders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fedlightning.scoring.metrics import bare
from fedlightning.scoring.results import Row, read_rows

STUDY_FILE = "study.json"
DEPLOYED = "deployed"
"""The checkpoint rule that is fixed before anybody looks at test data; see :meth:`Run.scores`."""
_BEST = {"personal": ("best_local", "L1"), "global": ("best_global", "G")}

Scores = dict[str, float | None]
"""One score a client; ``None`` where it is not defined."""


@dataclass(frozen=True)
class Run:
    """One run: a method with one seed.

    Attributes:
        name: the method's label; seed: the run's seed; path: its folder.
        summary: ``summary.json``, empty where there is none; rows: ``metrics.csv``; config: ``config.yaml``.
        error: why there is no result, ``None`` for a finished run.
        baseline: whether ``compare`` added it of its own accord.
    """

    name: str
    seed: int
    path: Path
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list, repr=False)
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    error: str | None = None
    baseline: bool = False

    @cached_property
    def clients(self) -> list[str]:
        """Client ids in the run's order."""
        return list(self.summary.get("num_samples", {}))

    @property
    def results(self) -> list[dict[str, Any]]:
        """Rows of ``summary.json``."""
        return list(self.summary.get("results", []))

    def result(
        self,
        metric: str,
        split: str = "test",
        model: str = "personal",
        checkpoint: str = DEPLOYED,
        stage: str | None = None,
        data: str = "local",
    ) -> dict[str, Any] | None:
        """One row of ``summary.json``; ``None`` where the run has none.

        Args:
            metric: with or without the split's prefix.
            split: ``"test"`` or ``"val"``; data: ``"local"``, ``"pooled"`` or ``"client:NAME"``.
            model: ``"personal"`` or ``"global"``.
            checkpoint: a checkpoint's name, or ``"deployed"``: the model selected on validation data (``best_local``
                for personal models, ``best_global`` for the global one) if the run has one, else the latest as
                received (L1) or after aggregation (G).
            stage: ``"G"``, ``"L1"`` or ``"L2"``; default: L1 and G for latest models, any for selected ones.
        """
        best, latest_stage = _BEST[model]
        found = [
            row
            for row in self.results
            if (row["model"], row["data"], row["split"]) == (model, data, split) and bare(row["metric"]) == bare(metric)
        ]
        for name in (best, "latest") if checkpoint == DEPLOYED else (checkpoint,):
            wanted = stage or (latest_stage if name == "latest" else None)
            for row in found:
                if row["checkpoint"] == name and wanted in (None, row["stage"]):
                    return row
        return None

    def scores(self, metric: str, **where: Any) -> Scores | None:
        """Each client's score: ``per_client`` of :meth:`result`, whose arguments it takes."""
        row = self.result(metric, **where)
        return None if row is None else dict(row["per_client"])


def load_run(path: str | Path, name: str | None = None, error: str | None = None, baseline: bool = False) -> Run:
    """Read a run's folder.

    Args:
        path: the run's folder.
        name: the method's label; default: the folder above it, which is the run's name.
        error, baseline: see :class:`Run`.

    Raises:
        FileNotFoundError: if it is no run's folder; the sentence says what is missing.
    """
    folder = Path(path)
    summary_file, config_file = folder / "summary.json", folder / "config.yaml"
    if not summary_file.exists() and error is None:
        raise FileNotFoundError(
            f"{folder} has no summary.json, so it is not a finished run. Give a run's folder, as in "
            "runs/quickstart/version_0, or the --out folder of a compare."
        )
    summary = json.loads(summary_file.read_text()) if summary_file.exists() else {}
    config = yaml.safe_load(config_file.read_text()) if config_file.exists() else {}
    return Run(
        name=name or folder.resolve().parent.name,
        seed=int(summary.get("seed", 0)),
        path=folder,
        summary=summary,
        rows=read_rows(folder / "metrics.csv"),
        config=config or {},
        error=error,
        baseline=baseline,
    )


def load_study(paths: Iterable[str | Path]) -> list[Run]:
    """The runs of run folders and of the folders that ``compare`` leaves, in order.

    A run that ``compare`` lists and that failed or has not been made is there with its ``error``.

    Raises:
        FileNotFoundError: for a folder that is neither.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        runs += _runs_of(path) if (path / STUDY_FILE).exists() else [load_run(path)]
    return runs


def _runs_of(folder: Path) -> list[Run]:
    study = json.loads((folder / STUDY_FILE).read_text())
    added = {method["name"] for method in study["methods"] if method.get("baseline")}
    runs = []
    for entry in study["runs"]:
        done = entry["state"] == "done"
        error = None if done else entry.get("error") or "This run has not been made."
        path = folder / entry["folder"]
        if done and not (path / "summary.json").exists():
            error = f"Its folder {path} has no summary.json any more."
        run = load_run(path, entry["run"], error, entry["run"] in added)
        runs.append(replace(run, seed=int(entry["seed"])))
    return runs

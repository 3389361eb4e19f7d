"""Runs, read back from their folders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlightning.run.files import read_mapping
from fedlightning.scoring.metrics import bare
from fedlightning.scoring.results import Row, read_rows
from fedlightning.study.columns import GLOBAL, LOCAL, PERSONAL

STUDY_FILE = "study.json"
DEPLOYED = "deployed"
"""Checkpoint rule that is fixed before test data are seen; see :meth:`Run.result`."""
_BEST = {PERSONAL: ("best_local", "L1"), GLOBAL: ("best_global", "G")}

Scores = dict[str, float | None]
"""Client -> score, `None` if it is not defined."""


@dataclass(frozen=True)
class Run:
    """One run: a method with one seed.

    Attributes:
        name: Label of the method.
        seed: Seed of the run.
        path: Folder of the run.
        summary: Content of `summary.json`, empty if there is none.
        rows: Rows of `metrics.csv`.
        config: Content of `config.yaml`.
        error: Reason why there is no result, `None` for a finished run.
        baseline: Whether `compare` added it as a baseline.
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
        """Client ids, in the order of the run."""
        return list(self.summary.get("num_samples", {}))

    @property
    def results(self) -> list[dict[str, Any]]:
        """Rows of `summary.json`."""
        return list(self.summary.get("results", []))

    def result(
        self,
        metric: str,
        split: str = "test",
        model: str = PERSONAL,
        checkpoint: str = DEPLOYED,
        stage: str | None = None,
        data: str = LOCAL,
    ) -> dict[str, Any] | None:
        """Return one row of `summary.json`, or `None` if the run has none.

        Args:
            metric: Name of the metric, with or without the prefix of its split.
            split: `"test"` or `"val"`.
            model: `"personal"` or `"global"`.
            checkpoint: Name of a checkpoint, or `"deployed"`: the model selected on validation data (`best_local` for
                personal models, `best_global` for the global one) if the run has one, else the latest as received (L1)
                or after aggregation (G).
            stage: `"G"`, `"L1"` or `"L2"`. `None` takes L1 or G for latest models, and any stage for selected ones.
            data: `"local"`, `"pooled"` or `"client:NAME"`.
        """
        best, latest_stage = _BEST[model]
        found = [
            row
            for row in self.results
            if (row["model"], row["data"], row["split"]) == (model, data, split) and bare(row["metric"]) == bare(metric)
        ]
        for name in (best, "latest") if checkpoint == DEPLOYED else (checkpoint,):
            only = stage or (latest_stage if name == "latest" else None)
            for row in found:
                if row["checkpoint"] == name and only in (None, row["stage"]):
                    return row
        return None

    def scores(self, metric: str, **where: Any) -> Scores | None:
        """Return `per_client` of the row that :meth:`result` returns; it takes the same arguments."""
        row = self.result(metric, **where)
        return None if row is None else dict(row["per_client"])


def load_run(path: str | Path, name: str | None = None, error: str | None = None, baseline: bool = False) -> Run:
    """Read the folder of a run.

    Args:
        path: Folder of the run.
        name: Label of the method. `None` takes the name of the folder above, which is the name of the run.
        error: Reason why the run has no result, if it has none.
        baseline: Whether `compare` added the run as a baseline.

    Raises:
        FileNotFoundError: If it is no folder of a run; the sentence says what is missing.
    """
    folder = Path(path)
    summary_file, config_file = folder / "summary.json", folder / "config.yaml"
    if not summary_file.exists() and error is None:
        raise FileNotFoundError(
            f"{folder} has no summary.json, so it is not a finished run. Give a run's folder, as in "
            "runs/quickstart/version_0, or the --out folder of a compare."
        )
    summary = read_mapping(summary_file) if summary_file.exists() else {}
    config = read_mapping(config_file) if config_file.exists() else {}
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
    """Read the runs of run folders and of `compare` folders, in order.

    A run that `compare` lists but that failed, or was not made yet, is included with its `error`.

    Args:
        paths: Folders of runs, and `--out` folders of `compare`.

    Raises:
        FileNotFoundError: If a folder is neither.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        runs += _runs_of(path) if (path / STUDY_FILE).exists() else [load_run(path)]
    return runs


def _runs_of(folder: Path) -> list[Run]:
    study = read_mapping(folder / STUDY_FILE)
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

"""Runs, read back from their folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fedlightning.resume.manifest import is_file_name
from fedlightning.scores.metric_names import bare
from fedlightning.scores.rows import Row, read_rows
from fedlightning.storage.files import UnreadableError, read_json
from fedlightning.study.columns import GLOBAL, LOCAL, PERSONAL, UNSEEN
from fedlightning.study.target_units import target_of

STUDY_FILE, SUMMARY_FILE = "study.json", "summary.json"
DEPLOYED = "deployed"
"""Checkpoint rule that is fixed before test data are seen; see :meth:`Run.result`."""
_BEST = {PERSONAL: ("best_local", "L1"), GLOBAL: ("best_global", "G"), UNSEEN: ("latest", "L1")}

Scores = dict[str, float | None]
"""Client -> score, `None` if it is not defined."""


@dataclass(frozen=True)
class Run:
    """One run: a method with one seed.

    Attributes:
        name: Label of the method.
        seed: Seed of the run.
        path: Folder of the run; `None` for a run of this session whose folder is not read.
        summary: Content of `summary.json`, empty if there is none.
        rows: Rows of `metrics.csv`.
        config: Content of `config.yaml`.
        error: Reason why there is no result, `None` for a finished run.
        baseline: Whether `compare` added it as a baseline.
        site: The client that was held out, of a run of leave-one-site-out; `None` for an ordinary run.
        cell: Row and column of its method in a grid; `None`: it is of none.
        vary: Keys that the seed sets, as `compare` writes them.
    """

    name: str
    seed: int
    path: Path | None
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list, repr=False)
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    error: str | None = None
    baseline: bool = False
    site: str | None = None
    cell: tuple[str, str] | None = None
    vary: tuple[str, ...] = ()

    @cached_property
    def clients(self) -> list[str]:
        """Client ids, by the numbers in them."""
        return sorted(self.summary.get("num_samples", {}), key=natural)

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

        For :data:`DEPLOYED`, clients that have selected no model have their latest one in it.
        """
        best, latest_stage = _BEST[model]
        rows = [
            row
            for row in self.results
            if (row["model"], row["data"], row["split"]) == (model, data, split) and bare(row["metric"]) == bare(metric)
        ]
        chosen = []
        for name in (best, "latest") if checkpoint == DEPLOYED else (checkpoint,):
            only = stage or (latest_stage if name == "latest" else None)
            chosen += [row for row in rows if row["checkpoint"] == name and only in (None, row["stage"])][:1]
        return self._filled(*chosen, split=split) if chosen and data == LOCAL else next(iter(chosen), None)

    def _filled(self, row: dict[str, Any], latest: dict[str, Any] | None = None, *, split: str) -> dict[str, Any]:
        """Return a row of selected models in which clients that selected none have their latest model, as they deploy it."""
        selected = row["per_client"]
        if latest is None or set(latest["per_client"]) <= set(selected):
            return row
        scores: Scores = {**latest["per_client"], **selected}
        sizes = self.summary.get("data", {}).get("clients", {})
        weights = {client: sizes.get(client, {}).get(split) for client, score in scores.items() if score is not None}
        total = None if None in weights.values() else sum(weights.values())
        mean = sum(weights[client] * scores[client] for client in weights) / total if total else None
        return {**row, "per_client": scores, "weighted_mean": mean}

    def scores(self, metric: str, **where: Any) -> Scores | None:
        """Return `per_client` of the row that :meth:`result` returns; it takes the same arguments."""
        row = self.result(metric, **where)
        return None if row is None else dict(row["per_client"])


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them.

    Example:
        >>> sorted(["client 10", "client 9"], key=natural)
        ['client 9', 'client 10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def load_run(path: str | Path, name: str | None = None, error: str | None = None, baseline: bool = False) -> Run:
    """Read the folder of a run. Errors of a regression are in the units of its target."""
    folder = Path(path)
    summary_file = folder / SUMMARY_FILE
    if not summary_file.exists() and error is None:
        raise FileNotFoundError(
            f"{folder} has no summary.json, so it is not a finished run. Give a run's folder, as in "
            "runs/quickstart/version_0, the folder of several, or the --out folder of a compare."
        )
    summary = _named_values(summary_file, read_json) if summary_file.exists() else {}
    fault = _fault_of_summary(summary)
    if fault is not None:
        raise UnreadableError(f"{summary_file} is not a summary of a run: {fault}.")
    config = read_config(folder)
    target = target_of(config)
    if "results" in summary:
        summary["results"] = target.results(summary["results"])
    return Run(
        name=name or folder.resolve().parent.name,
        seed=int(summary.get("seed", 0)),
        path=folder,
        summary=summary,
        rows=target.rows(read_rows(folder / "metrics.csv")),
        config=config,
        error=error,
        baseline=baseline,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return what is in the `config.yaml` of a run; nothing where there is none."""
    file = folder / "config.yaml"
    return _named_values(file, _read_yaml) if file.exists() else {}


def load_study(paths: Iterable[str | Path]) -> list[Run]:
    """Read the runs of run folders, of folders of runs, and of `compare` folders, in order.

    A run that `compare` lists but that failed, or was not made yet, is included with its `error`.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        runs += _runs_of(path) if (path / STUDY_FILE).exists() else map(load_run, runs_below(path) or [path])
    return runs


def runs_below(path: Path) -> list[Path]:
    """Return the finished runs below a folder that is none itself: `VERSION` or `NAME/VERSION`, the oldest first.

    Several of a name and seed are all there, and a study takes the newest.
    """
    if (path / SUMMARY_FILE).exists():
        return []
    files = [file for depth in ("*", "*/*") for file in path.glob(f"{depth}/{SUMMARY_FILE}")]
    return [file.parent for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file))]


def _runs_of(folder: Path) -> list[Run]:
    study = read_study_file(folder / STUDY_FILE)
    added = {method["name"] for method in study["methods"] if method.get("baseline")}
    left_out = {method["name"]: method["left_out"] for method in study["methods"] if method.get("left_out")}
    cells = {method["name"]: tuple(method["cell"]) for method in study["methods"] if method.get("cell")}
    vary = {method["name"]: tuple(method.get("vary") or ()) for method in study["methods"]}
    runs = []
    for entry in study["runs"]:
        done = entry["state"] == "done"
        error = None if done else entry.get("error") or "This run has not been made."
        path = folder / entry["folder"]
        if done and not (path / "summary.json").exists():
            error = f"Its folder {path} has no summary.json any more."
        name, site = left_out.get(entry["run"], (entry["run"], None))
        run = load_run(path, name, error, entry["run"] in added)
        label = entry["run"]
        runs.append(replace(run, seed=int(entry["seed"]), site=site, cell=cells.get(label), vary=vary.get(label, ())))
    return runs


def read_study_file(path: Path) -> dict[str, Any]:
    """Return the content of a `study.json`."""
    study = _named_values(path, read_json)
    fault = _fault_of_study(study)
    if fault is not None:
        raise UnreadableError(f"{path} is not a list of runs that `compare` wrote: {fault}.")
    return study


def _named_values(path: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    try:
        content = read(path)
    except UnreadableError as error:
        raise UnreadableError(f"{path} cannot be read: {error}.") from None
    if content is None:  # an empty YAML file
        return {}
    if not isinstance(content, dict):
        raise UnreadableError(f"{path} holds a {type(content).__name__}, not named values.")
    return content


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableError(f"it is not a YAML ({' '.join(str(error).split())[:200]})") from None


_ROW = {"model": str, "stage": str, "checkpoint": str, "data": str, "split": str, "metric": str, "per_client": dict}
_STATISTICS = ("mean", "weighted_mean", "std", "variance", "median", "worst", "tenth_percentile")


def _fault_of_summary(summary: Mapping[str, Any]) -> str | None:
    results = summary.get("results", [])
    if not isinstance(results, list) or not all(isinstance(row, dict) for row in results):
        return "its results are not rows"
    for row in results:
        wrong = next((name for name, kind in _ROW.items() if not isinstance(row.get(name), kind)), None)
        if wrong is not None:
            return f"a row of its results has no {wrong}"
        for value in (*(row.get(name) for name in _STATISTICS), *row["per_client"].values()):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                return f"a score of {row['metric']} is {value!r:.40}"
    for name, kind in (("num_samples", dict), ("seed", int), ("data", dict), ("callbacks", dict), ("per_round", list)):
        if name in summary and not isinstance(summary[name], kind):
            return f"its {name} is a {type(summary[name]).__name__}"
    return None


def _fault_of_study(study: Mapping[str, Any]) -> str | None:
    for name, needed in (("methods", {"name": str}), ("runs", {"run": str, "seed": int, "state": str, "folder": str})):
        entries = study.get(name)
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in needed.items())
            for entry in entries
        ):
            return f"its {name} do not each have {', '.join(needed)}"
    for entry in study["methods"]:
        for name, pair in (("left_out", "a method and a site"), ("cell", "a row and a column")):
            pair_of_method = entry.get(name)
            if pair_of_method is not None and not (
                isinstance(pair_of_method, list)
                and len(pair_of_method) == 2
                and all(isinstance(v, str) for v in pair_of_method)
            ):
                return f"a method's {name} is not a pair of {pair}"
    outside = [
        run["folder"] for run in study["runs"] if not all(is_file_name(part) for part in run["folder"].split("/"))
    ]
    return f"it names the folder {outside[0]!r}, which is not in its own" if outside else None

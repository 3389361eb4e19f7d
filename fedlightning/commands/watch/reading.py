"""What the files of a run say of it while it goes on. Only what was appended is read again, and nothing is written."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fedlightning.resume.lock import holder_of
from fedlightning.resume.manifest import whole
from fedlightning.scores.metric_names import DEFAULTS, bare
from fedlightning.storage.files import read_json
from fedlightning.study.finished_runs import natural
from fedlightning.study.target_units import Target, describe_units, target_of

COLUMNS = ("round", "stage", "model", "checkpoint", "data", "split", "client", "metric", "value", "num_samples")
SHOWN_CLIENTS, SHOWN_FAILURES = 500, 50
SPENT = ("round", "epsilon", "epsilon_participants_known")
"""Who reads a run's folder knows who took part: the last number is theirs, and stands beside the other."""
REMEMBERED = 4096
"""Bytes before the place that is read next, by which it is still the same file."""
RECENT = 5
"""Rounds whose seconds tell how long a round takes."""


class ScoreCurves:
    """The clients' scores on their own data in a `metrics.csv`, read on as it grows.

    Args:
        path: The file; it need not be there yet.
        target: Returns what a regression predicts, in whose units its errors are shown.
    """

    def __init__(self, path: Path, target: Callable[[], Target] = Target) -> None:
        self.path, self.target = path, target
        self._forget()

    def _forget(self) -> None:
        self.place, self.round, self._before = 0, 0, b""
        self.curves: dict[str, dict[str, dict[int, list[float]]]] = {}
        """Metric -> stage -> round -> sum, count, lowest and highest over clients."""
        self.clients: dict[str, dict[str, Any]] = {}
        """Client -> its number of samples and newest scores."""

    def read(self) -> None:
        """Read the lines that were appended; where those before are others (a resumed run, another run), all are read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.place - len(self._before))
                if file.read(len(self._before)) != self._before:
                    self._forget()
                    file.seek(0)
                data = file.read()
        except OSError:
            self._forget()
            return
        data = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self.place += len(data)
        self._before = (self._before + data)[-REMEMBERED:]
        target = self.target()
        with suppress(csv.Error):  # damaged
            for line in csv.reader(data.decode(errors="replace").splitlines()):
                if len(line) == len(COLUMNS) and line[0].isascii() and line[0].isdigit() and len(line[0]) < 10:
                    self._take(dict(zip(COLUMNS, line, strict=True)), target)

    def _take(self, row: dict[str, str], target: Target) -> None:
        number, value, metric, stage = int(row["round"]), _number(row["value"]), row["metric"], row["stage"]
        self.round = max(self.round, number)
        of_training = (row["checkpoint"], row["data"]) == ("latest", "local") and row["model"] != "unseen"
        if not of_training or row["split"] == "test" or value is None:
            return
        value *= target.factor(metric)
        before = self.curves.setdefault(metric, {}).setdefault(stage, {})
        mean = before.setdefault(number, [0.0, 0, math.inf, -math.inf])
        mean[:] = [mean[0] + value, mean[1] + 1, min(mean[2], value), max(mean[3], value)]
        client = self.clients.setdefault(
            row["client"], {"client": row["client"], "round": 0, "samples": 0, "scores": {}}
        )
        client["scores"][f"{metric} {stage}"] = value
        client["round"] = max(client["round"], number)
        if row["split"] == "train":
            client["samples"] = int(_number(row["num_samples"]) or 0)

    def newest(self, metric: str | None = None) -> float | None:
        """Return the newest mean of a metric (by default the one that a page shows first) at the stage that is deployed."""
        metric = metric or next(iter(in_importance(self.curves)), None)
        stages = self.curves.get(metric or "", {})
        rounds = next((stages[stage] for stage in ("L1", "G", "L2") if stage in stages), None)
        if not rounds:
            return None
        total, count, *_ = rounds[max(rounds)]
        return total / count


def in_importance(metrics: Iterable[str]) -> list[str]:
    """Return metrics in the order in which they are shown: scores, then losses, then what training logs.

    Example:
        >>> in_importance(["train_loss", "val_loss", "val_ece", "val_accuracy"])
        ['val_accuracy', 'val_ece', 'val_loss', 'train_loss']
    """

    def rank(metric: str) -> tuple[bool, bool, int, str]:
        word = DEFAULTS.index(bare(metric)) if bare(metric) in DEFAULTS else len(DEFAULTS)
        return metric.startswith("train"), metric.endswith("loss"), word, metric

    return sorted(metrics, key=rank)


class RunFiles:
    """A run's folder, for somebody who looks at it again and again.

    Args:
        folder: The folder; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scores = ScoreCurves(folder / "metrics.csv", lambda: target_of(self._config()))
        self._cache: dict[Path, tuple[float, Any]] = {}

    def state(self) -> dict[str, Any]:
        """Return what the page of the run shows, as plain values."""
        self.scores.read()
        extra, history, failures, summary = self._saved()
        rounds, most = self.rounds(history), self.max_rounds()
        holder = holder_of(self.folder)
        done = bool(summary) and rounds >= most
        status = "done" if done else "running" if holder else "waiting" if not rounds else "stopped"
        seconds = sum(entry.get("seconds", 0.0) for entry in history)
        recent = [entry.get("seconds", 0.0) for entry in history[-RECENT:]]
        each = sum(recent) / len(recent) if recent else None
        clients = sorted(self.scores.clients.values(), key=lambda client: natural(client["client"]))
        counts: dict[str, int] = {}
        for failure in failures:
            counts[str(failure.get("client"))] = counts.get(str(failure.get("client")), 0) + 1
        return {
            "folder": str(self.folder),
            "title": " + ".join(self.methods()) or self._trainer().get("name") or self.folder.name,
            "status": status,
            "since": (holder or {}).get("since"),
            "rounds": rounds,
            "max_rounds": most,
            "seconds": summary.get("seconds", seconds) if done else seconds,
            "left": each * (most - rounds) if each is not None and status == "running" else None,
            "heard": max(map(written, (self.folder / "metrics.csv", self.folder / "checkpoints/last/manifest.json"))),
            "bytes_up": sum(entry.get("bytes_up", 0) for entry in history),
            "bytes_down": sum(entry.get("bytes_down", 0) for entry in history),
            "epsilon": self._epsilon(),
            "curves": {name: self._curve(name) for name in in_importance(self.scores.curves)},
            "units": {name: describe_units([self.scores.target()], name) for name in self.scores.curves},
            "clients": [client | {"failures": counts.get(client["client"], 0)} for client in clients[:SHOWN_CLIENTS]],
            "num_clients": max(len(clients), len(extra.get("clients") or [])),
            "failures": failures[-SHOWN_FAILURES:][::-1],
            "num_failures": len(failures),
            "ended_why": summary.get("stopped") or extra.get("stopped"),
        }

    def rounds(self, history: list[Any] | None = None) -> int:
        """Return the rounds that are over."""
        return max(self.scores.round, len(history or []))

    def max_rounds(self) -> int:
        """Return the rounds that the run is to have; without a configuration those that it had."""
        trainer = self._trainer()
        rounds = 1 if trainer.get("fast_dev_run") else trainer.get("max_rounds")
        return rounds if isinstance(rounds, int) else max(self.scores.round, 1)

    def methods(self) -> list[str]:
        """Return the names of the callbacks, but those that only keep or stop."""
        callbacks = self._trainer().get("callbacks") or []
        names = [
            str(callback.get("class_path", "")).rpartition(".")[2]
            for callback in callbacks
            if isinstance(callback, dict)
        ]
        return [name for name in names if name and not name.endswith(("Checkpoint", "Stopping"))]

    def _config(self) -> dict[str, Any]:
        config = self._once(self.folder / "config.yaml", lambda path: yaml.safe_load(path.read_text(encoding="utf-8")))
        return config if isinstance(config, dict) else {}

    def _trainer(self) -> dict[str, Any]:
        trainer = self._config().get("trainer")
        return trainer if isinstance(trainer, dict) else {}

    def _saved(self) -> tuple[dict[str, Any], list[Any], list[Any], dict[str, Any]]:
        """Return what the newest state and the summary say: all, its rounds, its failures, the summary."""
        last = self.folder / "checkpoints/last"
        manifest = self._once(last / "manifest.json", read_json)
        extra = manifest.get("extra") if isinstance(manifest, dict) else None
        extra = whole(extra, lambda name: self._once(last / name, read_json) or []) if isinstance(extra, dict) else {}
        summary = self._once(self.folder / "summary.json", read_json)
        summary = summary if isinstance(summary, dict) else {}
        history = extra.get("history") or summary.get("per_round") or []
        return extra, history, extra.get("failures") or summary.get("failures") or [], summary

    def _epsilon(self) -> list[list[float]]:
        def read(path: Path) -> list[list[float]]:
            with path.open(encoding="utf-8", newline="") as file:
                rows = [[_number(row.get(name)) for name in SPENT] for row in csv.DictReader(file)]
            return [[number for number in row if number is not None] for row in rows if None not in row]

        return self._once(self.folder / "privacy.csv", read) or []

    def _curve(self, metric: str) -> dict[str, list[list[float]]]:
        return {
            stage: [[number, total / count, low, high] for number, (total, count, low, high) in sorted(rounds.items())]
            for stage, rounds in self.scores.curves[metric].items()
        }

    def _once(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """Return what a file says, read again when it has changed; `None` while it is not there or not whole."""
        try:
            changed = path.stat().st_mtime
            if self._cache.get(path, (None,))[0] != changed:
                self._cache[path] = (changed, read(path))
        except (OSError, ValueError, yaml.YAMLError):
            return None
        return self._cache[path][1]


def _number(text: Any) -> float | None:
    """Return a finite number, or `None`."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def written(path: Path) -> float:
    """Return when a file was last written, 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

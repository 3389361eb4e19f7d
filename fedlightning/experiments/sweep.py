"""Trials of a sweep, their scores on validation data, and the best one as an override file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.config.errors import InputError
from fedlightning.config.short_forms import expand_words
from fedlightning.config.value_checks import class_of
from fedlightning.errors import missing_package
from fedlightning.experiments.methods import Config, Method
from fedlightning.experiments.space import Range, Values
from fedlightning.study.columns import GLOBAL, PERSONAL

NO_TEST = ["--trainer.evaluation.test_data=[]"]
"""Options of every trial: nothing is scored on test data."""
_DEPLOYED = ((PERSONAL, "best_local", None), (GLOBAL, "best_global", None), (PERSONAL, "latest", "L1"))


@dataclass
class Trial:
    """One choice of values.

    Attributes:
        values: Keys of options -> values.
        per_seed: Seed -> objective, `None` if the run failed or the objective is not defined.
    """

    values: Values
    per_seed: dict[int, float | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the trial, made from its values: the same values always have the same name."""
        text = json.dumps(sorted(self.values.items()))
        return f"trial_{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def options(self) -> list[str]:
        """Values as words of the command line."""
        return [f"--{key}={value}" for key, value in self.values.items()]

    @property
    def objective(self) -> float | None:
        """Mean over seeds; `None` unless every seed has an objective."""
        found = [value for value in self.per_seed.values() if value is not None]
        return sum(found) / len(found) if found and len(found) == len(self.per_seed) else None


def refuse_unpayable(methods: Sequence[Method]) -> None:
    """Refuse runs whose privacy callbacks share a budget that does not last for all of them: each spends once a run.

    It imports their classes, and torch with them: call it in a child process.

    Args:
        methods: The configuration of each run.

    Raises:
        InputError: With the budget and a way out.
    """
    from fedlightning.contract import Protection

    runs: list[tuple[Protection, int]] = []
    for method in methods:
        for entry in method.config.get("trainer", {}).get("callbacks") or []:
            kind = class_of(entry["class_path"])
            if isinstance(kind, type) and issubclass(kind, Protection):
                runs.append((kind(**entry.get("init_args") or {}), method.rounds))
    for callback, _ in runs:
        try:
            callback.check_runs(runs)
        except ValueError as error:
            raise InputError(f"{error} Every trial of a sweep spends once for each seed.") from error


def have_ledgers(methods: Sequence[Method]) -> bool:
    """Return whether any run writes what it spends into a file that runs share."""
    callbacks = [entry for method in methods for entry in method.config.get("trainer", {}).get("callbacks") or []]
    return any((entry.get("init_args") or {}).get("ledger") is not None for entry in callbacks)


def objective(folder: Path, metric: str = "loss") -> float | None:
    """Return the validation score of a run: the mean over clients, weighted by validation samples.

    The models are those that the run would deploy: each client's best on its own validation data if the run kept them,
    else the best global model, else the last model that each client received (stage L1).
    """
    from fedlightning.study.runs import load_run

    run = load_run(folder)
    found = (run.result(metric, split="val", model=m, checkpoint=c, stage=s) for m, c, s in _DEPLOYED)
    row = next((row for row in found if row is not None), None)
    if row is None:
        known = sorted({row["metric"] for row in run.results if row["split"] == "val"})
        withheld = [
            one for one in run.summary.get("leaves", []) if "validation" in one["what"] and "withheld" in one["cover"]
        ]
        why = ": its privacy callback withholds them, unless scores='in the clear'" if withheld else ""
        raise InputError(f"{folder} has no validation score '{metric}'. It has {', '.join(known) or 'none'}{why}.")
    clients = run.summary["data"]["clients"]
    expected = {client for client, held in clients.items() if held["val"]}
    scores = {client: value for client, value in row["per_client"].items() if value is not None}
    if not expected <= set(scores):
        return None
    value = row["weighted_mean"]
    return None if value is None or not math.isfinite(value) else float(value)


def ranked(trials: Sequence[Trial], higher_is_better: bool = False) -> list[Trial]:
    """Return the trials, best first. Those without an objective come last; equal ones keep their order."""

    def key(trial: Trial) -> tuple[bool, float]:
        value = trial.objective
        return (value is None, 0.0 if value is None else -value if higher_is_better else value)

    return sorted(trials, key=key)


class Proposals:
    """Proposals of values from Optuna's TPE sampler, asked for and answered in a fixed order.

    The same seed and the same objectives give the same proposals, so a sweep that is started again passes through its
    finished trials without running them.

    Args:
        ranges: Ranges of the values.
        seed: Seed of the sampler.
        higher_is_better: Whether a higher objective is better.

    Raises:
        InputError: If Optuna is not installed.
    """

    def __init__(self, ranges: Sequence[Range], seed: int, higher_is_better: bool) -> None:
        try:
            import optuna
        except ImportError as error:
            raise InputError(missing_package("--search needs Optuna", "sweep") + " --grid does without.") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed), direction="maximize" if higher_is_better else "minimize"
        )
        self._ranges = list(ranges)
        self._open: list[Any] = []

    def ask(self, number: int) -> list[Values]:
        """Return the next `number` values to try."""
        self._open = [self._study.ask() for _ in range(number)]
        return [{found.key: found.propose(trial) for found in self._ranges} for trial in self._open]

    def tell(self, objectives: Sequence[float | None]) -> None:
        """Report the objectives of the values last asked for, in the same order; `None` for a failed trial."""
        for trial, value in zip(self._open, objectives, strict=True):
            if value is None:
                self._study.tell(trial, state=self._failed)
            else:
                self._study.tell(trial, value)


# -- the best, as a file -----------------------------------------------------------------------------------------------
def override(config: Config, options: Sequence[str]) -> Config:
    """Return the part of a complete configuration that options say, as an override for the files it was made from.

    When files are stacked, lists replace each other, so a list (callbacks) is taken whole. A class is taken with its path.

    Example:
        >>> config = {"model": {"class_path": "Mine", "init_args": {"lr": 0.1, "depth": 2}}, "trainer": {"seed": 0}}
        >>> override(config, ["--model.init_args.lr=0.1"])
        {'model': {'class_path': 'Mine', 'init_args': {'lr': 0.1}}}
    """
    found: Config = {}
    for option in expand_words(options):
        _copy(config, found, option.removeprefix("--").partition("=")[0].rstrip("+").split("."))
    return found


def _copy(source: Mapping[str, Any], target: dict[str, Any], path: Sequence[str]) -> None:
    name, rest = path[0], path[1:]
    if name not in source and isinstance(source.get("init_args"), Mapping):  # the short form: model.lr
        name, rest = "init_args", path
    if "class_path" in source:
        target["class_path"] = source["class_path"]
    value = source[name]
    if rest and isinstance(value, Mapping):
        _copy(value, target.setdefault(name, {}), rest)
    else:
        target[name] = value

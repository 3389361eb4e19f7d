"""The runs of one method on one task: trials on validation data, then fresh seeds and splits with the best values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedlightning.experiments.children import call
from fedlightning.experiments.execute import Task
from fedlightning.experiments.league.reading import League, LeagueMethod, LeagueTask
from fedlightning.experiments.league.rows import measure
from fedlightning.experiments.plan import Request, make_plans
from fedlightning.experiments.reproduce.runs import folder_of
from fedlightning.experiments.space import Range, Values
from fedlightning.experiments.study_file import StudyFile
from fedlightning.experiments.sweep import NO_TEST, Trial, objective, ranked
from fedlightning.seeding import generator

LOCAL_TEST = ["--trainer.evaluation.test_data=[local]"]
"""Options of the runs that are tested: each client's model on its own test data."""


def propose(ranges: Sequence[Range], seed: int, trials: int) -> list[Values]:
    """Return the values to try. Each has an address of its own, so the same option has the same values in all methods.

    Example:
        >>> from fedlightning.experiments.space import parse_search
        >>> rate, mu = parse_search(["model.lr=log:0.01:1", "trainer.callbacks.mu=choice:1,10"])
        >>> propose([rate], 0, 2) == [{"model.lr": one["model.lr"]} for one in propose([rate, mu], 0, 2)]
        True
    """
    return [
        {one.key: one.at(float(torch.rand((), generator=generator(seed, "league", one.key, number)))) for one in ranges}
        for number in range(trials)
    ]


@dataclass
class Contest:
    """One method on one task.

    Attributes:
        league: The league.
        task: The task.
        method: The method.
        root: Data root.
        study: States of the runs of the task.
        cli: `module:class` of the command line that parses the options of a run.
        make: Makes runs; returns `False` if it was interrupted.
        redo: Which runs to make again.
    """

    league: League
    task: LeagueTask
    method: LeagueMethod
    root: Path
    study: StudyFile
    cli: str
    make: Callable[[StudyFile, Sequence[Task]], bool]
    redo: Any = None
    trials: list[Trial] = field(default_factory=list)

    def carry_out(self) -> dict[str, Any] | None:
        """Make the missing runs and return the method's row; `None` if it was interrupted."""
        league, name = self.league, self.method.name
        values = propose(league.ranges(self.task, self.method), league.search_seed, league.trials)
        self.trials = [Trial(one) for one in values]
        labels = [f"{name}-{trial.name}" for trial in self.trials]
        if not self._make(labels, self.trials, [league.trial_seed], NO_TEST):
            return None
        for trial, label in zip(self.trials, labels, strict=True):
            folder = self._done(label, league.trial_seed)
            trial.per_seed[league.trial_seed] = None if folder is None else objective(folder)
        row = {"method": name, "setting": league.setting(self.task, self.method), "trials": self._told(labels)}
        best = ranked(self.trials)[0]
        if best.objective is None:
            return row | {"failed": self._error(labels, league.trial_seed)}
        label = f"{name}-best-{best.name.removeprefix('trial_')}"
        if not self._make([label], [best], league.seeds, LOCAL_TEST):
            return None
        folders = {seed: self._done(label, seed) for seed in league.seeds}
        lacking = [seed for seed, folder in folders.items() if folder is None]
        if lacking:
            return row | {"best": best.values, "failed": self._error([label], lacking[0])}
        runs = {str(seed): measure(folder, self.task.metric) for seed, folder in folders.items() if folder is not None}
        return row | {"best": best.values, "seeds": runs}

    def _make(self, labels: Sequence[str], trials: Sequence[Trial], seeds: list[int], more: Sequence[str]) -> bool:
        """Make the runs that are still to be made. Return `False` if it was interrupted."""
        places = {one.option: str(folder_of(one, self.root)) for one in self.task.data}
        own = {**places, **self.task.options.get(self.method.name, {})}
        options = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in own.items()]
        requests = [
            Request(
                files=[f"{label}={self.method.config}"],
                cli=self.cli,
                before=[str(self.task.path)],
                options=[*options, *trial.options, *more, "--trainer.logger=false"],
                vary=self.task.vary,
                baselines=[],
                matrix=False,
            )
            for label, trial in zip(labels, trials, strict=True)
        ]
        plans = call(make_plans, requests)
        methods = [plan.methods[0] for plan in plans]
        vary = {name: keys for plan in plans for name, keys in plan.vary.items()}
        tasks = self.study.plan(methods, seeds, vary, self.redo)
        if not tasks:
            return True
        self.study.begin(methods, seeds, vary, tasks, self.redo)
        return self.make(self.study, tasks)

    def _done(self, label: str, seed: int) -> Path | None:
        entry = self.study.entry(label, seed)
        return self.study.run_folder(label, seed) if entry is not None and entry["state"] == "done" else None

    def _error(self, labels: Sequence[str], seed: int) -> str:
        errors = [entry["error"] for label in labels if (entry := self.study.entry(label, seed)) is not None]
        return next((str(error) for error in errors if error), "no trial has a validation loss for every client")

    def _told(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        entries = [self.study.entry(label, self.league.trial_seed) for label in labels]
        return [
            {
                "values": trial.values,
                "val_loss": trial.objective,
                "seconds": round(entry["seconds"], 1) if entry else None,
            }
            for trial, entry in zip(self.trials, entries, strict=True)
        ]

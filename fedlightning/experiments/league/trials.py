"""The runs of one method on one task: trials on validation data, then fresh seeds and splits with the best values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlightning.experiments.execute import Watcher
from fedlightning.experiments.experiment import Experiment
from fedlightning.experiments.league.reading import League, LeagueMethod, LeagueTask
from fedlightning.experiments.league.rows import measure
from fedlightning.experiments.plan import Request
from fedlightning.experiments.reproduce.runs import words_of
from fedlightning.experiments.search import NO_TEST, Range, Trial, Values, plan_trials, ranked, score_trials
from fedlightning.seeding import generator

LOCAL_TEST = ["--trainer.evaluation.test_data=[local]"]
"""Options of the runs that are tested: each client's model on its own test data."""


def propose(ranges: Sequence[Range], seed: int, trials: int) -> list[Values]:
    """Return the values to try. Each has an address of its own, so the same option has the same values in all methods.

    Example:
        >>> from fedlightning.experiments.search import parse_search
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
        experiment: Makes the runs of the task.
        cli: `module:class` of the command line that parses the options of a run.
        watchers: Who is told about the progress of runs.
    """

    league: League
    task: LeagueTask
    method: LeagueMethod
    root: Path
    experiment: Experiment
    cli: str
    watchers: Sequence[Watcher] = ()

    def carry_out(self) -> dict[str, Any] | None:
        """Make the missing runs and return the method's row; `None` if it was interrupted."""
        league, name, study = self.league, self.method.name, self.experiment.study
        values = propose(league.ranges(self.task, self.method), league.search_seed, league.trials)
        trials = {f"{name}-{trial.name}": trial for trial in map(Trial, values)}
        if not self._make(trials, [league.trial_seed], NO_TEST):
            return None
        score_trials(study, trials, [league.trial_seed])
        row = {"method": name, "setting": league.setting(self.task, self.method), "trials": self._told(trials)}
        best = ranked(list(trials.values()))[0]
        if best.objective is None:
            return row | {"failed": self._error(trials, league.trial_seed)}
        label = f"{name}-best-{best.name.removeprefix('trial_')}"
        if not self._make({label: best}, league.seeds, LOCAL_TEST):
            return None
        folders = {seed: study.done(label, seed) for seed in league.seeds}
        lacking = [seed for seed, folder in folders.items() if folder is None]
        if lacking:
            return row | {"best": best.values, "failed": self._error([label], lacking[0])}
        runs = {str(seed): measure(folder, self.task.metric) for seed, folder in folders.items() if folder is not None}
        return row | {"best": best.values, "seeds": runs}

    def _make(self, trials: Mapping[str, Trial], seeds: list[int], more: Sequence[str]) -> bool:
        """Make the runs that are still to be made. Return `False` if it was interrupted."""
        options = words_of(self.task.data, self.root, self.task.options.get(self.method.name, {}))
        request = Request([str(self.method.config)], self.cli, [str(self.task.path)], [], options, self.task.vary)
        methods = [plan.methods[0] for plan in plan_trials(request, trials, [*more, "--trainer.logger=false"])]
        tasks = self.experiment.plan(methods, seeds)
        return not tasks or self.experiment.make(methods, seeds, tasks, self.watchers)

    def _error(self, labels: Iterable[str], seed: int) -> str:
        entries = (self.experiment.study.entry(label, seed) for label in labels)
        errors = (str(entry["error"]) for entry in entries if entry is not None and entry["error"])
        return next(errors, "no trial has a validation loss for every client")

    def _told(self, trials: Mapping[str, Trial]) -> list[dict[str, Any]]:
        told = []
        for label, trial in trials.items():
            entry = self.experiment.study.entry(label, self.league.trial_seed)
            seconds = round(entry["seconds"], 1) if entry else None
            told.append({"values": trial.values, "val_loss": trial.objective, "seconds": seconds})
        return told

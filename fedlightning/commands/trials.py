"""A running sweep: its trials, their runs, `sweep.json` and `best.yaml`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from fedlightning.commands.study import CLI, gpus_to_share, make_runs
from fedlightning.experiments.children import Main, call
from fedlightning.experiments.execute import Task
from fedlightning.experiments.first_result import FirstResult
from fedlightning.experiments.methods import Method
from fedlightning.experiments.plan import Request, make_plans
from fedlightning.experiments.ray_runner import refuse_ray_within
from fedlightning.experiments.space import Values
from fedlightning.experiments.study_file import StudyFile
from fedlightning.experiments.sweep import NO_TEST, Trial, have_ledgers, objective, override, ranked, refuse_unpayable
from fedlightning.scores.metrics import bare, higher_is_better
from fedlightning.storage.files import write_text_atomically

if TYPE_CHECKING:
    from fedlightning.options import Ray


@dataclass
class Sweep:
    """A running sweep: its trials, their runs and its files.

    Attributes:
        options: Options of the command.
        passed: Options for every run.
        seeds: Seeds of every trial.
        study: States of the runs.
        screen: Terminal to print to.
        main: Command line that makes a run.
        ray: What Ray is to be, to make the runs with it. `None`: they are processes of this machine.
        trials: Finished trials, in order.
        methods: Name of a trial -> its configuration.
    """

    options: Any
    passed: list[str]
    seeds: list[int]
    study: StudyFile
    screen: Console
    main: Main
    ray: Ray | None = None
    trials: list[Trial] = field(default_factory=list)
    methods: dict[str, Method] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """Folder of the sweep."""
        return self.study.folder

    def plan(self, values: Sequence[Values]) -> tuple[list[Trial], list[Task], dict[str, list[str]], int]:
        """Return the trials of values, the runs they still need, the keys that vary by trial, and the number of GPUs."""
        trials = list({trial.name: trial for trial in map(Trial, values)}.values())
        *before, last = self.options.config
        requests = [
            Request(
                files=[f"{trial.name}={last}"],
                cli=CLI,
                before=before,
                options=[*self.passed, *trial.options, *NO_TEST],
                vary=self.options.vary,
                baselines=[],
                matrix=False,
            )
            for trial in trials
        ]
        plans = call(make_plans, requests)
        methods = [plan.methods[0] for plan in plans]
        if self.ray is not None:
            refuse_ray_within(methods)
        vary = {name: keys for plan in plans for name, keys in plan.vary.items()}
        self.methods |= {method.name: method for method in methods}
        tasks = [_without_test(task) for task in self.study.plan(methods, self.seeds, vary, self.options.redo)]
        return trials, tasks, vary, plans[0].gpus

    def run(self, values: Sequence[Values], more: int = 0) -> bool:
        """Make the missing runs of these trials. Return False if it was interrupted.

        Args:
            values: The values of each trial.
            more: How many trials will follow, of which nobody knows the values yet.

        Raises:
            InputError: If the trials together spend more of a ledger's budget than there is.
        """
        trials, tasks, vary, gpus = self.plan(values)
        runs = [self.methods[task.name] for task in tasks if not task.resumable]
        runs += [self.methods[trials[0].name]] * (more * len(self.seeds))
        if have_ledgers(runs):
            call(refuse_unpayable, runs)
        methods = [self.methods[trial.name] for trial in trials]
        self.study.begin(methods, self.seeds, vary, tasks, self.options.redo)
        first = FirstResult(lambda folder: objective(folder, self.options.metric))
        finished = make_runs(
            self.study, tasks, self.options.jobs, gpus_to_share(gpus), self.screen, self.main, [first], self.ray
        )
        known = {trial.name for trial in self.trials}
        for trial in trials:
            for seed in self.seeds:
                entry = self.study.entry(trial.name, seed)
                done = entry is not None and entry["state"] == "done"
                folder = self.study.run_folder(trial.name, seed)
                trial.per_seed[seed] = objective(folder, self.options.metric) if done else None
            if trial.name not in known:
                self.trials.append(trial)
        self.write()
        return finished

    def objectives(self, values: Sequence[Values]) -> list[float | None]:
        """Return the objectives of these values."""
        by_name = {trial.name: trial.objective for trial in self.trials}
        return [by_name[Trial(value).name] for value in values]

    @property
    def ranked(self) -> list[Trial]:
        """Trials, best first."""
        return ranked(self.trials, higher_is_better(self.options.metric))

    @property
    def best(self) -> Trial | None:
        """Best trial; `None` if no trial has an objective."""
        first = next(iter(self.ranked), None)
        return first if first is not None and first.objective is not None else None

    def write(self) -> None:
        """Write `sweep.json` and `best.yaml`."""
        best = self.best
        content = {
            "format": 1,
            "command": self.study.data["command"],
            "configs": self.options.config,
            "metric": f"val_{bare(self.options.metric)}",
            "seeds": self.seeds,
            "best": None if best is None else best.name,
            "trials": [
                {
                    "trial": trial.name,
                    "values": {key: yaml.safe_load(value) for key, value in trial.values.items()},
                    "objective": trial.objective,
                    "per_seed": {str(seed): value for seed, value in trial.per_seed.items()},
                    "folder": f"runs/{trial.name}",
                }
                for trial in self.trials
            ],
        }
        write_text_atomically(self.out / "sweep.json", json.dumps(content, indent=1))
        if best is not None:
            part = override(self.methods[best.name].config, best.options)
            files = " ".join(f"--config {file}" for file in self.options.config)
            head = (
                f"# The best of {len(self.trials)} trials: {content['metric']} {best.objective:.6g}, mean over "
                f"seeds {', '.join(map(str, self.seeds))}. Stack it on the files of the sweep:\n"
                f"#   fedlightning fit {files} --config {self.out / 'best.yaml'}\n"
            )
            write_text_atomically(self.out / "best.yaml", head + yaml.safe_dump(part, sort_keys=False))


def _without_test(task: Task) -> Task:
    """Return the task with a score of every checkpoint on validation data instead of a test."""
    validate = ["validate", "--run", str(task.folder), "--trainer.evaluation.test_data=[local]"]
    return Task(task.name, task.seed, task.folder, [*task.words, "--test_after_fit=false"], task.rounds, [validate])

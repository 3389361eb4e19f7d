"""`fedlightning sweep`: which values are best on validation data. Test data are not touched."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.commands.study import (
    CLI,
    INTERRUPTED,
    Parser,
    check_jobs,
    console,
    gpus_to_share,
    make_runs,
    parse_seeds,
    show_failures,
    shown,
)
from fedlightning.config.errors import InputError
from fedlightning.experiments.children import Main, call
from fedlightning.experiments.execute import Task
from fedlightning.experiments.first_result import FirstResult
from fedlightning.experiments.methods import Method
from fedlightning.experiments.plan import Request, make_plans
from fedlightning.experiments.space import Values, combinations, parse_grid, parse_search
from fedlightning.experiments.study_file import StudyFile, only_one
from fedlightning.experiments.sweep import NO_TEST, Proposals, Trial, objective, override, ranked
from fedlightning.run.files import write_text_atomically
from fedlightning.scoring.metrics import higher_is_better

DESCRIPTION = """\
Try values of options and choose the best by validation data.

A trial is `fedlightning fit` with the values set, over all seeds. The best trial has the lowest
validation loss: that of the models a run deploys, averaged over clients with their validation
samples as weights, then over seeds. No trial is scored on test data.

--grid tries all combinations; --search lets Optuna propose --trials values within ranges. The same
command again goes on where it was."""
EXAMPLES = """\
examples:
  fedlightning sweep --config configs/quickstart.yaml --config configs/algorithms/fedprox.yaml --seeds 3 \\
      --grid trainer.callbacks.mu=0.01,0.1,1 --grid model.init_args.lr=0.1,0.01 --out runs/sweep
  fedlightning sweep --config my.yaml --search model.init_args.lr=log:1e-5:1e-1 --trials 20 --jobs 2
  fedlightning compare tuned=my.yaml --override runs/sweep/best.yaml       # use what was found

Writes DIR/sweep.json (all trials) and DIR/best.yaml (the best values, to be stacked on the same files).
"""


def parser() -> Parser:
    """The command's options."""
    made = Parser("sweep", description=DESCRIPTION, epilog=EXAMPLES, usage="fedlightning sweep --config FILE [OPTIONS]")
    made.add_argument("-c", "--config", action="append", default=[], metavar="FILE", help="as for fit; may be repeated")
    made.add_argument("--out", type=Path, default=Path("runs/sweep"), metavar="DIR", help="default: runs/sweep")
    made.add_argument("--trainer.KEY=..., --model.KEY=..., --data.KEY=...", dest="_", metavar="", help="for every run")
    values = made.add_argument_group("values")
    values.add_argument(
        "--grid", action="append", default=[], metavar="KEY=A,B,C", help="values of an option; may be repeated"
    )
    values.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="KEY=RANGE",
        help="log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or choice:A,B,C; may be repeated",
    )
    values.add_argument("--trials", type=int, default=20, help="how many proposals of --search to try; default: 20")
    values.add_argument("--search-seed", type=int, default=0, help="seed of the proposals; default: 0")
    values.add_argument("--metric", default="loss", help="what is best, on validation data; default: loss")
    values.add_argument("--test", action="store_true", help="in the end, score the best trial (only) on test data")
    values.add_argument("--test-metric", default="accuracy", help="what --test shows; default: accuracy")
    made.add_runs("1")
    return made


@dataclass
class Sweep:
    """A sweep that is going on.

    Attributes:
        options: the command's own; passed: options for every run; seeds: of every trial; main: the command line.
        trials: those that are done, in order; methods: the configuration of each by name.
    """

    options: Any
    passed: list[str]
    seeds: list[int]
    study: StudyFile
    screen: Console
    main: Main
    trials: list[Trial] = field(default_factory=list)
    methods: dict[str, Method] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """The sweep's folder."""
        return self.study.folder

    def plan(self, values: Sequence[Values]) -> tuple[list[Trial], list[Task], dict[str, list[str]], int]:
        """Trials of these values and the runs they still need; refuses what cannot work."""
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
        vary = {name: keys for plan in plans for name, keys in plan.vary.items()}
        self.methods |= {method.name: method for method in methods}
        tasks = [_without_test(task) for task in self.study.plan(methods, self.seeds, vary, self.options.redo)]
        return trials, tasks, vary, plans[0].gpus

    def run(self, values: Sequence[Values]) -> bool:
        """Make what is missing of these trials; `False` where it was interrupted."""
        trials, tasks, vary, gpus = self.plan(values)
        methods = [self.methods[trial.name] for trial in trials]
        self.study.begin(methods, self.seeds, vary, tasks, self.options.redo)
        first = FirstResult(lambda folder: objective(folder, self.options.metric))  # refuses a metric that is not there
        finished = make_runs(self.study, tasks, self.options.jobs, gpus_to_share(gpus), self.screen, self.main, [first])
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
        """How good these values are."""
        by_name = {trial.name: trial.objective for trial in self.trials}
        return [by_name[Trial(value).name] for value in values]

    @property
    def ranked(self) -> list[Trial]:
        """Best first."""
        return ranked(self.trials, higher_is_better(self.options.metric))

    @property
    def best(self) -> Trial | None:
        """The best trial; `None` where none has an objective."""
        first = next(iter(self.ranked), None)
        return first if first is not None and first.objective is not None else None

    def write(self) -> None:
        """Replace `sweep.json` and `best.yaml`."""
        best = self.best
        content = {
            "format": 1,
            "command": self.study.data["command"],
            "configs": self.options.config,
            "metric": f"val_{self.options.metric.removeprefix('val_')}",
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
            part = override(self.methods[best.name].config, list(best.values))
            files = " ".join(f"--config {file}" for file in self.options.config)
            head = (
                f"# The best of {len(self.trials)} trials: {content['metric']} {best.objective:.6g}, mean over "
                f"seeds {', '.join(map(str, self.seeds))}. Stack it on the files of the sweep:\n"
                f"#   fedlightning fit {files} --config {self.out / 'best.yaml'}\n"
            )
            write_text_atomically(self.out / "best.yaml", head + yaml.safe_dump(part, sort_keys=False))


def sweep(words: Sequence[str], main: Main) -> int:
    """Carry out the command; its exit code.

    Args:
        words: what follows `sweep` on the command line.
        main: the command line that makes a run.
    """
    options, passed = parser().parse(words)
    if not options.config:
        raise InputError("--config is missing: a sweep varies options of a configuration.")
    if bool(options.grid) == bool(options.search):
        raise InputError("give either --grid KEY=A,B,C or --search KEY=RANGE, each as often as there are keys.")
    if options.trials < 1:
        raise InputError(f"--trials is {options.trials}: give 1 or more.")
    check_jobs(options.jobs)
    grid, ranges = list(combinations(parse_grid(options.grid))), parse_search(options.search)
    seeds, screen = parse_seeds(options.seeds), console()
    proposals = Proposals(ranges, options.search_seed, higher_is_better(options.metric)) if ranges else None
    going = Sweep(options, passed, seeds, StudyFile(options.out), screen, main)
    if options.dry_run:
        shown_first = proposals.ask(1) if proposals else grid
        _, tasks, _, _ = going.plan(shown_first)
        for task in tasks:
            screen.print(
                f"fedlightning {shlex.join(task.commands()[0])}", soft_wrap=True, highlight=False, markup=False
            )
        return 0
    with only_one(options.out):
        going.study = StudyFile(options.out)
        going.study.data |= {"command": f"fedlightning sweep {shlex.join(words)}", "metric": options.metric}
        size = len(grid) or options.trials
        screen.print(
            f"{size} trials x {len(seeds)} seeds = {size * len(seeds)} runs; {options.jobs} at a time; "
            f"{shown(options.out)}\n",
            highlight=False,
            soft_wrap=True,
        )
        finished = going.run(grid) if proposals is None else search(going, proposals)
        if not finished:
            screen.print("\nInterrupted. The same command goes on from here.", highlight=False)
            return INTERRUPTED
        states = going.study.states([trial.name for trial in going.trials], seeds)
        show_failures(going.study, states["failed"], screen)
        show_trials(going, screen)
        if options.test and going.best is not None:
            test_best(going, going.best)
    return 1 if states["failed"] or going.best is None else 0


def search(going: Sweep, proposals: Proposals) -> bool:
    """Ask, run, tell. Trials are asked for one by one, or as many at once as --jobs can keep busy beyond the seeds."""
    at_once = going.study.data.setdefault("at_once", max(1, going.options.jobs // len(going.seeds)))
    done = 0
    while done < going.options.trials:
        values = proposals.ask(min(at_once, going.options.trials - done))
        done += len(values)
        for value in values:
            text = ", ".join(f"{key}={value}" for key, value in value.items())
            going.screen.print(f"trial {done}/{going.options.trials}: {escape(text)}", highlight=False, soft_wrap=True)
        if not going.run(values):
            return False
        proposals.tell(going.objectives(values))
    return True


def test_best(going: Sweep, best: Trial) -> None:
    """Score the best trial's runs on test data; their scores are in their folders and in what is printed."""
    from fedlightning.commands.report import show_overview

    folders = [going.study.run_folder(best.name, seed) for seed in going.seeds]
    for folder in folders:
        if call(going.main, ["test", "--run", str(folder), "--trainer.test_data=[local,pooled]"]):
            raise RuntimeError(f"The test of {folder} failed; its output is above.")
    show_overview(folders, going.options.test_metric, "deployed", going.screen)


def _without_test(task: Task) -> Task:
    """The run without a test, and then every checkpoint's score on validation data."""
    validate = ["validate", "--run", str(task.folder), "--trainer.test_data=[local]"]
    return Task(task.name, task.seed, task.folder, [*task.words, "--test_after_fit=false"], task.rounds, [validate])


def show_trials(going: Sweep, screen: Console) -> None:
    """A table of all trials, best first."""
    metric = f"val_{going.options.metric.removeprefix('val_')}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    keys = list(dict.fromkeys(key for trial in going.trials for key in trial.values))
    for key in keys:
        table.add_column(_short(key, keys), overflow="fold")
    table.add_column(metric, justify="right", no_wrap=True)
    table.add_column("by seed", justify="right", overflow="fold")
    table.add_column("trial", no_wrap=True)
    for trial in going.ranked:
        value = trial.objective
        by_seed = " ".join("-" if v is None else f"{v:.4f}" for v in trial.per_seed.values())
        cells = [escape(trial.values.get(key, "-")) for key in keys]
        table.add_row(*cells, "failed" if value is None else f"{value:.5f}", by_seed, trial.name)
    screen.print(table, highlight=False)
    if going.best is not None:
        screen.print(f"Best values: {shown(going.out / 'best.yaml')}", soft_wrap=True, highlight=False)
    screen.print(f"All trials: {shown(going.out / 'sweep.json')}", soft_wrap=True, highlight=False)


def _short(key: str, keys: Sequence[str]) -> str:
    """The end of a key that tells it from the others."""
    parts = key.replace(".init_args", "").split(".")
    ends = [other.replace(".init_args", "").split(".") for other in keys if other != key]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in ends):
            return ".".join(parts[-length:])
    return key

"""The league: many methods on several tasks with one budget of tuning, and what their rows say.

It is read from its YAML file. One method on one task is a contest: trials on validation data, then fresh seeds and splits
with the best values, of which a row is kept. Standings compare the rows of a task.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlightning.config.input_errors import InputError
from fedlightning.experiments.children import call
from fedlightning.experiments.execute import Watcher
from fedlightning.experiments.experiment import Experiment
from fedlightning.experiments.plan import Request
from fedlightning.experiments.reproduce.published_tables import Data, Texts, find_config
from fedlightning.experiments.reproduce.table_runs import write_options
from fedlightning.experiments.reproduce.verdict_files import commit, read_lines, write_lines
from fedlightning.experiments.search import (
    NO_TEST,
    Range,
    Trial,
    Values,
    parse_search,
    plan_trials,
    ranked,
    refuse_private,
    score_trials,
)
from fedlightning.experiments.yaml_blocks import Block, Names, read_yaml
from fedlightning.ranges import Count, Natural, NonNegativeFloat
from fedlightning.run.folder import versions
from fedlightning.scores.metric_names import higher_is_better
from fedlightning.seeding import generator
from fedlightning.study.columns import LOCAL
from fedlightning.study.finished_runs import load_run
from fedlightning.study.learning_curves import cumulative_costs, round_means
from fedlightning.study.run_scores import RunScores, mean_of
from fedlightning.study.significance import Interval, holm, resampled_difference

RATE = "model.init_args.lr"
"""The option that every method is tuned in."""
ROUNDS = "trainer.max_rounds"
MOST_RANGES = 16
"""Dimensions of the sequence that values are drawn from; a method takes the first of them."""


@dataclass(frozen=True)
class LeagueTask:
    """A data set with its network and the work that every method gets.

    Attributes:
        name: Name of the task and of its configuration.
        path: The configuration: data, model, rounds and local work.
        title: The task in some words.
        metric: Score on test data.
        rate: Range of the learning rate.
        vary: Keys that are set to the seed, beside the trainer's.
        options: Method -> options that this network asks for.
        data: Files that must be there.
        without: Method -> why it cannot run here.
    """

    name: str
    path: Path
    title: str
    metric: str
    rate: Range
    vary: Texts
    options: dict[str, Names]
    data: list[Data] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LeagueMethod:
    """A method with the space that it is tuned in.

    Attributes:
        name: Name of the algorithm.
        group: What it needs, in words.
        config: Its configuration, stacked on that of a task.
        space: Ranges of its own options.
        gradients: Gradient evaluations of one local step.
    """

    name: str
    group: str
    config: Path
    space: list[Range]
    gradients: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class League:
    """Tasks, methods and the budget that all have.

    Attributes:
        trials: Number of trials of each method on each task, with a third of the budget.
        keep: Number of trials, the best so far, that are run with the whole budget.
        finalists: Number of trials, the best of these, that are run with the second of `trial_seeds` too.
        search_seed: Seed of the values that are tried.
        trial_seeds: Two seeds of the trials' runs: initialisation, batches and splits.
        seeds: Seeds of the runs that are tested.
        references: Methods that all others are compared with.
        tasks: Tasks, by name.
        methods: Methods, by name.
    """

    trials: Count
    keep: Count
    finalists: Count
    search_seed: Natural
    trial_seeds: list[int]
    seeds: list[int]
    references: Texts
    tasks: dict[str, LeagueTask]
    methods: dict[str, LeagueMethod]

    def ranges(self, task: LeagueTask, method: LeagueMethod) -> list[Range]:
        """Return the space of a method on a task; the learning rate is always in it."""
        return [task.rate, *method.space]

    def setting(self, task: LeagueTask, method: LeagueMethod) -> str:
        """Return a hash of everything here that decides the result of a method on a task."""
        ranges = [asdict(range_) for range_ in self.ranges(task, method)]
        budget = [self.trials, self.keep, self.finalists, self.search_seed, self.trial_seeds, self.seeds, ranges]
        budget.append(method.gradients)
        files = [read_yaml(path) for path in (task.path, method.config)]
        decides = [budget, files, task.vary, task.metric, task.options.get(method.name, {})]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]


def read_league(path: Path, configs: Path) -> League:
    """Read a league.

    Args:
        path: The YAML file. The configuration of a task lies beside it, as `TASK.yaml`.
        configs: Folder of the configurations of methods that do not lie beside the league.

    Raises:
        InputError: If something in it cannot work. The sentence names the file, the place and the way out.
    """
    top = Block(read_yaml(path), path.name, "the league")
    methods: dict[str, LeagueMethod] = {}
    for group, members in top.take_blocks("groups"):
        for name, block in Block({"methods": members.values}, path.name, group).take_blocks("methods"):
            if name in methods:
                raise top.error(f"has the method '{name}' in two groups. Give it once.")
            file = block.take("config", str, f"algorithms/{name.lower()}.yaml")
            config = find_config(block, file, (path.parent, configs))
            space = _ranges({_key(key): value for key, value in block.take("space", Names, {}).items()})
            methods[name] = block.read(LeagueMethod, name=name, group=group, config=config, space=space)
    tasks = {
        name: _read_task(name, block, path.with_name(f"{name}.yaml"), methods)
        for name, block in top.take_blocks("tasks")
    }
    league = top.read(League, tasks=tasks, methods=methods)
    if not league.seeds or {*league.trial_seeds} & {*league.seeds}:
        raise top.error(f"has seeds: {league.seeds}. Give some, and none of the trial_seeds, so that splits are fresh.")
    if len({*league.trial_seeds}) != 2 or not league.trials >= league.keep >= league.finalists:
        raise top.error(
            "needs two different trial_seeds, and as many trials as it keeps, and as many of these as finalists."
        )
    for name in league.references:
        top.check_name(name, methods, "references")
    return league


def _read_task(name: str, block: Block, path: Path, methods: Mapping[str, LeagueMethod]) -> LeagueTask:
    if not path.is_file():
        raise block.error(f"has no configuration: {path} is not there.")
    (rate,) = _ranges({RATE: block.take("learning_rate", str)})
    options_of_methods: dict[str, Names] = block.take("options", dict[str, Names], {})
    options = {
        method: {_key(key): value for key, value in values.items()} for method, values in options_of_methods.items()
    }
    task = block.read(LeagueTask, name=name, path=path, rate=rate, options=options)
    for method in (*task.options, *task.without):
        block.check_name(method, methods, "a method")
    if not higher_is_better(task.metric):
        raise block.error(
            f"has metric: {task.metric!r}, of which lower is better. Give a score of which higher is better."
        )
    return task


def _key(name: str) -> str:
    """Return the key of an option; a bare name is an argument of the algorithm, which is the last callback."""
    return name if "." in str(name) else f"trainer.callbacks.{name}"


def _ranges(space: Mapping[str, Any]) -> list[Range]:
    return parse_search([f"{key}={value}" for key, value in space.items()])


def chosen(names: Sequence[str], listed: Mapping[str, Any], what: str) -> list[str]:
    """Return the names that are asked for, in the order of the league; all if none is.

    Raises:
        InputError: If there is no such name.
    """
    lower = {name.lower(): name for name in listed}
    wrong = next((name for name in names if name.lower() not in lower), None)
    if wrong is not None:
        raise InputError(f"There is no {what} '{wrong}' in the league. It has {', '.join(listed)}.")
    asked = {lower[name.lower()] for name in names}
    return [name for name in listed if name in asked or not names]


# -- rows --------------------------------------------------------------------------------------------------------------
Row = dict[str, Any]


def measure(folder: Path, metric: str) -> dict[str, Any]:
    """Return what the league keeps of a run.

    That is the deployed models' score on test data (mean over clients, worst client), what was sent and computed, and the
    validation score of the models as received (L1) by round, with the steps and megabytes until then. The steps
    of a client's own models are spread evenly over the rounds. Fine-tuning after the last round is not in there.
    """
    run = load_run(folder)
    score = RunScores(run).find(metric)
    if score is None:
        raise InputError(f"{folder} has no score '{metric}' on test data.")
    costs, means = cumulative_costs(run), round_means(run, metric)
    last = run.config["trainer"]["max_rounds"]
    own_steps = run.summary["terms"]["own_steps"]  # those of no round in particular
    curve = []
    for number, cost in costs.items():
        value = means.get(("L1", LOCAL, number))
        if number <= last and value is not None:
            steps = int(cost["local_steps"] + own_steps * number / last)
            curve.append([number, steps, _mb(cost["bytes_up"] + cost["bytes_down"]), _short(value)])
    summary, clients = run.summary, run.summary["data"]["clients"].values()
    return {
        "score": _short(score.mean),
        "worst": _short(None if score.spread is None else score.spread.worst),
        "mb": _mb(summary["bytes_up"] + summary["bytes_down"]),
        "steps": summary["local_steps_total"] + own_steps,
        "train": sum(counts["train"] + counts["val"] for counts in clients),
        "test": sum(counts["test"] for counts in clients),
        "curve": curve,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _mb(size: float) -> float:
    return float(f"{size / 1e6:.6g}")


def read_rows(path: Path) -> dict[str, Row]:
    """Return method -> its row; empty if there is no such file.

    Raises:
        InputError: If the file is none that this module has written.
    """
    return read_lines(
        path, "rows", "method", "holds no rows of the league. Take it from the repository again, or delete it."
    )


def write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file, or replace the method's old one. It keeps the commit and the versions that made it."""
    rows = {**read_rows(path), row["method"]: {**row, "commit": commit(), "versions": versions()}}
    write_lines(path, {"task": path.stem}, "rows", [rows[name] for name in sorted(rows)])


# -- contests ----------------------------------------------------------------------------------------------------------
LOCAL_TEST = ["--trainer.evaluation.test_data=[local]"]
"""Options of the runs that are tested: each client's model on its own test data."""


def propose(ranges: Sequence[Range], seed: int, trials: int) -> list[Values]:
    """Return the values to try: points of a scrambled Sobol sequence, which fill the space evenly.

    A method takes the first coordinates of points that are the same for all, so that the learning rate, which is the first
    range, has the same values in all methods.

    Example:
        >>> from fedlightning.experiments.search import parse_search
        >>> rate, mu = parse_search(["model.lr=log:0.01:1", "trainer.callbacks.mu=choice:1,10"])
        >>> propose([rate], 0, 2) == [{"model.lr": one["model.lr"]} for one in propose([rate, mu], 0, 2)]
        True
    """
    from scipy.stats.qmc import Sobol  # here: it takes half a second

    if len(ranges) > MOST_RANGES:
        raise InputError(f"A method of the league has {len(ranges)} ranges; at most {MOST_RANGES} can be drawn.")
    rule = np.random.default_rng(int(torch.randint(2**62, (), generator=generator(seed, "league"))))
    points = Sobol(MOST_RANGES, rng=rule).random_base2(math.ceil(math.log2(trials)))[:trials]
    return [
        {range_.key: range_.at(float(share)) for range_, share in zip(ranges, point, strict=False)} for point in points
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
        cli: Class of the command line that parses the options of a run, by its import path.
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
        """Make the missing runs and return the method's row; `None` if it was interrupted.

        Trials have a third of the budget (steps of clients' own models on top: nobody knows them before), the better ones all
        of it, the best of these another seed as well. The budget is gradient evaluations: those of the task's rounds, so that
        a method that needs more of them in a round has fewer rounds. What is chosen is tested with fresh seeds, at the budget
        and, where that is less, with all rounds.
        """
        league, name, study = self.league, self.method.name, self.experiment.study
        rounds, (seed, second) = self._task_rounds(), league.trial_seeds
        drawn = propose(league.ranges(self.task, self.method), league.search_seed, league.trials)
        few = max(1, round(rounds / 3 / self.method.gradients))
        short = {
            f"{name}-short-{trial.name}": trial for trial in (Trial({**values, ROUNDS: str(few)}) for values in drawn)
        }
        if not self._make(short, [seed], NO_TEST):
            return None
        score_trials(study, short, [seed])
        row: Row = {
            "method": name,
            "setting": league.setting(self.task, self.method),
            "trials": self._list_trials(short, seed),
        }
        better = [trial for trial in ranked(list(short.values())) if trial.objective is not None][: league.keep]
        if not better:
            return row | {"failed": self._error(short, seed)}
        whole: dict[str, Trial] = {}
        for trial in better:
            folder = study.find_done(f"{name}-short-{trial.name}", seed)
            share = 1.0 if folder is None else self._gradients_of_a_round(folder, few)
            longer = Trial({**trial.values, ROUNDS: str(max(1, round(rounds / share)))})
            whole[f"{name}-{longer.name}"] = longer
        if not self._make(whole, [seed], NO_TEST):
            return None
        score_trials(study, whole, [seed])
        last = dict(sorted(whole.items(), key=_by_objective)[: league.finalists])
        if not self._make(last, [seed, second], NO_TEST):
            return None
        score_trials(study, last, [seed, second])
        best = ranked(list(last.values()))[0]
        if best.objective is None:
            return row | {"failed": self._error(last, seed)}
        row |= {"best": best.values, "finalists": self._list_trials(last, seed)}
        tested = {"seeds": best}
        if best.values[ROUNDS] != str(rounds):
            tested["equal_rounds"] = Trial({**best.values, ROUNDS: str(rounds)})
        for key, trial in tested.items():
            label = f"{name}-best-{trial.name.removeprefix('trial_')}"
            if not self._make({label: trial}, league.seeds, LOCAL_TEST):
                return None
            folders = {number: study.find_done(label, number) for number in league.seeds}
            lacking = [number for number, folder in folders.items() if folder is None]
            if lacking:
                return row | {"failed": self._error([label], lacking[0])}
            row[key] = {str(number): measure(folder, self.task.metric) for number, folder in folders.items() if folder}
        return row

    def _task_rounds(self) -> int:
        return int(read_yaml(self.task.path)["trainer"]["max_rounds"])

    def _gradients_of_a_round(self, folder: Path, rounds: int) -> float:
        """Return the gradient evaluations of one round of a run, in those of FedAvg: one for each of the task's local steps.

        FedAvg's are those of the clients that take part in a round: a batch each of every epoch, or `local_steps`.
        """
        run, work = load_run(folder), read_yaml(self.task.path)["trainer"]
        size, epochs = int(run.config["data"]["init_args"]["batch_size"]), int(work.get("local_epochs") or 1)
        clients = run.summary["data"]["clients"].values()
        plain = sum(int(work.get("local_steps") or -(-counts["train"] // size) * epochs) for counts in clients)
        asked = work.get("participation", 1.0)
        share = asked if isinstance(asked, float) else min(1.0, asked / len(clients))
        steps = run.summary["local_steps_total"] * self.method.gradients + run.summary["terms"]["own_steps"]
        return float(steps / (plain * share * rounds))

    def _make(self, trials: Mapping[str, Trial], seeds: list[int], more: Sequence[str]) -> bool:
        """Make the runs that are still to be made. Return `False` if it was interrupted."""
        options = write_options(self.task.data, self.root, self.task.options.get(self.method.name, {}))
        request = Request([str(self.method.config)], self.cli, [str(self.task.path)], [], options, self.task.vary)
        methods = [plan.methods[0] for plan in plan_trials(request, trials, [*more, "--trainer.logger=false"])]
        tasks = self.experiment.plan(methods, seeds)
        new = {task.name for task in tasks if not task.resumable}
        call(
            refuse_private,
            [method for method in methods for _ in seeds if method.name in new],
            self.experiment.study.begun,
        )
        return not tasks or self.experiment.make(methods, seeds, tasks, self.watchers)

    def _error(self, labels: Iterable[str], seed: int) -> str:
        entries = (self.experiment.study.entry(label, seed) for label in labels)
        errors = (str(entry["error"]) for entry in entries if entry is not None and entry["error"])
        return next(errors, "no trial has a validation loss for every client")

    def _list_trials(self, trials: Mapping[str, Trial], seed: int) -> list[dict[str, Any]]:
        lines = []
        for label, trial in trials.items():
            entry = self.experiment.study.entry(label, seed)
            seconds = round(entry["seconds"], 1) if entry else None
            lines.append({"values": trial.values, "val_loss": trial.objective, "seconds": seconds})
        return lines


def _by_objective(pair: tuple[str, Trial]) -> tuple[bool, float]:
    value = pair[1].objective
    return value is None, value or 0.0


# -- standings ---------------------------------------------------------------------------------------------------------
BUDGET, ALONE = "FedAvg", "Local"
"""The method whose costs are the equal budget, and the one that a gain is measured from."""
EQUAL = ("rounds", "bytes")
LATE = 0.75
"""Share of the rounds after which a curve should be flat."""


@dataclass
class Difference:
    """A method's test score minus that of a reference, over the splits that both have.

    Attributes:
        interval: Mean with its 95 % interval, corrected for overlapping splits.
        p: p-value of the same test.
        p_holm: p-value adjusted for all methods of the task that are compared with this reference.
    """

    interval: Interval
    p: float
    p_holm: float = 1.0


@dataclass
class Standing:
    """The results of a method on a task.

    Attributes:
        method: Its name.
        score: Mean over splits of the mean over clients; `None` if a client diverged.
        scores: The same for each split.
        worst: Mean over splits of the worst client.
        mb: Megabytes sent up and down.
        gain: Gain over Local for each megabyte; `None` where nothing is sent, or Local has no row.
        minus: Reference -> difference.
        rounds: Rounds within the budget of gradient evaluations.
        equal: `"rounds"` -> score on test data with as many rounds as the task has; `"bytes"` -> validation score of the
            models as received, at FedAvg's bytes.
        late: Gain in validation score of the models as received in the last quarter of the rounds, mean over splits.
    """

    method: str
    score: float | None
    scores: list[float | None]
    worst: float | None
    mb: float
    gain: float | None = None
    minus: dict[str, Difference] = field(default_factory=dict)
    rounds: int = 0
    equal: dict[str, float | None] = field(default_factory=dict)
    late: float | None = None


def standings(league: League, task: LeagueTask, rows: Mapping[str, Row]) -> list[Standing]:
    """Return the standings of all methods that have a result on a task, best first; diverged ones come last.

    Rows of another setting than the files have now are left out: they had another budget.
    """
    lacking, old = missing_rows(league, task, rows)
    names = [name for name in league.methods if name in rows and name not in (*lacking, *old)]
    runs = {name: rows[name]["seeds"] for name in names if "seeds" in rows[name]}
    lines = {name: _standing(name, runs_of_method) for name, runs_of_method in runs.items()}
    alone = lines[ALONE].score if ALONE in lines else None
    for name, line in lines.items():
        if line.mb > 0 and line.score is not None and alone is not None:
            line.gain = (line.score - alone) / line.mb
        line.rounds = max((run["curve"][-1][0] for run in runs[name].values() if run["curve"]), default=0)
        line.late = mean_of([_late_gain(run["curve"]) for run in runs[name].values()])
        longer = rows[name].get("equal_rounds")
        failed = "failed" in rows[name]  # what was to be run with equal rounds
        line.equal["rounds"] = (
            mean_of([run["score"] for run in longer.values()]) if longer else None if failed else line.score
        )
        if BUDGET in runs:
            line.equal["bytes"] = _at_equal_bytes(runs[name], runs[BUDGET])
    for reference in (name for name in league.references if name in runs):
        minus = {name: margin for name in runs if name != reference and (margin := _minus(runs[name], runs[reference]))}
        for (name, margin), p in zip(minus.items(), holm([margin.p for margin in minus.values()]), strict=True):
            margin.p_holm = p
            lines[name].minus[reference] = margin
    return sorted(lines.values(), key=lambda line: (line.score is None, -(line.score or 0.0)))


def _standing(name: str, runs: Mapping[str, Any]) -> Standing:
    scores = [run["score"] for run in runs.values()]
    mb = mean_of([run["mb"] for run in runs.values()])
    return Standing(name, mean_of(scores), scores, mean_of([run["worst"] for run in runs.values()]), mb or 0.0)


def _minus(runs: Mapping[str, Any], reference: Mapping[str, Any]) -> Difference | None:
    """Return a difference; `None` if fewer than two splits are there for both, or one run has no score."""
    seeds = [seed for seed in runs if seed in reference]
    a, b = ([group[seed]["score"] for seed in seeds] for group in (runs, reference))
    if len(seeds) < 2 or None in (*a, *b):
        return None
    share = sum(runs[seed]["test"] / runs[seed]["train"] for seed in seeds) / len(seeds)
    return Difference(*resampled_difference(a, b, share))


def _at_equal_bytes(runs: Mapping[str, Any], budgets: Mapping[str, Any]) -> float | None:
    """Return the mean over splits of the last score within the bytes of the budget."""
    scores: list[float | None] = []
    for seed in (seed for seed in runs if seed in budgets and budgets[seed]["curve"]):
        budget = budgets[seed]["curve"][-1][2]
        within = [point for point in runs[seed]["curve"] if point[2] <= budget * (1 + 1e-9)]
        scores.append(within[-1][3] if within else None)
    return mean_of(scores)


def _late_gain(curve: Sequence[Sequence[Any]]) -> float | None:
    """Return the last score of a curve minus that at three quarters of its rounds."""
    before = [point[3] for point in curve if point[0] <= LATE * curve[-1][0]]
    return curve[-1][3] - before[-1] if before and None not in (curve[-1][3], before[-1]) else None


def missing_rows(league: League, task: LeagueTask, rows: Mapping[str, Row]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the methods that have no result on a task, and those whose row was made with another setting."""
    wanted = [name for name in league.methods if name not in task.without]
    measured = [name for name in wanted if "seeds" in rows.get(name, {})]
    old = [name for name in measured if rows[name]["setting"] != league.setting(task, league.methods[name])]
    return [name for name in wanted if name not in measured], old

"""A search for the best values of options: what is tried, its scores on validation data, and the best as an override file.

Tried are all combinations of a grid, or values within ranges: those that Optuna proposes, or those of the league.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fedlightning.config.input_errors import InputError
from fedlightning.config.short_forms import expand_words
from fedlightning.config.value_checks import class_of
from fedlightning.errors import missing_package
from fedlightning.experiments.children import call
from fedlightning.experiments.execute import FirstResult, Task
from fedlightning.experiments.experiment import Experiment, StudyFile
from fedlightning.experiments.methods import Config, Method, list_callbacks
from fedlightning.experiments.plan import Plan, Request, make_plans
from fedlightning.scores.metric_names import bare, higher_is_better
from fedlightning.storage.files import write_text_atomically
from fedlightning.study.columns import GLOBAL, PERSONAL

Values = dict[str, str]
"""Keys of options -> values, as they would be written on the command line."""

_FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or choice:A,B,C"


def split_values(text: str) -> list[str]:
    """Split at commas that are not in brackets, braces or quotes.

    Example:
        >>> split_values("0.1,[8,4],relu")
        ['0.1', '[8,4]', 'relu']
    """
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "[{(":
            depth += 1
        elif sign in ")}]":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += sign
    return [value.strip() for value in parts]


def parse_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse the words of `--grid`.

    Example:
        >>> parse_grid(["trainer.callbacks.mu=0.1,1"])
        {'trainer.callbacks.mu': ['0.1', '1']}
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        key, text = _key("--grid", word, "KEY=VALUE,VALUE,...", grid)
        values = list(dict.fromkeys(split_values(text)))
        if not all(values):
            raise InputError(f"--grid {word}: a value is missing; write KEY=VALUE,VALUE,... .")
        grid[key] = values
    return grid


def combinations(grid: dict[str, list[str]]) -> Iterator[Values]:
    """Yield all combinations of a grid. The values of the last key change fastest."""
    for chosen in itertools.product(*grid.values()):
        yield dict(zip(grid, chosen, strict=True))


@dataclass(frozen=True)
class Range:
    """A range in which the value of one option is searched.

    Attributes:
        key: Key of the option.
        kind: `"log"` (uniform in the logarithm), `"uniform"`, `"int"` (bounds included) or `"choice"`.
        low: Lower bound.
        high: Upper bound.
        choices: Values of a choice.
    """

    key: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    def propose(self, trial: Any) -> str:
        """Return a value from an Optuna trial, as it would be written on the command line."""
        if self.kind == "choice":
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.kind == "int":
            return str(trial.suggest_int(self.key, int(self.low), int(self.high)))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.kind == "log")))

    def at(self, share: float) -> str:
        """Return the value at a share of the range, from 0 to below 1, to four digits.

        Example:
            >>> Range("model.init_args.lr", "log", 0.01, 1.0).at(0.5), Range("k", "int", 1, 4).at(0.99)
            ('0.1', '4')
        """
        if self.kind == "choice":
            return self.choices[int(share * len(self.choices))]
        if self.kind == "int":
            return str(int(self.low + share * (self.high - self.low + 1)))
        if self.kind == "log":
            return f"{self.low * (self.high / self.low) ** share:.4g}"
        return f"{self.low + share * (self.high - self.low):.4g}"

    def share(self, value: float) -> float:
        """Return how far into the range a value lies, from 0 to 1, in the scale of the range."""
        low, high, at = (math.log(end) if self.kind == "log" else end for end in (self.low, self.high, value))
        return (at - low) / (high - low)


def parse_search(words: Sequence[str]) -> list[Range]:
    """Parse the words of `--search`.

    Example:
        >>> parse_search(["model.init_args.lr=log:1e-5:1e-1"])
        [Range(key='model.init_args.lr', kind='log', low=1e-05, high=0.1, choices=())]
    """
    ranges: dict[str, Range] = {}
    for word in words:
        key, text = _key("--search", word, f"KEY={_FORMS}", ranges)
        kind, _, rest = text.partition(":")
        if kind == "choice":
            choices = tuple(dict.fromkeys(split_values(rest)))
            if not all(choices):
                raise InputError(f"--search {word}: a choice is missing; write choice:A,B,C.")
            ranges[key] = Range(key, kind, choices=choices)
            continue
        try:
            if kind not in ("log", "uniform", "int"):
                raise ValueError
            low, high = (int(v) if kind == "int" else float(v) for v in rest.split(":"))
        except ValueError:
            raise InputError(f"--search {word}: the range must be {_FORMS}.") from None
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(f"--search {word}: the lower bound must be below the upper one.")
        if kind == "log" and low <= 0:
            raise InputError(f"--search {word}: a logarithmic range must begin above 0.")
        ranges[key] = Range(key, kind, low, high)
    return list(ranges.values())


def _key(option: str, word: str, form: str, keys: Any) -> tuple[str, str]:
    key, sign, text = word.partition("=")
    key = key.removeprefix("--")
    if not sign or not text or key.partition(".")[0] not in ("trainer", "model", "data"):
        raise InputError(
            f"{option} {word}: write {form} with a key of trainer, model or data, as in model.init_args.lr."
        )
    if key in keys:
        raise InputError(f"{option} {word}: {key} is given twice. Put all its values in one.")
    return key, text


EDGE = 0.05
"""A value in this share of a range at either end is at its edge."""


def name_edges(values: Values, grid: Mapping[str, Sequence[str]], ranges: Sequence[Range] = ()) -> Iterator[str]:
    """Yield a sentence for every number that lies at the edge of what was tried: a better one may lie beyond.

    Example:
        >>> list(name_edges({"model.lr": "0.1"}, {"model.lr": ["0.01", "0.1"]}))
        ['model.lr 0.1 is at the upper edge of 0.01 to 0.1: larger values may be better.']
    """
    tried = {
        key: [number for number in map(_number, values_of_key) if number is not None]
        for key, values_of_key in grid.items()
    }
    spaces = {
        key: Range(key, "int", min(numbers), max(numbers)) for key, numbers in tried.items() if len(set(numbers)) > 1
    }
    spaces |= {space.key: space for space in ranges if space.kind != "choice"}
    for key, space in spaces.items():
        number = _number(values[key])
        share = 0.5 if number is None else space.share(number)
        width = 0.0 if space.kind == "int" else EDGE
        if not width < share < 1 - width:
            end, more = ("upper", "larger") if share > 0.5 else ("lower", "smaller")
            yield (
                f"{key} {values[key]} is at the {end} edge of {space.low:g} to {space.high:g}: {more} values may be better."
            )


def _number(text: str) -> float | None:
    try:
        return number if math.isfinite(number := float(text)) else None
    except ValueError:
        return None


# -- trials ------------------------------------------------------------------------------------------------------------
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
        scores = [value for value in self.per_seed.values() if value is not None]
        return sum(scores) / len(scores) if scores and len(scores) == len(self.per_seed) else None


def refuse_private(methods: Sequence[Method], begun: int = 0) -> None:
    """Refuse runs whose privacy callbacks withhold what is chosen by, or whose budget does not last for all of them.

    It imports their classes, and torch with them: call it in a child process.

    Args:
        methods: The configuration of each run.
        begun: Runs on the same data that have spent already what a ledger alone knows.

    Raises:
        InputError: With the budget and a way out.
    """
    from fedlightning.contract import OutgoingItem, Protection

    runs: list[tuple[Protection, int]] = []
    for method in methods:
        for entry in list_callbacks(method.config):
            kind = class_of(entry["class_path"])
            if isinstance(kind, type) and issubclass(kind, Protection):
                runs.append((kind(**entry.get("init_args") or {}), method.rounds))
    runs += [
        (callback, 0) for callback in {type(callback): callback for callback, _ in runs}.values() for _ in range(begun)
    ]
    for callback, _ in runs:
        if callback.covers(OutgoingItem("scores")) == "withheld":
            raise InputError(
                f"{callback.key} withholds scores on validation data, and a sweep chooses by them. Tune on data that need no "
                f"protection, or give {callback.key}(scores='in the clear'): epsilon does not count them."
            )
        try:
            callback.check_runs(runs)
        except ValueError as error:
            raise InputError(f"{error} Every trial of a sweep spends once for each seed.") from error


def objective(folder: Path, metric: str = "loss") -> float | None:
    """Return the validation score of a run: the mean over clients, weighted by validation samples.

    The models are those that the run would deploy: each client's best on its own validation data if the run kept them,
    else the best global model, else the last model that each client received (stage L1).
    """
    from fedlightning.study.finished_runs import load_run

    run = load_run(folder)
    rows = (run.result(metric, split="val", model=m, checkpoint=c, stage=s) for m, c, s in _DEPLOYED)
    row = next((row for row in rows if row is not None), None)
    if row is None:
        metrics = sorted({row["metric"] for row in run.results if row["split"] == "val"})
        raise InputError(f"{folder} has no validation score '{metric}'. It has {', '.join(metrics) or 'none'}.")
    clients = run.summary["data"]["clients"]
    expected = {client for client, counts in clients.items() if counts["val"]}
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
        return [{range_.key: range_.propose(trial) for range_ in self._ranges} for trial in self._open]

    def tell(self, objectives: Sequence[float | None]) -> None:
        """Report the objectives of the values last asked for, in the same order; `None` for a failed trial."""
        for trial, value in zip(self._open, objectives, strict=True):
            if value is None:
                self._study.tell(trial, state=self._failed)
            else:
                self._study.tell(trial, value)


# -- trials as runs ----------------------------------------------------------------------------------------------------
def plan_trials(request: Request, trials: Mapping[str, Trial], last: Sequence[str] = NO_TEST) -> list[Plan]:
    """Return the plan of every trial, by its label.

    Args:
        request: What all trials have in common.
        trials: Label -> trial.
        last: Options that come after the values.
    """
    (file,) = request.files
    return call(
        make_plans,
        [
            replace(request, files=[f"{label}={file}"], options=[*request.options, *trial.options, *last])
            for label, trial in trials.items()
        ],
    )


def score_trials(study: StudyFile, trials: Mapping[str, Trial], seeds: Sequence[int], metric: str = "loss") -> None:
    """Note the objectives of the runs that are done in their trials, by label."""
    for label, trial in trials.items():
        for seed in seeds:
            folder = study.find_done(label, seed)
            trial.per_seed[seed] = None if folder is None else objective(folder, metric)


@dataclass
class Search:
    """Trials of values as the runs of an experiment, with its files `sweep.json` and `best.yaml`.

    Attributes:
        experiment: Makes the runs.
        request: What all trials have in common.
        seeds: Seeds of every trial.
        metric: Metric to optimise, on validation data.
        trials: Finished trials, by name.
        methods: Name of a trial -> its configuration.
    """

    experiment: Experiment
    request: Request
    seeds: list[int]
    metric: str
    trials: dict[str, Trial] = field(default_factory=dict)
    methods: dict[str, Method] = field(default_factory=dict)

    def plan(self, values: Sequence[Values]) -> tuple[dict[str, Trial], list[Task], int]:
        """Return the trials of values by name, the runs that they still need, and the number of GPUs."""
        trials = {trial.name: trial for trial in map(Trial, values)}
        plans = plan_trials(self.request, trials)
        methods = [plan.methods[0] for plan in plans]
        self.methods |= {method.name: method for method in methods}
        return trials, list(map(_without_test, self.experiment.plan(methods, self.seeds))), plans[0].gpus

    def run(self, values: Sequence[Values], more: int = 0) -> bool:
        """Make the missing runs of these trials. Return False if it was interrupted.

        Args:
            values: The values of each trial.
            more: How many trials will follow, of which nobody knows the values yet.

        Raises:
            InputError: If the trials together spend more of a ledger's budget than there is.
        """
        trials, tasks, gpus = self.plan(values)
        methods = [self.methods[name] for name in trials]
        runs = [self.methods[task.name] for task in tasks if not task.resumable]
        runs += methods[:1] * (more * len(self.seeds))
        call(refuse_private, runs, self.experiment.study.begun)
        first = FirstResult(lambda folder: objective(folder, self.metric))
        finished = self.experiment.make(methods, self.seeds, tasks, [first], gpus)
        score_trials(self.experiment.study, trials, self.seeds, self.metric)
        self.trials |= {name: self.trials.get(name, trial) for name, trial in trials.items()}
        self.write()
        return finished

    @property
    def ranked(self) -> list[Trial]:
        """Trials, best first."""
        return ranked(list(self.trials.values()), higher_is_better(self.metric))

    @property
    def best(self) -> Trial | None:
        """Best trial; `None` if no trial has an objective."""
        return next((trial for trial in self.ranked if trial.objective is not None), None)

    def name_other_data(self) -> Iterator[str]:
        """Yield a sentence for every run that was validated on other data than most with its seed."""
        from fedlightning.study.baselines import odd_splits
        from fedlightning.study.finished_runs import load_run

        pairs = [(name, self.experiment.study.find_done(name, seed)) for seed in self.seeds for name in self.trials]
        runs = [load_run(folder, name) for name, folder in pairs if folder is not None]
        for (name, seed), usual in odd_splits(runs, "val").items():
            yield (
                f"{name}, seed {seed}, was validated on other data than {usual.name}: their values cannot be compared. Tune "
                "what leaves the data as they are, or start all trials anew (--redo all) where the data have changed."
            )

    def write(self) -> None:
        """Write `sweep.json` and `best.yaml`."""
        best, out, files = self.best, self.experiment.folder, [*self.request.before, *self.request.files]
        content = {
            "format": 1,
            "command": self.experiment.study.data["command"],
            "configs": files,
            "metric": f"val_{bare(self.metric)}",
            "seeds": self.seeds,
            "best": None if best is None else best.name,
            "trials": [
                {
                    "trial": name,
                    "values": {key: yaml.safe_load(value) for key, value in trial.values.items()},
                    "objective": trial.objective,
                    "per_seed": {str(seed): value for seed, value in trial.per_seed.items()},
                    "folder": f"runs/{name}",
                }
                for name, trial in self.trials.items()
            ],
        }
        write_text_atomically(out / "sweep.json", json.dumps(content, indent=1))
        if best is not None:
            part = override(self.methods[best.name].config, best.options)
            head = (
                f"# The best of {len(self.trials)} trials: {content['metric']} {best.objective:.6g}, mean over "
                f"seeds {', '.join(map(str, self.seeds))}. Stack it on the files of the sweep:\n"
                f"#   fedlightning fit {' '.join(f'--config {file}' for file in files)} --config {out / 'best.yaml'}\n"
            )
            write_text_atomically(out / "best.yaml", head + yaml.safe_dump(part, sort_keys=False))


def _without_test(task: Task) -> Task:
    """Return the task with a score of every checkpoint on validation data instead of a test."""
    validate = ["validate", "--run", str(task.folder), "--trainer.evaluation.test_data=[local]"]
    return replace(task, words=[*task.words, "--test_after_fit=false"], then=[validate])


# -- the best, as a file -----------------------------------------------------------------------------------------------
def override(config: Config, options: Sequence[str]) -> Config:
    """Return the part of a complete configuration that options say, as an override for the files it was made from.

    When files are stacked, lists replace each other, so a list (callbacks) is taken whole. A class is taken with its path.

    Example:
        >>> config = {"model": {"class_path": "Mine", "init_args": {"lr": 0.1, "depth": 2}}, "trainer": {"seed": 0}}
        >>> override(config, ["--model.init_args.lr=0.1"])
        {'model': {'class_path': 'Mine', 'init_args': {'lr': 0.1}}}
    """
    part: Config = {}
    for option in expand_words(options):
        _copy(config, part, option.removeprefix("--").partition("=")[0].rstrip("+").split("."))
    return part


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

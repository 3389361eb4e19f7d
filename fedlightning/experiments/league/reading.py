"""Reading a league from its YAML file: tasks, methods with the spaces they are tuned in, and the budget of all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlightning.config.errors import InputError
from fedlightning.experiments.reproduce.fields import Fields, read_yaml
from fedlightning.experiments.reproduce.reading import read_data
from fedlightning.experiments.reproduce.tables import Data
from fedlightning.experiments.space import Range, parse_search

RATE = "model.init_args.lr"
"""The option that every method is tuned in."""


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
        data: Files that must be there.
        options: Method -> options that this network asks for.
        without: Method -> why it cannot run here.
    """

    name: str
    path: Path
    title: str
    metric: str
    rate: Range
    vary: list[str]
    data: list[Data]
    options: dict[str, dict[str, Any]]
    without: dict[str, str]


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
    gradients: float


@dataclass(frozen=True)
class League:
    """Tasks, methods and the budget that all have.

    Attributes:
        trials: Number of trials of each method on each task.
        search_seed: Seed of the values that are tried.
        trial_seed: Seed of the trials' runs: initialisation, batches and splits.
        seeds: Seeds of the runs that are tested.
        references: Methods that all others are compared with.
        tasks: Tasks, by name.
        methods: Methods, by name.
    """

    trials: int
    search_seed: int
    trial_seed: int
    seeds: list[int]
    references: list[str]
    tasks: dict[str, LeagueTask]
    methods: dict[str, LeagueMethod]

    def ranges(self, task: LeagueTask, method: LeagueMethod) -> list[Range]:
        """Return the space of a method on a task; the learning rate is always in it."""
        return [task.rate, *method.space]

    def setting(self, task: LeagueTask, method: LeagueMethod) -> str:
        """Return a hash of everything here that decides the result of a method on a task."""
        ranges = [asdict(one) for one in self.ranges(task, method)]
        budget = [self.trials, self.search_seed, self.trial_seed, self.seeds, ranges]
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
    top = Fields(read_yaml(path), path.name, "the league")
    methods = {}
    for group, inner in top.named_sections("groups"):
        for name, one in Fields({"methods": inner.whole()}, path.name, group).named_sections("methods"):
            if name in methods:
                raise top.error(f"has the method '{name}' in two groups. Give it once.")
            methods[name] = _method(name, group, one, (path.parent, configs))
    tasks = {name: _task(name, one, path.parent, methods) for name, one in top.named_sections("tasks")}
    numbers = {
        key: int(top.number(key, low=low)) for key, low in (("trials", 1), ("search_seed", 0), ("trial_seed", 0))
    }
    seeds, references = [int(seed) for seed in top.texts("seeds")], top.texts("references")
    top.end()
    if not seeds or numbers["trial_seed"] in seeds:
        raise top.error(f"has seeds: {seeds}. Give some, and not the trial_seed, so that splits are fresh.")
    for name in references:
        top.known(name, methods, "references")
    return League(**numbers, seeds=seeds, references=references, tasks=tasks, methods=methods)


def _method(name: str, group: str, one: Fields, folders: Sequence[Path]) -> LeagueMethod:
    file = one.text("config", f"algorithms/{name.lower()}.yaml")
    config = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if config is None:
        raise one.error(f"has the configuration {file}, which is not there.")
    space = _ranges({_key(key): value for key, value in one.mapping("space").items()})
    gradients = one.number("gradients", 1.0, low=0)
    one.end()
    return LeagueMethod(name, group, config, space, gradients)


def _task(name: str, one: Fields, folder: Path, methods: Mapping[str, LeagueMethod]) -> LeagueTask:
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise one.error(f"has no configuration: {path} is not there.")
    (rate,) = _ranges({RATE: one.text("learning_rate")})
    options = {
        method: {_key(key): value for key, value in values.whole().items()}
        for method, values in one.named_sections("options")
    }
    without = {method: str(reason) for method, reason in one.mapping("without").items()}
    for method in (*options, *without):
        one.known(method, methods, "a method")
    made = LeagueTask(
        name=name,
        path=path,
        title=one.text("title"),
        metric=one.text("metric"),
        rate=rate,
        vary=one.texts("vary"),
        data=[read_data(data) for data in one.sections("data")],
        options=options,
        without=without,
    )
    one.end()
    return made


def _key(name: str) -> str:
    """Return the key of an option; a bare name is an argument of the algorithm, which is the last callback."""
    return name if "." in str(name) else f"trainer.callbacks.{name}"


def _ranges(space: Mapping[str, Any]) -> list[Range]:
    return parse_search([f"{key}={value}" for key, value in space.items()])


def chosen(names: Sequence[str], known: Mapping[str, Any], what: str) -> list[str]:
    """Return the names that are asked for, in the order of the league; all if none is.

    Raises:
        InputError: If there is no such name.
    """
    lower = {name.lower(): name for name in known}
    wrong = next((name for name in names if name.lower() not in lower), None)
    if wrong is not None:
        raise InputError(f"There is no {what} '{wrong}' in the league. It has {', '.join(known)}.")
    asked = {lower[name.lower()] for name in names}
    return [name for name in known if name in asked or not names]

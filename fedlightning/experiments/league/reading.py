"""Reading a league from its YAML file: tasks, methods with the spaces they are tuned in, and the budget of all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.config.errors import InputError
from fedlightning.experiments.reproduce.tables import Data, Texts, find_config
from fedlightning.experiments.search import Range, parse_search
from fedlightning.experiments.yaml_blocks import Block, Names, read_yaml
from fedlightning.ranges import Count, Natural, NonNegativeFloat

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
        trials: Number of trials of each method on each task.
        search_seed: Seed of the values that are tried.
        trial_seed: Seed of the trials' runs: initialisation, batches and splits.
        seeds: Seeds of the runs that are tested.
        references: Methods that all others are compared with.
        tasks: Tasks, by name.
        methods: Methods, by name.
    """

    trials: Count
    search_seed: Natural
    trial_seed: Natural
    seeds: list[int]
    references: Texts
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
    top = Block(read_yaml(path), path.name, "the league")
    methods: dict[str, LeagueMethod] = {}
    for group, members in top.named("groups"):
        for name, block in Block({"methods": members.values}, path.name, group).named("methods"):
            if name in methods:
                raise top.error(f"has the method '{name}' in two groups. Give it once.")
            file = block.take("config", str, f"algorithms/{name.lower()}.yaml")
            config = find_config(block, file, (path.parent, configs))
            space = _ranges({_key(key): value for key, value in block.take("space", Names, {}).items()})
            methods[name] = block.read(LeagueMethod, name=name, group=group, config=config, space=space)
    tasks = {
        name: _read_task(name, block, path.with_name(f"{name}.yaml"), methods) for name, block in top.named("tasks")
    }
    league = top.read(League, tasks=tasks, methods=methods)
    if not league.seeds or league.trial_seed in league.seeds:
        raise top.error(f"has seeds: {league.seeds}. Give some, and not the trial_seed, so that splits are fresh.")
    for name in league.references:
        top.known(name, methods, "references")
    return league


def _read_task(name: str, block: Block, path: Path, methods: Mapping[str, LeagueMethod]) -> LeagueTask:
    if not path.is_file():
        raise block.error(f"has no configuration: {path} is not there.")
    (rate,) = _ranges({RATE: block.take("learning_rate", str)})
    given: dict[str, Names] = block.take("options", dict[str, Names], {})
    options = {method: {_key(key): value for key, value in values.items()} for method, values in given.items()}
    task = block.read(LeagueTask, name=name, path=path, rate=rate, options=options)
    for method in (*task.options, *task.without):
        block.known(method, methods, "a method")
    return task


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

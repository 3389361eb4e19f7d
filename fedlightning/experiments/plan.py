"""Plans: complete configurations from files and options. All of them are parsed and their data found before a run starts.

Planning imports the user's classes, so it happens in a child process (:func:`children.call`), and the process that
watches the runs stays small.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fedlightning.config.input_errors import InputError, explain
from fedlightning.config.value_checks import class_of
from fedlightning.errors import ConfigurationError
from fedlightning.experiments.leave_one_site_out import without_each_site
from fedlightning.experiments.methods import (
    SEED_KEY,
    Config,
    Method,
    baseline_config,
    labels,
    missing_baselines,
    split_label,
    tidy,
    unique,
)
from fedlightning.experiments.yaml_blocks import Block, Names, read_yaml
from fedlightning.options import Flower, Ray
from fedlightning.study.columns import LOCAL, POOLED


@dataclass(frozen=True)
class Grid:
    """Methods and variants; each method is run under each variant.

    Attributes:
        before: Files that are read before those of a method.
        methods: Name -> files of a method, a row of the report's table.
        variants: Name -> files of a variant, read after those of the method: a column. Without
            any, methods are run as they are.
    """

    before: list[str]
    methods: dict[str, list[str]]
    variants: dict[str, list[str]]

    @property
    def cells(self) -> dict[str, tuple[str, str]]:
        """Name of a run -> its method and its variant.

        Example:
            >>> Grid([], {"mean": []}, {"none": [], "ALIE": []}).cells
            {'mean_none': ('mean', 'none'), 'mean_ALIE': ('mean', 'ALIE')}
        """
        return {tidy(f"{row}_{column}"): (row, column) for row in self.methods for column in self.variants}

    @property
    def runs(self) -> dict[str, list[str]]:
        """Name of a run -> its files, in the order in which they are read."""
        if not self.variants:
            return {tidy(row): [*self.before, *files] for row, files in self.methods.items()}
        return {
            name: [*self.before, *self.methods[row], *self.variants[column]]
            for name, (row, column) in self.cells.items()
        }


def read_grid(path: Path, folder: Path) -> Grid:
    """Read a grid: `config`, by name `methods`, and maybe `variants`. Files are relative to the grid's own folder.

    Args:
        path: The file. A method or variant is a file, a list of files, or what would stand in one.
        folder: Where to write files of what stands in the grid itself.

    Raises:
        InputError: If it is not a grid.
    """
    block = Block(read_yaml(path), str(path), "the grid")
    count = 0

    def files(value: Any) -> list[str]:
        nonlocal count
        if isinstance(value, list):
            return [file for entry in value for file in files(entry)]
        if isinstance(value, str):
            return [os.path.normpath(path.parent / value)]
        if not isinstance(value, dict):
            raise InputError(f"{path}: {value!r:.80} is neither a file nor what would stand in one.")
        if not value:
            return []
        count += 1
        aside = folder / f"grid_{count}.yaml"
        aside.write_text(yaml.safe_dump(value, sort_keys=False))
        return [str(aside)]

    before = files(block.take("config", default=[]))
    methods = {name: files(value) for name, value in block.take("methods", Names).items()}
    variants = {name: files(value) for name, value in block.take("variants", Names, default={}).items()}
    block.finish()
    grid = Grid(before, methods, variants)
    if not methods or not all(name.strip() for name in (*methods, *variants)):
        raise block.error("needs methods, and no name of a method or variant may be empty.")
    if len({name.lower() for name in grid.runs}) < len(methods) * max(len(variants), 1):
        raise InputError(f"{path}: two runs would have one name. Name methods and variants otherwise.")
    return grid


MATRIX_CLIENTS = 20
"""Up to this many clients, runs are tested with every client's model on every client's data; beyond, it costs too much."""
_DATA_SEED = "val_seed"
ELSEWHERE = (Ray, Flower)
"""Engines of which no dry run is made: they would start processes on other machines."""


@dataclass(frozen=True)
class Request:
    """The options of a command that plans runs.

    Attributes:
        files: Configurations of the methods, as `path` or `NAME=path`.
        cli: Class of the command line that parses the options of a run, by its import path because it imports torch.
        before: Files that are read before each of `files`.
        after: Files that are read after each of `files`.
        options: Options that override all files.
        vary: Keys that are set to the seed beside `trainer.seed`. `None` takes the seed of the validation split, if the
            data have one.
        baselines: Names of algorithms to add, unless they are there already.
        rehearse: Whether to make a dry run of every method, so that what cannot work is said before the first run, and it is
            known which scores there will be.
        matrix: Whether runs are tested with every client's model on every client's data.
        leave_one_out: Whether every method is also trained without each client.
        columns: Columns that the data of every method need to have, for subgroups.
        grid: File of a grid, in place of `files`; empty: there is none.
    """

    files: list[str]
    cli: str
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    vary: list[str] | None = None
    baselines: list[str] = field(default_factory=list)
    matrix: bool = False
    rehearse: bool = False
    leave_one_out: bool = False
    columns: list[str] = field(default_factory=list)
    grid: str = ""


@dataclass(frozen=True)
class Plan:
    """The runs to make.

    Attributes:
        methods: Methods in the order given, with added baselines and then those without a site last.
        gpus: Number of GPUs.
        metrics: Scores on test data of the first method, after a dry run; empty if it cannot be found out.
    """

    methods: list[Method]
    gpus: int = 0
    metrics: list[str] = field(default_factory=list)


def make_plans(requests: Sequence[Request]) -> list[Plan]:
    """Return a plan for every request. Data that several requests share are set up once."""
    clients: dict[str, list[str]] = {}
    return [make_plan(request, clients) for request in requests]


def make_plan(request: Request, clients: dict[str, list[str]] | None = None) -> Plan:
    """Parse every configuration of a request and set up its data."""
    import torch

    reader = _Reader(request, {} if clients is None else clients)
    methods: list[Method] = []
    with tempfile.TemporaryDirectory() as folder:
        cells, stacks = _stacks(request, Path(folder))
        faults: list[str] = []
        for name, stack in stacks.items():
            named = list(dict.fromkeys(request.grid if Path(folder) in Path(file).parents else file for file in stack))
            try:
                methods.append(replace(reader.read(name, stack, named), cell=cells.get(name)))
            except InputError as error:  # what is wrong with the others is said too
                faults.append(str(error))
    if faults:
        more = "".join(f"\n{number}. {fault}" for number, fault in enumerate(faults, 1))
        raise InputError(faults[0] if len(faults) == 1 else f"{len(faults)} of {len(stacks)} methods cannot run:{more}")
    try:
        added = missing_baselines([method.config for method in methods], request.baselines)
    except ValueError as error:
        raise InputError(f"--baselines: {error}") from error
    first = methods[0]
    for algorithm in added:
        name = unique(algorithm.lower(), {method.name.lower() for method in methods})
        try:
            method = reader.read_config(f"baseline {name}", baseline_config(first.config, algorithm))
        except InputError as error:
            raise InputError(f"{error} Leave it out: --baselines names those to add, or none.") from error
        methods.append(replace(method, name=name, configs=first.configs, baseline=True))
    for method in list(methods) if request.leave_one_out else ():
        without = without_each_site(method, [other.name for other in methods])
        for first in without[:1]:  # it stands for the others
            reader.read_config(f"{method.name} without {method.clients[0]}", first.config)
        methods += without
    return Plan(methods, torch.cuda.device_count(), reader.metrics or [])


def _stacks(request: Request, folder: Path) -> tuple[dict[str, tuple[str, str]], dict[str, list[str]]]:
    """Return the cells of the grid by name, and the files that make each method, in the order in which they are read."""
    if request.grid:
        grid = read_grid(Path(request.grid), folder)
        cells, stacks = grid.cells, grid.runs
    else:
        pairs = [split_label(word) for word in request.files]
        try:
            names = labels([name for name, _ in pairs], [path for _, path in pairs])
        except ValueError as error:
            raise InputError(str(error)) from error
        cells, stacks = {}, {name: [path] for name, (_, path) in zip(names, pairs, strict=True)}
    return cells, {name: [*request.before, *stack, *request.after] for name, stack in stacks.items()}


@dataclass
class _Reader:
    """A reader of stacks of files, which it reads as `fedlightning fit` would. Shared data are set up once.

    Attributes:
        request: What was asked for.
        clients: Known clients, by data configuration.
        metrics: Scores that the first method will have, once they are known.
    """

    request: Request
    clients: dict[str, list[str]]
    metrics: list[str] | None = None

    def read(self, name: str, files: Sequence[str], named: Sequence[str]) -> Method:
        """Return the method that files make; errors name what is `named` of these."""
        return self._read(f"{name} ({' + '.join(named)})", name, files, named, self.request.options)

    def read_config(self, name: str, config: Config) -> Method:
        """Return the method of a configuration that is not in a file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.yaml"
            path.write_text(yaml.safe_dump(config, sort_keys=False))
            return self._read(name, name, [str(path)], [], [])

    def _read(
        self, where: str, name: str, files: Sequence[str], named: Sequence[str], options: Sequence[str]
    ) -> Method:
        """Return a method with its complete configuration, its data found, and after a dry run if one was asked for."""
        from fedlightning.client.fit import have_memory

        vary = list(dict.fromkeys([SEED_KEY, *(self.request.vary or [])]))
        words = [*(word for file in files for word in ("--config", file)), *options, *(f"--{key}=0" for key in vary)]
        try:
            cli = class_of(self.request.cli)("fit", words)
            config: Config = yaml.safe_load(cli.run_config())
            arguments = config["data"].get("init_args") or {}
            if self.request.vary is None and _DATA_SEED in arguments:
                arguments[_DATA_SEED] = 0
                vary.append(f"data.init_args.{_DATA_SEED}")
            clients = self._clients(cli.datamodule, config["data"])
            if self.request.rehearse and not isinstance(cli.trainer.arguments["engine"], ELSEWHERE):
                metrics = _rehearsed(cli)
                self.metrics = metrics if self.metrics is None else self.metrics
        except Exception as error:
            sentence = explain(error)
            if sentence is None:
                raise
            raise InputError(f"{where}: {sentence}") from error
        evaluation = config["trainer"]["evaluation"]
        if evaluation["test_data"] is None and self.request.matrix and len(clients) <= MATRIX_CLIENTS:
            evaluation["test_data"] = [LOCAL, POOLED, "clients"]
        state = None if have_memory(cli.model) is False else cli.trainer.optimizer_state
        no_model = next(filter(None, map(_no_model, cli.trainer.callbacks.callbacks)), None)
        return Method(name, list(named), config, vary, False, clients, state, no_model)

    def _clients(self, datamodule: Any, section: Any) -> list[str]:
        """Set up the data, downloading them if allowed, and return their clients."""
        from fedlightning.arguments import federated_data
        from fedlightning.compat.lightning_runs import quiet
        from fedlightning.study.subgroups import check_subgroups

        key = json.dumps(section, sort_keys=True, default=str)
        if key not in self.clients:
            data = federated_data(datamodule, None, None, None)
            with quiet():
                data.prepare_data()
                data.setup("fit")
            self.clients[key] = list(data.client_ids)
            check_subgroups(data, self.request.columns)
        return self.clients[key]


def _no_model(callback: Any) -> str | None:
    """Return why a callback leaves a client that never trained without a model; `None` if it does not."""
    newcomers = getattr(getattr(callback, "facts", None), "newcomers", None)
    return newcomers.no_model if newcomers is not None and newcomers.no_model else None


def _rehearsed(cli: Any) -> list[str]:
    """Make a dry run; return the names of the scores that a run will have on test data.

    What a dry run refuses in a sentence, every run would refuse. What else goes wrong in it, the run itself tells.
    """
    from fedlightning.compat.lightning_runs import quiet

    with warnings.catch_warnings(), quiet():  # every run says it in its log
        warnings.simplefilter("ignore")
        try:
            metrics: list[str] = cli.trainer.dry_run(cli.model, cli.datamodule).metrics
        except ConfigurationError as error:
            raise InputError(str(error)) from error
        except Exception as error:
            if explain(error) is not None:
                raise
            return []
    return metrics

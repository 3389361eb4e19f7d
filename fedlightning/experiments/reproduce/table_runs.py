"""The runs of tables: complete configurations, each with a name by which a finished run is found again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import fedlightning
from fedlightning.config.input_errors import InputError, suggestion
from fedlightning.errors import missing_package
from fedlightning.experiments.methods import Config, Method, algorithms_of
from fedlightning.experiments.plan import Request, make_plan
from fedlightning.experiments.reproduce.measures import SCORED, fault_of
from fedlightning.experiments.reproduce.published_tables import Cell, Data, Order, Table
from fedlightning.experiments.reproduce.results import TableRun
from fedlightning.run.folder import versions
from fedlightning.scores.metric_names import bare

WATCHING = ("catalogue", "cli", "commands", "configs", "experiments", "study", "testing")
"""Rooms that no number of a run depends on. The code of all others is a part of a run's name."""


def folder_of(data: Data, root: Path) -> Path | None:
    """Return the folder below the data root in which all files of a data set lie, or `None`."""
    folders = (root / name for name in data.root)
    return next((folder for folder in folders if all((folder / file).is_file() for file in data.files)), None)


def obstacle(table: Table, root: Path) -> str:
    """Return why no run of a table can be made here, or an empty text: a file or a package is missing."""
    for extra in table.extras:
        package = PACKAGES.get(extra, extra)
        if importlib.util.find_spec(package) is None:
            return missing_package(f"The table needs {package}", extra).rstrip(".")
    return missing_data(table.data, root)


def missing_data(sets: Sequence[Data], root: Path) -> str:
    """Return a sentence that says which file is missing, and where to get it; empty if all data are there."""
    data = next((data for data in sets if folder_of(data, root) is None), None)
    if data is None:
        return ""
    places = " or ".join(str(root / name) for name in data.root)
    lacking = next((file for file in data.files if not (root / data.root[0] / file).is_file()), data.files[0])
    return f"{data.name} is missing: {lacking} is not in {places}. {data.get}".rstrip(".")


def write_options(sets: Sequence[Data], root: Path, options: Mapping[str, Any]) -> list[str]:
    """Return options as words of the command line, with the folders of the data before them."""
    all_options = {**{data.option: str(folder_of(data, root)) for data in sets}, **options}
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in all_options.items()]


PACKAGES = {"privacy": "opacus", "vision": "timm", "lora": "peft", "flower": "flwr"}
"""Extra -> package by which it is known to be installed, where they have different names."""


def plan_runs(asked: Sequence[TableRun], root: str, cli: str) -> list[dict[str, Method]]:
    """Return for each table the complete configurations of its runs by their names in it.

    A run that two tables ask for has one configuration, of one name. This imports the user's classes: call it in a child
    process.

    Args:
        asked: Tables; of one that cannot be made here, there are none.
        root: Data root.
        cli: Class of the command line that parses the options of a run, by its import path.

    Raises:
        InputError: If a configuration cannot be read, naming the table and the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        planner = _Planner(Path(root), cli, Path(folder))
        return [
            {} if asked_table.obstacle else {name: planner.plan(asked_table.table, name) for name in asked_table.runs}
            for asked_table in asked
        ]


@dataclass
class _Planner:
    """What plans runs, and knows of earlier ones the clients of their data and the scores of their models."""

    root: Path
    cli: str
    folder: Path
    clients: dict[str, list[str]] = field(default_factory=dict)
    scores: dict[str, list[str]] = field(default_factory=dict)

    def plan(self, table: Table, name: str) -> Method:
        """Return the complete configuration of a run."""
        request = _request_of(table, name, self.root, self.cli, self.folder)
        try:
            (method,) = make_plan(request, self.clients).methods
            self._check_readings(table, name, request, method)
        except InputError as error:
            raise InputError(f"{table.path.name}: run '{name}' cannot be made: {error}") from error
        run = table.runs[name]
        if run.test_curve:
            method = _on_test_data(method)
        return replace(method, name=name_of(method), configs=[path.name for path in run.configs])

    def _check_readings(self, table: Table, name: str, request: Request, method: Method) -> None:
        """Refuse what the run will not have. Which scores it has is found out by a dry run, one for each model."""
        lines: Sequence[Cell | Order] = [*table.cells, *table.orders]
        readings = [(line.name, spec) for line in lines for run, spec in line.list_readings() if run == name]
        for line_name, spec in readings:
            fault = fault_of(spec, method.config, method.clients)
            if fault is not None:
                raise InputError(f"'{line_name}' {fault}.")
        asked = {bare(spec.options["metric"]): line_name for line_name, spec in readings if spec.kind in SCORED}
        if not asked:
            return
        key = json.dumps(method.config["model"], sort_keys=True, default=str)
        if key not in self.scores:
            self.scores[key] = make_plan(replace(request, rehearse=True), self.clients).metrics
        metrics = sorted({bare(metric) for metric in self.scores[key]})
        for metric in asked if metrics else ():
            if metric not in metrics:
                hint = suggestion(metric, metrics) or f"There is {', '.join(metrics)}."
                raise InputError(
                    f"'{asked[metric]}' asks for the metric '{metric}', which its model does not log. {hint}"
                )


def _request_of(table: Table, name: str, root: Path, cli: str, folder: Path) -> Request:
    run = table.runs[name]
    stack = [str(path) for path in run.configs]
    if run.config:
        stack.append(str(folder / "config.yaml"))
        Path(stack[-1]).write_text(yaml.safe_dump(dict(run.config), sort_keys=False))
    options = write_options(table.data, root, run.options)
    return Request([f"{name}={stack[-1]}"], cli, stack[:-1], options=options, vary=table.vary)


def name_of(method: Method) -> str:
    """Return the name of a run: its algorithms, and a hash of all that decides its numbers, the seed aside.

    That is the complete configuration, the keys that the seed sets, the versions of the packages that compute, the code of
    this package that runs, and the files of classes that are not of this package.
    """
    config = method.config
    decides = [method.fingerprint(0), _environment(), [_digest(path) for path in _own_files(config)]]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:10]
    label = "-".join(sorted(name.rpartition(".")[2].lower() for name in algorithms_of(config)))[:60]
    return f"{label or 'fedavg'}-{key}"


@cache
def _environment() -> list[Any]:
    """Return versions and the hash of the code that runs."""
    root = Path(fedlightning.__file__).parent
    files = [
        path for path in _python_files(root) if path.relative_to(root).parts[0].removesuffix(".py") not in WATCHING
    ]
    return [versions(), hashlib.sha256("".join(map(_digest, files)).encode()).hexdigest()]


def _python_files(root: Path) -> list[Path]:
    """Return all files of code, those behind links included."""
    folders = [root, *(path for path in root.iterdir() if path.is_symlink() and path.is_dir())]
    return sorted({path for folder in folders for path in folder.rglob("*.py")})


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _own_files(config: Config) -> list[Path]:
    """Return the files of the classes in a configuration that are not of this package, or of torch and Lightning."""
    files = set()
    for path in _class_paths(config):
        module = path.rpartition(".")[0]
        if module.partition(".")[0] in ("fedlightning", "torch", "lightning"):
            continue
        spec = importlib.util.find_spec(module) if module else None
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            files.add(Path(spec.origin))
    return sorted(files)


def _class_paths(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
    inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for entry in inner:
        yield from _class_paths(entry)


def _on_test_data(method: Method) -> Method:
    """Return the run with the scores of each round taken on test data, as a paper took them."""
    wrapped = {"class_path": "fedlightning.datamodules.ValidatedOnTest", "init_args": {"data": method.config["data"]}}
    inner = "data.init_args.data."
    keys = [inner + key.removeprefix("data.") if key.startswith("data.") else key for key in method.vary]
    return replace(method, config={**method.config, "data": wrapped}, vary=keys)

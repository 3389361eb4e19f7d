"""The runs of tables: complete configurations, each with a name by which a finished run is found again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import fedlightning
from fedlightning.config.errors import InputError
from fedlightning.errors import missing_package
from fedlightning.experiments.baselines import algorithms_of
from fedlightning.experiments.methods import Config, Method
from fedlightning.experiments.plan import Request, make_plans
from fedlightning.experiments.reproduce.tables import Data, RunSpec, Table
from fedlightning.run.folder import versions

WATCHING = ("catalogue", "cli", "commands", "configs", "experiments", "study", "testing")
"""Rooms that no number of a run depends on. The code of all others is a part of a run's name."""


@dataclass(frozen=True)
class Job:
    """One run of a table, as it is to be made.

    Attributes:
        table: Name of the table.
        run: Name of the run in it.
        method: Complete configuration; its name is the same in every table that asks for the same run.
        vary: Keys that are set to the seed.
        seeds: Seeds.
    """

    table: str
    run: str
    method: Method
    vary: list[str]
    seeds: list[int]


def folder_of(data: Data, root: Path) -> Path | None:
    """Return the folder below the data root in which all files of a data set lie, or `None`."""
    folders = (root / name for name in data.root)
    return next((one for one in folders if all((one / file).is_file() for file in data.files)), None)


def obstacle(table: Table, root: Path) -> str:
    """Return why no run of a table can be made here, or an empty text: a file or a package is missing."""
    for extra in table.extras:
        package = PACKAGES.get(extra, extra)
        if importlib.util.find_spec(package) is None:
            return missing_package(f"The table needs {package}", extra).rstrip(".")
    return next((missing(data, root) for data in table.data if folder_of(data, root) is None), "")


def missing(data: Data, root: Path) -> str:
    """Return a sentence that says which file is missing, and where to get it."""
    places = " or ".join(str(root / name) for name in data.root)
    lacking = next((file for file in data.files if not (root / data.root[0] / file).is_file()), data.files[0])
    return f"{data.name} is missing: {lacking} is not in {places}. {data.get}".rstrip(".")


PACKAGES = {"privacy": "opacus", "vision": "timm", "lora": "peft", "flower": "flwr"}
"""Extra -> package by which it is known to be installed, where they have different names."""


def plan_jobs(
    wanted: Mapping[str, tuple[Table, Sequence[str]]], root: str, seeds: Sequence[int] | None, cli: str, scratch: str
) -> list[Job]:
    """Return the runs of tables as complete configurations. It imports the user's classes: call it in a child process.

    Args:
        wanted: Name of a table -> the table, and the names of its runs.
        root: Data root.
        seeds: Seeds of all runs; `None`: as each table says.
        cli: `module:class` of the command line that parses the options of a run.
        scratch: Folder for configurations that are written in tables.

    Raises:
        InputError: If a configuration cannot be read, naming the table and the run.
    """
    asked = [(table, table.runs[name]) for table, names in wanted.values() for name in names]
    requests = []
    for number, (table, run) in enumerate(asked):
        stack = [str(path) for path in run.configs]
        if run.config:
            path = Path(scratch) / f"{number}.yaml"
            path.write_text(yaml.safe_dump(dict(run.config), sort_keys=False))
            stack.append(str(path))
        places = {one.option: str(folder_of(one, Path(root))) for one in table.data}
        options = [f"--{key}={_word(value)}" for key, value in {**places, **run.options}.items()]
        vary = None if table.vary is None else list(table.vary)
        requests.append(Request([f"{run.name}={stack[-1]}"], cli, stack[:-1], [], options, vary, [], matrix=False))
    jobs = []
    for (table, run), plan in zip(asked, _plans(asked, requests), strict=True):
        (method,) = plan.methods
        keys = plan.vary[method.name]
        if run.test_curve:
            method, keys = _on_test_data(method, keys)
        method = replace(method, name=name_of(method, keys), configs=[path.name for path in run.configs])
        jobs.append(Job(table.name, run.name, method, keys, list(seeds or table.seeds)))
    return jobs


def _plans(asked: Sequence[tuple[Table, RunSpec]], requests: Sequence[Request]) -> list[Any]:
    """Return the plans; an error names the table and its run."""
    try:
        return make_plans(requests)
    except InputError:
        for (table, run), request in zip(asked, requests, strict=True):
            try:
                make_plans([request])
            except InputError as error:
                raise InputError(f"{table.path.name}: run '{run.name}' cannot be made: {error}") from error
        raise


def name_of(method: Method, vary: Sequence[str]) -> str:
    """Return the name of a run: its algorithms, and a hash of all that decides its numbers, the seed aside.

    That is the complete configuration, the keys that the seed sets, the versions of the packages that compute, the code of
    this package that runs, and the files of classes that are not of this package.
    """
    config = method.config
    decides = [method.fingerprint(0, vary), _environment(), [_digest(path) for path in _own_files(config)]]
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
    found = set()
    for path in _class_paths(config):
        module = path.rpartition(".")[0]
        if module.partition(".")[0] in ("fedlightning", "torch", "lightning"):
            continue
        spec = importlib.util.find_spec(module) if module else None
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            found.add(Path(spec.origin))
    return sorted(found)


def _class_paths(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
    inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _class_paths(one)


def _on_test_data(method: Method, vary: Sequence[str]) -> tuple[Method, list[str]]:
    """Return the run with the scores of each round taken on test data, as a paper took them."""
    wrapped = {
        "class_path": "fedlightning.datamodules.ValidatedOnTest",
        "init_args": {"data": method.config["data"]},
    }
    inner = "data.init_args.data."
    keys = [inner + key.removeprefix("data.") if key.startswith("data.") else key for key in vary]
    return replace(method, config={**method.config, "data": wrapped}), keys


def _word(value: Any) -> str:
    """Write a value as a word of the command line."""
    return value if isinstance(value, str) else json.dumps(value)

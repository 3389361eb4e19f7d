"""The command line of a project: LightningCLI for a federation."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from fedlightning.cli import main
from fedlightning.commands.run import cli_class, run, written_out
from fedlightning.config.input_errors import InputError
from fedlightning.config.parsing import CommandLine, plain_values, tidy_help
from fedlightning.config.short_forms import expand_file
from fedlightning.config.value_checks import class_of
from fedlightning.datamodules import FederatedDataModule, Partitioned, Partitioner
from fedlightning.ranges import checked, replaced

INSTEAD = {
    "save_config_callback": "config.yaml of the run's folder, which every run has",
    "save_config_kwargs": "config.yaml of the run's folder, which every run has",
    "trainer_class": "FederatedCLI alone: its trainer is FederatedTrainer",
    "seed_everything_default": "trainer_defaults={'seed': 1}",
    "parser_kwargs": "add_arguments_to_parser(parser)",
    "parser_class": "add_arguments_to_parser(parser)",
    "auto_configure_optimizers": "configure_optimizers of the module, which may take optimizer: OptimizerCallable",
    "load_from_checkpoint_support": "nothing in its place: modules load with fedlightning.load",
}
"""Argument of LightningCLI -> what to use."""


class Parser(LightningArgumentParser):
    """A parser that knows the classes of its sections, and whether objects have to be made for a link."""

    at_work = False
    """Whether a command line of this process is being made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kinds: dict[str, Any] = {}
        self.links_objects = False

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add arguments as LightningCLI does."""
        self.kinds[nested_key] = None if subclass_mode else lightning_class
        return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)

    def link_arguments(self, *args: Any, **options: Any) -> None:
        """Link arguments as LightningCLI does."""
        arguments = inspect.signature(super().link_arguments).bind(*args, **options).arguments
        self.links_objects |= arguments.get("apply_on") == "instantiate"
        super().link_arguments(*args, **options)


class FederatedCLI(CommandLine):
    """The command line of a Lightning project, federated: write it in place of `LightningCLI`.

    `python main.py fit` takes the options of `fedlightning fit`, with the sections of the project: `--model.ARGUMENT`,
    `--data.ARGUMENT`, what `add_arguments_to_parser` adds, and links. `--clients.partitioner CLASS` divides the data of a
    module that knows no clients; the rest of `--clients` are arguments of
    :class:`~fedlightning.datamodules.Partitioned`. The other commands of `fedlightning` are there as they are. A run's
    `config.yaml` names classes and is complete: `compare`, `sweep` and `test --run` take it without this program.

    Args:
        model_class: A LightningModule. Default: any, by name (`--model MyModule`).
        datamodule_class: A LightningDataModule. Default: any, by name.
        trainer_defaults: Other defaults of the trainer's arguments, as in a YAML file: callbacks are names with arguments.
        subclass_mode_model: Any subclass of `model_class`, by name.
        subclass_mode_data: Any subclass of `datamodule_class`, by name.
        args: Words of the command line. Default: those of this process.
        run: Carry the command out. Without, there are `model`, `datamodule` and `trainer`, and words are options of `fit`.

    Raises:
        SystemExit: If the command has failed; a sentence says why.
    """

    parser: Parser

    @checked
    @replaced(**INSTEAD)
    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        *,
        trainer_defaults: dict[str, Any] | None = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: list[str] | None = None,
        run: bool = True,
    ) -> None:
        self.project: dict[str, Any] = {
            "model_class": model_class,
            "datamodule_class": datamodule_class,
            "trainer_defaults": trainer_defaults,
            "subclass_mode_model": subclass_mode_model,
            "subclass_mode_data": subclass_mode_data,
        }
        words = sys.argv[1:] if args is None else args
        if not run:
            self._make("fit", words)
        elif code := main(words, {name: self._command(name) for name in ("fit", "partition")}):
            sys.exit(code)

    def _command(self, command: str) -> Callable[[list[str]], int]:
        def carry_out(words: list[str]) -> int:
            written = written_out(command, words)
            if len(written) > len(words):  # the configuration of a run is complete without the project
                return run(command, words)
            self._make(command, written)
            line = self.line
            line.model, line.datamodule, line.trainer = self.model, self.datamodule, self.trainer
            getattr(self, f"before_{command}", lambda: None)()
            getattr(line, command)(**line.options())
            getattr(self, f"after_{command}", lambda: None)()
            return 0

        return carry_out

    def _make(self, command: str, words: Sequence[str]) -> None:
        if Parser.at_work:
            raise InputError(
                f"{_main_file().name} calls FederatedCLI while it is imported. Call it below: if __name__ == '__main__'."
            )
        Parser.at_work = True
        try:
            CommandLine.__init__(self, command, words, parser_class=Parser, **self.project)
        finally:
            Parser.at_work = False

    @classmethod
    def parser_options(cls, command: str) -> dict[str, Any]:
        """Return the arguments that the parser of a command is made with."""
        words = f"{_main_file().name} {command}"
        return cli_class(command).parser_options(command) | {"prog": words, "usage": f"{words} [OPTIONS]"}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the command, and the project's sections."""
        line = cli_class(self.command)
        line.add_trainer(parser, self.command)
        defaults = expand_file({"trainer": dict(self.trainer_defaults)})["trainer"]
        parser.set_defaults({f"trainer.{name}": value for name, value in defaults.items()})
        model, data = self.model_class or LightningModule, self.datamodule_class or LightningDataModule
        parser.add_lightning_class_args(model, "model", self.subclass_mode_model, line.needs_model)
        parser.add_lightning_class_args(data, "data", self.subclass_mode_data)
        if not _is_federated(data):
            parser.add_class_arguments(
                Partitioned, "clients", skip={"datamodule", "partitioner"}, instantiate=False, fail_untyped=False
            )
            parser.add_subclass_arguments(Partitioner, "clients.partitioner", required=False, instantiate=False)
        tidy_help(parser, inspect.signature(getattr(line, self.command)).parameters)

    def before_instantiate_classes(self) -> None:
        """Implement to run some code before the objects are made."""

    def instantiate_classes(self) -> None:
        """Make the objects, from a configuration that names the classes."""
        self.config_init = self.config
        names = inspect.signature(getattr(cli_class(self.command), self.command)).parameters
        options = {name: self.config[name] for name in names if name in self.config and self.config[name] is not None}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "project.yaml"
            path.write_text(json.dumps(self.document()), encoding="utf-8")
            words = ["--config", str(path), *(f"--{name}={_as_word(value)}" for name, value in options.items())]
            self.line = cli_class(self.command)(self.command, words)
        self.model, self.datamodule, self.trainer = self.line.model, self.line.datamodule, self.line.trainer

    def document(self) -> dict[str, Any]:
        """Return the configuration with the names of classes, as `fedlightning fit` takes it."""
        values = plain_values(self.parser, self.config)
        for target, value in self._links().items():
            *path, name = target.split(".")
            section = values
            for step in path:
                section = section.setdefault(step, {})
            section[name] = value
        for key, kind in self.parser.kinds.items():
            if kind is not None and values.get(key) is not None:
                values[key] = {"class_path": _path_of(kind), "init_args": values[key]}
        trainer, data = values["trainer"], values["data"]
        callbacks = trainer.get("callbacks") or []
        forced = [values[key] for key in self.parser.callback_keys]
        trainer["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), *forced]
        division = values.get("clients") or {}
        if "class_path" in data and not _is_federated(class_of(data["class_path"])) and division:
            if division["partitioner"] is None:
                raise InputError(
                    f"{data['class_path']} does not know which client has which samples. Divide its data: "
                    "--clients.partitioner=IIDPartitioner --clients.partitioner.num_clients=10, or clients: in YAML."
                )
            data = {"class_path": "fedlightning.datamodules.Partitioned", "init_args": {"datamodule": data, **division}}
        return {"trainer": trainer, "model": values.get("model"), "data": data}

    def _links(self) -> dict[str, Any]:
        """Return what arguments are linked to in objects: target -> value."""
        linked: dict[str, Any] = {}

        def make(kind: Any, *args: Any, applied_instantiation_links: Mapping[str, Any], **arguments: Any) -> Any:
            linked.update(applied_instantiation_links)
            return kind(*args, **arguments)

        if self.parser.links_objects:
            for kind in (LightningModule, LightningDataModule, Callback):
                self.parser.add_instantiator(make, kind, prepend=True)  # before Lightning's
            self.parser.instantiate_classes(self.config)
        for target, value in linked.items():
            try:
                json.dumps(value)
            except TypeError:
                raise InputError(
                    f"{target} is linked to a {type(value).__name__}, which no configuration holds. Link a number, a text or "
                    "a list."
                ) from None
        return linked


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_federated(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, FederatedDataModule)


def _main_file() -> Path:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "main.py")


def _path_of(kind: Any) -> str:
    """Return the import path of a class; one of the program itself is found in its file."""
    module = kind.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = _main_file().stem if spec is None else spec.name
        if not module.replace(".", "").isidentifier():
            raise InputError(
                f"{kind.__name__} is in {_main_file().name}, no name of a module. Move it to a file such as my_project.py."
            )
    return f"{module}.{kind.__qualname__}"

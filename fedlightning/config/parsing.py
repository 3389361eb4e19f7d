"""Parser of the command line and of YAML files, which makes the model, the data and the trainer of one command.

Its YAML loader has limits: what no configuration holds is refused as it is read.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from argparse import SUPPRESS, Action
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, get_loader, set_loader
from lightning import seed_everything
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from yaml import YAMLError

from fedlightning import __version__
from fedlightning.compat.lightning_runs import Maker
from fedlightning.config.class_names import class_names
from fedlightning.config.input_errors import InputError, constructor_sentence, root_cause
from fedlightning.config.short_forms import CLASS_PATHS, expand_file, expand_words, nested_options
from fedlightning.config.value_checks import (
    check_values,
    is_plain,
    refuse_expansion,
    refuse_form,
    refuse_misread,
    refuse_two_values,
)
from fedlightning.errors import ConfigurationError, users_line
from fedlightning.options import FIELDS, Seeds
from fedlightning.options.lightning_arguments import FORWARDED
from fedlightning.trainer import FederatedTrainer


def guard_yaml() -> None:
    """Let jsonargparse's YAML loader refuse what no configuration holds."""
    load = get_loader("yaml")
    if getattr(load, "guarded", False):
        return

    def loading(text: str) -> Any:
        refuse_form(text)
        try:
            config = load(text)
        except (ValueError, OverflowError, RecursionError) as error:
            raise YAMLError(f"it has a value that cannot be read: {error}") from None
        refuse_expansion(config)
        refuse_two_values(config)
        return expand_file(config)

    loading.guarded = True  # type: ignore[attr-defined]
    set_loader("yaml", loading, exceptions=(YAMLError,))


TITLES = {
    "trainer": "trainer (arguments of FederatedTrainer)",
    "model": "model (any LightningModule)",
    "data": "data (a federated data module; Partitioned splits any other)",
}
"""Section -> title of its options in the help."""
USAGE = dict.fromkeys(("validate", "test", "predict", "onboard", "leakage"), "--run FOLDER")
HOW = """

Options come from YAML files (--config, later ones override) and from the command line:
  --model Classifier --model.net DigitsCNN     a class by its name or full path, and its arguments
  --trainer.callbacks+=FedProx                 one more callback
  --trainer.callbacks.mu=0.1                   an argument of the last callback in the list
"""
"""Text below the description of a command in its help."""


class CommandLine(LightningCLI):
    """A command line that parses the words of one command, then makes the model, the data and the trainer.

    The options of a command are the arguments of the method of that name.

    Args:
        command: Name of a method.
        words: Words that follow it on the command line.
        **options: Other arguments of LightningCLI.
    """

    needs_model = True
    needs_data = True

    def __init__(self, command: str, words: Sequence[str], **options: Any) -> None:
        self.command = command
        guard_yaml()
        refuse_grids(words)
        super().__init__(
            save_config_callback=None,
            seed_everything_default=False,
            auto_configure_optimizers=False,
            parser_kwargs=self.parser_options(command),
            args=expand_words(full_paths(words)),
            run=False,
            **options,
        )

    # -- the parser ------------------------------------------------------------------------------------------------
    @classmethod
    def parser_options(cls, command: str) -> dict[str, Any]:
        """Return the arguments that the parser of a command is made with."""
        description = (inspect.getdoc(getattr(cls, command)) or "").partition("\n\nArgs:")[0]
        return {
            "prog": f"fedlightning {command}",
            "usage": f"fedlightning {command} {USAGE.get(command, '--config FILE [--config FILE ...]')} [OPTIONS]",
            "description": description + HOW,
            "formatter_class": Formatter,
            "dump_header": [f"fedlightning=={__version__}"],
            "exit_on_error": False,
            "allow_abbrev": False,
        }

    @classmethod
    def add_options(cls, parser: LightningArgumentParser, command: str) -> None:
        """Add the command's own options, then `trainer`, `model` and `data`."""
        cls.add_trainer(parser, command)
        parser.add_subclass_arguments(LightningModule, "model", fail_untyped=False, required=cls.needs_model)
        parser.add_subclass_arguments(LightningDataModule, "data", fail_untyped=False, required=cls.needs_data)
        tidy_help(parser, inspect.signature(getattr(cls, command)).parameters)

    @classmethod
    def add_trainer(cls, parser: LightningArgumentParser, command: str) -> None:
        """Add the command's own options and `trainer`."""
        parser.add_method_arguments(cls, command)
        parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, sub_configs=True, fail_untyped=False)
        written_out = {name: asdict(kind()) for name, (kind, _) in FIELDS.items()}
        written_out["engine"] = {"class_path": CLASS_PATHS["sequential"]}
        parser.set_defaults({f"trainer.{name}": value for name, value in written_out.items()})

    @classmethod
    def option_strings(cls, command: str) -> list[str]:
        """Return all options of a command, for completion."""
        parser = LightningArgumentParser(**cls.parser_options(command))
        cls.add_options(parser, command)
        options = [option for action in parser._actions for option in action.option_strings]
        return ["--config", "--print_config", *(o for o in options if o.startswith("--")), *nested_options()]

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add nothing: Lightning's `seed_everything` is `trainer.seed` here."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add all options of the command."""
        self.add_options(parser, self.command)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, without Lightning's warning about being called from Python, and check the values."""
        try:
            self.config = parser.parse_args(args)
        except UnicodeDecodeError as error:
            raise InputError(f"{_undecodable(args)} is not UTF-8 text ({error.reason}). Save it as UTF-8.") from None
        trainer = self.config.get("trainer")
        if not isinstance(trainer, Namespace):
            raise InputError(
                f"trainer is {trainer!r:.60}: it holds arguments by name, as in trainer: {{max_rounds: 3}}."
            )
        refuse_misread(args, self.config)
        check_values(self.config.as_dict(), FederatedTrainer)

    def _set_seed(self) -> None:
        """Do nothing: the seed is set in :meth:`before_instantiate_classes`."""

    # -- the objects -----------------------------------------------------------------------------------------------
    def before_instantiate_classes(self) -> None:
        """Set the seed, so that the same configuration gives the same first weights."""
        for source, seed in self.config.trainer.seed.items():
            if seed is not None and not 0 <= seed < 2**32:
                name = "trainer.seed" if source == "run" else f"trainer.seed.{source}"
                raise InputError(f"{name}={seed} must be a whole number from 0 to 4294967295.")
        first_weights = Seeds(**vars(self.config.trainer.seed)).of("initialisation")
        seed_everything(first_weights, workers=False, verbose=False)
        dumped: dict[str, Any] = {}

        def section(key: str) -> Any:
            if not dumped:
                dumped.update(plain_values(self.parser, self.config))
            return dumped.get(key)

        # In place of Lightning's, which give the hyper-parameters of a wrapper to what is inside it too.
        self.parser.add_instantiator(Maker(partial(section, "model")), LightningModule)
        self.parser.add_instantiator(Maker(partial(section, "data")), LightningDataModule)

    def instantiate_classes(self) -> None:
        """Make the objects."""
        try:
            super().instantiate_classes()
        except Exception as error:
            root = root_cause(error)
            if isinstance(root, OSError) or (users_line(root) and not isinstance(root, ValueError)):
                raise root from None
            raise InputError(constructor_sentence(root, self.config.as_dict())) from root

    def instantiate_trainer(self, **kwargs: Any) -> FederatedTrainer:  # type: ignore[override]
        """Return the trainer, which checks its arguments and writes nothing yet."""
        try:
            trainer = FederatedTrainer(**{**self.config_init.trainer, **kwargs})
        except ConfigurationError as error:
            sentence = str(error).removeprefix("FederatedTrainer got ")
            named = sentence.partition("=")[0] in self.config.trainer
            raise InputError(f"trainer.{sentence}" if named else f"trainer: {error}") from error
        trainer.config = self.run_config()
        return trainer

    def run_config(self) -> str:
        """Return the complete configuration of the run as YAML, from which the run can be made again."""
        config = self.config.clone()
        for key in set(vars(config)) - {"trainer", "model", "data"}:
            config.pop(key)
        if not Seeds(**vars(config.trainer.seed)).others():
            config.trainer.seed = config.trainer.seed.run
        text: str = self.parser.dump(config, skip_validation=True, skip_unset=False)
        # A text of digits of another script is dumped without quotes, without which it would be refused.
        text = re.sub(r"(?<=[-:] )\S+(?=\n)", lambda word: word[0] if is_plain(word[0]) else f"'{word[0]}'", text)
        return "# Run this again: fedlightning fit --config <this file>\n" + text

    def options(self) -> dict[str, Any]:
        """Return the values of the command's own options."""
        names = [name for name in inspect.signature(getattr(self, self.command)).parameters if name != "self"]
        return {name: self.config_init.get(name) for name in names}


def plain_values(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """Return a configuration as plain values, in the form in which LightningCLI keeps hyper-parameters."""
    text = parser.dump(config, skip_link_targets=False, skip_unset=False, format="yaml")
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def refuse_grids(words: Sequence[str]) -> None:
    """Refuse grids of `compare` among words of a command line: of an empty method nothing else would be said."""
    for word in words:
        path = Path(word.removeprefix("--config=").removeprefix("-c="))
        content = None
        with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):  # the parser says what is wrong
            content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.suffix in (".yaml", ".yml") else None
        if isinstance(content, dict) and isinstance(content.get("methods"), dict):
            raise InputError(f"{path} is a grid of many runs. Make them with fedlightning compare --grid {path}.")


def _undecodable(words: Sequence[str]) -> str:
    """Return the file among words of a command line that is not text."""
    for word in words:
        path = Path(word.rpartition("=")[2])
        with suppress(OSError, ValueError):
            if path.is_file():
                try:
                    path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    return str(path)
    return "a configuration"


class Formatter(DefaultHelpFormatter):
    """A formatter that keeps the line breaks of a description and leaves out lists of known classes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        filled = [
            part if "\n  " in part else textwrap.fill(" ".join(part.split()), width) for part in parts if part.strip()
        ]
        return "\n\n".join(filled)

    def _expand_help(self, action: Action) -> str:
        # The list of all callbacks alone fills several screens; `fedlightning algorithms` shows it better.
        return re.sub(r", known subclasses: [^)]*", "", super()._expand_help(action))


def tidy_help(parser: LightningArgumentParser, own_options: Container[str]) -> None:
    """Give the help its titles (the command's own options stand apart), remove markup, and add missing texts."""
    parser.description = _without_markup(parser.description or "")
    for group in parser._action_groups:
        for action in group._group_actions:
            key = action.dest.partition(".")[0]
            if key in TITLES:
                group.title = TITLES[key]
            elif action.dest in own_options:
                group.title = "this command"
            name = action.dest.removeprefix("trainer.")
            if isinstance(action.help, str) and action.help != SUPPRESS:
                action.help = _without_markup(action.help)
            if name in FORWARDED and not action.help:
                action.help = "As in lightning.pytorch.Trainer, for each client's training."


def _without_markup(text: str) -> str:
    """Return a text of a docstring as a terminal shows it.

    Example:
        >>> _without_markup("A ``float``, or :class:`~fedlightning.options.Seeds`.")
        'A float, or Seeds.'
    """
    return re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", text).replace("`", "")


def full_paths(words: Sequence[str]) -> list[str]:
    """Replace the names of our classes by their full paths, since other packages have the same names (torchvision's MLP).

    Example:
        >>> full_paths(["--model.net=MLP", "--trainer.callbacks+=FedProx"])
        ['--model.net=fedlightning.models.MLP', '--trainer.callbacks+=fedlightning.callbacks.FedProx']
    """
    out: list[str] = []
    names = class_names()
    pattern = r"(--(?:model|data|clients|trainer\.callbacks)[\w.]*\+?)"
    for word in words:
        both = re.fullmatch(pattern + r"=(\w+)", word)
        if both and both[2] in names:
            out.append(f"{both[1]}={names[both[2]]}")
        elif word in names and out and re.fullmatch(pattern, out[-1]):
            out.append(names[word])
        else:
            out.append(word)
    return out

"""Parts of the commands that make runs: their options, the list of commands, and that of failures."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedlightning.commands.terminal import FOLDED, WHOLE, print_table, say
from fedlightning.config.input_errors import InputError, suggestion
from fedlightning.experiments.execute import LOG, Task
from fedlightning.experiments.experiment import StudyFile
from fedlightning.experiments.ray_runner import ray_options

PASSED_ON = re.compile(r"--(?:trainer|model|data)(?:[.+=]|$)")
"""Options that are passed on to every run."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
CLI = "fedlightning.commands.run.Commands"
"""Class that parses the options of a run, by its import path, since it imports torch."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps line breaks and fits 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises errors instead of ending the program.

    Args:
        command: Name of the command.
        words: Words that must follow it.
        description: Text above the options.
        epilog: Text below the options.
        no_passing: Why no options can be passed on to runs; empty: they can.
    """

    def __init__(self, command: str, words: str, description: str, epilog: str, no_passing: str = "") -> None:
        name, self._no_passing = f"fedlightning {command}", no_passing
        super().__init__(
            name,
            " ".join(filter(None, (name, words, "[OPTIONS]"))),
            description,
            epilog,
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> Any:
        """Raise the error of a word that cannot be parsed."""
        raise InputError(f"{message}. See {self.prog} --help.")

    def parse(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options of the command, and the options to pass on to every run.

        Options about making runs are checked: `seeds` are numbers then, and `ray` says what Ray is to be.
        """
        command_words, passed = split_words(words)
        # files may stand before, between and behind options
        options, unknown = self.parse_known_intermixed_args(command_words)
        if unknown:
            options_of_command = [option for action in self._actions for option in action.option_strings]
            hint = suggestion(unknown[0].partition("=")[0], options_of_command)
            hint = hint or "Options of a run are passed on: --trainer.max_rounds=3, --model..., --data... ."
            raise InputError(f"there is no option '{unknown[0]}'. {hint}")
        if passed and self._no_passing:
            raise InputError(f"'{passed[0]}' cannot be given here: {self._no_passing}")
        if "jobs" in options and options.jobs < 1:
            raise InputError(f"--jobs is {options.jobs}: give the number of runs to make at a time, 1 or more.")
        if getattr(options, "seeds", None) is not None:
            options.seeds = parse_seeds(options.seeds)
        if "runner" in options:
            options.ray = ray_options(options.runner, options.ray_address, options.ray_cpus)
        return options, passed

    def option_strings(self) -> list[str]:
        """Return all options, for completion."""
        strings = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        return [option for option in strings if "=" not in option]  # passed-on options are shown as --trainer.KEY=...

    def add_list(self, *names: str, metavar: str, help: str, group: Any = None) -> None:
        """Add an option that may be repeated, to the parser or to a group of it."""
        (group or self).add_argument(
            *names, action="append", default=[], metavar=metavar, help=f"{help}; may be repeated"
        )

    def add_passed_on(self) -> None:
        """Show the options that are passed on to every run."""
        keys = "--trainer.KEY=..., --model.KEY=..., --data.KEY=..."
        self.add_argument(keys, dest="_", metavar="", help="options of every run")

    def add_runs(self, seeds: str) -> None:
        """Add the options about runs that `compare` and `sweep` have."""
        group = self.add_making(seeds, seeds)
        group.add_argument(
            "--vary",
            action="append",
            metavar="KEY",
            help="key to set to the seed beside trainer.seed, such as data.init_args.seed; may be repeated; default: "
            "data.init_args.val_seed (which samples validate) if the data have it; the test data stay the same",
        )

    def add_making(self, seeds: str | None, default_text: str) -> Any:
        """Add the options about how runs are made, and return their group.

        Args:
            seeds: Default of `--seeds`.
            default_text: The default in words.
        """
        group = self.add_argument_group("runs")
        group.add_argument(
            "--seeds",
            default=seeds,
            help=f"number of seeds (5 is 0,1,2,3,4), or the seeds (0,3,7); default: {default_text}",
        )
        group.add_argument(
            "--runner",
            choices=["processes", "ray"],
            default="processes",
            help="what makes the runs: processes of this machine (default), or Ray tasks, each with one thread, on this "
            "machine or a cluster",
        )
        group.add_argument(
            "--ray-address",
            metavar="ADDRESS",
            help="Ray cluster for --runner ray: auto or HOST:PORT; default: a Ray of the command's own on this machine",
        )
        group.add_argument(
            "--ray-cpus", type=float, metavar="N", help="CPUs that --runner ray sets aside for each run; default: 1"
        )
        self.add_jobs(group)
        group.add_argument("--dry-run", action="store_true", help="print the commands of all runs, and stop")
        return group

    def add_jobs(self, group: Any = None) -> None:
        """Add the options about how many runs are made at a time, and which again."""
        group = group or self
        group.add_argument(
            "--jobs", type=int, default=1, help="runs at a time (default: 1); if more, each has one thread and one GPU"
        )
        group.add_argument(
            "--redo", choices=["failed", "all"], help="make failed runs again, or all of them; default: neither"
        )

    def add_folder(self, name: str, default: str, what: str) -> None:
        """Add an option that is a folder."""
        help = f"{what}; default: {default}"
        self.add_argument(name, type=Path, default=Path(default), metavar="DIR", help=help)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into those of the command and those for every run (`--trainer...`, `--model...`, `--data...`).

    Example:
        >>> split_words(["a.yaml", "--trainer.max_rounds", "3", "--seeds=2"])
        (['a.yaml', '--seeds=2'], ['--trainer.max_rounds', '3'])
    """
    command_words: list[str] = []
    passed: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not PASSED_ON.match(word):
            command_words.append(word)
            continue
        passed.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            passed.append(rest.pop(0))
    return command_words, passed


def parse_seeds(text: str) -> list[int]:
    """Parse the value of `--seeds`.

    Example:
        >>> parse_seeds("3"), parse_seeds("0,3,7")
        ([0, 1, 2], [0, 3, 7])
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if (
        not parts
        or not all(part.isascii() and part.isdigit() for part in parts)
        or (len(parts) == 1 and parts == ["0"] and "," not in text)
    ):
        raise InputError(f"--seeds is '{text}': give a number of seeds (5), or seeds (0,3,7; one alone as 3,).")
    return list(dict.fromkeys(map(int, parts))) if "," in text else list(range(int(parts[0])))


def show_commands(tasks: Sequence[Task], screen: Console) -> None:
    """Print the command of each run."""
    for task in tasks:
        words = shlex.join(task.commands()[0])
        say(screen, f"fedlightning {words}", markup=False)


def show_failures(study: StudyFile, failed: Sequence[dict[str, Any]], screen: Console) -> None:
    """Print which runs failed, why, and where their output is."""
    if not failed:
        return
    screen.print(f"\n{len(failed)} run{'s' if len(failed) > 1 else ''} failed:", style="bold red")
    columns = {"method": WHOLE, "seed": {"justify": "right"}, "why": FOLDED}
    rows = ([escape(run["run"]), str(run["seed"]), escape(str(run["error"]))] for run in failed)
    print_table(screen, columns, rows)
    log = study.folder / failed[0]["folder"] / LOG
    say(screen, f"Output: {log}. Make them again: the same command with --redo failed.")

"""What `compare` and `sweep` share: reading their words, making the runs, saying how they ended."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.config.errors import InputError, suggestion
from fedlightning.experiments.children import Main
from fedlightning.experiments.execute import LOG, Task, Watcher, execute
from fedlightning.experiments.progress import View
from fedlightning.experiments.study_file import StudyFile

PASSED_ON = re.compile(r"--(?:trainer|model|data)(?:[.+=]|$)")
INTERRUPTED = 130
CLI = "fedlightning.commands.run:Commands"
"""The class that parses a run's options; by name, since it imports torch."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks, and fits 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving the program."""

    def __init__(self, command: str, **arguments: Any) -> None:
        super().__init__(
            prog=f"fedlightning {command}",
            formatter_class=_Help,
            allow_abbrev=False,
            **arguments,
        )

    def error(self, message: str) -> Any:
        """Say what is wrong in a sentence.

        Raises:
            InputError: always.
        """
        raise InputError(f"{message}. See {self.prog} --help.")

    def parse(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The command's own options, and the options to pass on to every run.

        Raises:
            InputError: an option that is neither.
        """
        own, passed = split_words(words)
        options, unknown = self.parse_known_args(own)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            hint = suggestion(unknown[0].partition("=")[0], known)
            hint = hint or "Options of a run are passed on: --trainer.max_rounds=3, --model..., --data... ."
            raise InputError(f"there is no option '{unknown[0]}'. {hint}")
        return options, passed

    def option_strings(self) -> list[str]:
        """All options, for completion."""
        found = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        return [option for option in found if "=" not in option]  # passed-on options are shown as --trainer.KEY=...

    def add_runs(self, seeds: str) -> None:
        """The options about runs that both commands have."""
        group = self.add_argument_group("runs")
        group.add_argument(
            "--seeds", default=seeds, help=f"how many seeds (5 is 0,1,2,3,4), or which ones (0,3,7); default: {seeds}"
        )
        group.add_argument(
            "--vary",
            action="append",
            metavar="KEY",
            help="a key that is set to the seed beside trainer.seed, such as data.init_args.seed; may be repeated; "
            "default: data.init_args.val_seed where the data have it (which samples validate); the test data stay",
        )
        group.add_argument(
            "--jobs", type=int, default=1, help="runs at a time; with more than one, each has one thread and one GPU"
        )
        group.add_argument(
            "--redo", choices=["failed", "all"], help="make failed runs again, or all of them; default: neither"
        )
        group.add_argument("--dry-run", action="store_true", help="say what would be run, and stop")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own words, and those that are for every run: `--trainer...`, `--model...`, `--data...`."""
    own: list[str] = []
    passed: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not PASSED_ON.match(word):
            own.append(word)
            continue
        passed.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            passed.append(rest.pop(0))
    return own, passed


def parse_seeds(text: str) -> list[int]:
    """`5` as 0 to 4, `0,3,7` as these.

    Raises:
        InputError: for anything else.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if (
        not parts
        or not all(part.isdigit() for part in parts)
        or (len(parts) == 1 and parts == ["0"] and "," not in text)
    ):
        raise InputError(f"--seeds is '{text}': give a number of seeds (5), or seeds (0,3,7; one alone as 3,).")
    return list(dict.fromkeys(map(int, parts))) if "," in text else list(range(int(parts[0])))


def check_jobs(jobs: int) -> int:
    """`jobs`, if it is a number of runs.

    Raises:
        InputError: below 1.
    """
    if jobs < 1:
        raise InputError(f"--jobs is {jobs}: give the number of runs to make at a time, 1 or more.")
    return jobs


def gpus_to_share(count: int) -> list[str]:
    """What each run's `CUDA_VISIBLE_DEVICES` may be: those that are visible here."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(index) for index in range(count)])[:count]


def console() -> Console:
    """The terminal; 100 columns where there is none to ask."""
    return Console() if sys.stdout.isatty() else Console(width=100)


def make_runs(
    study: StudyFile,
    tasks: Sequence[Task],
    jobs: int,
    gpus: Sequence[str],
    screen: Console,
    main: Main,
    watchers: Sequence[Watcher] = (),
) -> bool:
    """Make the runs and keep `study.json` up to date.

    Args:
        study: where it is written; tasks, jobs, gpus: see :func:`fedlightning.experiments.execute.execute`.
        screen: where it is shown; main: the command line.
        watchers: who is told too, after the file is written; what they raise stops all runs.

    Returns:
        Whether it went through: `False` after Ctrl-C (or SIGTERM), when all runs have been stopped.
    """
    known: dict[str, list[float]] = {}
    for run in study.data["runs"]:
        if run["state"] == "done":
            known.setdefault(run["run"], []).append(run["seconds"])
    try:
        with _terminable(), View(tasks, jobs, known, screen) as view:
            execute(tasks, min(jobs, max(1, len(tasks))), gpus, [study, view, *watchers], main)
    except KeyboardInterrupt:
        study.save()
        return False
    return True


@contextmanager
def _terminable() -> Iterator[None]:
    """A polite request to end works like Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_failures(study: StudyFile, failed: Sequence[dict[str, Any]], screen: Console) -> None:
    """Which runs failed, why, and where their output is."""
    if not failed:
        return
    screen.print(f"\n{len(failed)} run{'s' if len(failed) > 1 else ''} failed:", style="bold red")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("seed", justify="right")
    table.add_column("why", overflow="fold")
    for run in failed:
        table.add_row(escape(run["run"]), str(run["seed"]), escape(str(run["error"])))
    screen.print(table)
    log = study.folder / failed[0]["folder"] / LOG
    screen.print(
        f"Output: {log}. Make them again: the same command with --redo failed.", soft_wrap=True, highlight=False
    )


def shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    full = path.resolve()
    return str(full.relative_to(Path.cwd()) if full.is_relative_to(Path.cwd()) else full)

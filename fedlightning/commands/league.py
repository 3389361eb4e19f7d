"""`fedlightning league`: many methods on several tasks, with the same budget of tuning, chosen on validation data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.study import CLI, INTERRUPTED, Parser, check_jobs, gpus_to_share, make_runs
from fedlightning.commands.terminal import console, say, shown
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.errors import InputError
from fedlightning.experiments.children import Main
from fedlightning.experiments.execute import Task, Watcher
from fedlightning.experiments.league.reading import League, LeagueTask, chosen, read_league
from fedlightning.experiments.league.rows import Row, read_rows, write_row
from fedlightning.experiments.league.trials import Contest
from fedlightning.experiments.reproduce.runs import folder_of, missing
from fedlightning.experiments.study_file import StudyFile, only_one

LEAGUE = FOLDER / "league/league.yaml"
"""The league that comes with the package."""
DESCRIPTION = """\
Tune every method with the same number of trials, on validation data only, and test it on fresh splits.

A trial draws values from the method's space; the learning rate is always in it, and the same trial
has the same learning rate in all methods. The trial with the lowest validation loss is run again
with each of the league's seeds, which draw other splits, and only these runs are tested.

Without a TASK the tasks and methods are listed; all stands for every task. One method on one task
can be run alone. Finished runs are kept, so the same command again goes on."""
EXAMPLES = """\
examples:
  fedlightning league
  fedlightning league digits --methods FedProx,Ditto
  fedlightning league all --data-root data --minutes 60        # a slice; the next one goes on
  fedlightning league my_task --league my/league.yaml

Exit codes: 0 done, 1 a method failed, 2 bad input, 130 interrupted, or the time was up.
"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = Parser("league", "[TASK ...]", DESCRIPTION, EXAMPLES)
    made.add_argument("tasks", nargs="*", metavar="TASK", help="tasks to run, or all; none: list what there is")
    made.add_argument("--methods", default="", metavar="A,B", help="methods to run; default: all")
    made.add_argument("--league", type=Path, default=LEAGUE, metavar="FILE", help="tasks, methods, spaces and budget")
    root, out = Path("data"), Path("runs/league")
    made.add_argument(
        "--data-root", type=Path, default=root, metavar="DIR", help=f"folder of the data; default: {root}"
    )
    made.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"folder of the runs; default: {out}")
    made.add_argument("--results", type=Path, metavar="DIR", help="folder of TASK.json; default: results in --out")
    made.add_argument("--minutes", type=float, metavar="N", help="stop after this time; the same command goes on")
    made.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    made.add_argument(
        "--redo", choices=["failed", "all"], help="make failed runs again, or all of them; default: neither"
    )
    return made


def league(words: Sequence[str], main: Main) -> int:
    """Carry out the command and return its exit code."""
    options, passed = parser().parse(words)
    if passed:
        raise InputError(
            f"'{passed[0]}' cannot be given here: every method has what the league's files say. Copy them."
        )
    check_jobs(options.jobs)
    read = read_league(options.league, FOLDER)
    results, screen = options.results or options.out / "results", console()
    if not options.tasks:
        show_league(read, results, screen)
        return 0
    tasks = chosen([] if options.tasks == ["all"] else options.tasks, read.tasks, "task")
    methods = chosen([name.strip() for name in options.methods.split(",") if name.strip()], read.methods, "method")
    until = Until(options.minutes)
    make = partial(_make, jobs=options.jobs, screen=screen, main=main, until=until)
    failed = False
    for task in (read.tasks[name] for name in tasks):
        lacking = next(
            (missing(one, options.data_root) for one in task.data if folder_of(one, options.data_root) is None), ""
        )
        if lacking:
            say(screen, f"{task.name} is not run: {lacking}.", markup=False)
            continue
        with only_one(options.out / task.name):
            study = StudyFile(options.out / task.name)
            study.data |= {"command": "fedlightning league"}
            for name in (name for name in methods if name not in task.without):
                contest = Contest(read, task, read.methods[name], options.data_root, study, CLI, make, options.redo)
                row = read_rows(results / f"{task.name}.json").get(name)
                if row is None or row["setting"] != read.setting(task, read.methods[name]) or options.redo:
                    row = None if until.over else contest.carry_out()
                    if row is None:
                        say(screen, "\nInterrupted, or the time was up. The same command goes on from here.")
                        return INTERRUPTED
                    write_row(results / f"{task.name}.json", row)
                show_row(task, row, screen)
                failed |= "failed" in row
        say(screen, f"Rows: {shown(results / f'{task.name}.json')}")
    return 1 if failed else 0


class Until(Watcher):
    """A watcher that stops all runs when the time is up, as Ctrl-C does.

    Args:
        minutes: The time; `None` never stops.
    """

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() > self._end

    def tick(self, running: Mapping[Task, float]) -> None:
        """Stop all runs if the time is up."""
        if self.over:
            raise KeyboardInterrupt


def _make(study: StudyFile, tasks: Sequence[Task], *, jobs: int, screen: Console, main: Main, until: Until) -> bool:
    return make_runs(study, tasks, jobs, gpus_to_share(0), screen, main, [until])


def show_league(read: League, results: Path, screen: Console) -> None:
    """Print the tasks with what has been run of them, and the methods by group."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "what", "run"):
        table.add_column(column, overflow="fold")
    for name, task in read.tasks.items():
        done = [one for one in read_rows(results / f"{name}.json") if one in read.methods]
        table.add_row(name, escape(task.title), f"{len(done)} of {len(read.methods) - len(task.without)}")
    print_whole(screen, table)
    for group in dict.fromkeys(method.group for method in read.methods.values()):
        names = ", ".join(name for name, method in read.methods.items() if method.group == group)
        say(screen, f"{group}: {names}", markup=False)
    say(screen, f"\n{read.trials} trials of each method on each task, then {len(read.seeds)} seeds.")


def show_row(task: LeagueTask, row: Row, screen: Console) -> None:
    """Print the result of a method on a task."""
    scores = [run["score"] for run in row.get("seeds", {}).values()]
    values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row.get("best", {}).items())
    mean = (
        "diverged" if None in scores else f"{sum(scores) / len(scores):.3f}" if scores else f"failed: {row['failed']}"
    )
    say(screen, f"{task.name}, {row['method']}: {task.metric} {mean} ({values or 'no trial chosen'})", markup=False)

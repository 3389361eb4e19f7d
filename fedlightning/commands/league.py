"""`fedlightning league`: many methods on several tasks, with the same budget of tuning, chosen on validation data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.study_options import CLI, INTERRUPTED, Parser
from fedlightning.commands.terminal import FOLDED, console, print_table, say, shown
from fedlightning.experiments.children import Main
from fedlightning.experiments.contest import Contest, League, LeagueTask, Row, chosen, read_league, read_rows, write_row
from fedlightning.experiments.execute import Task, Watcher
from fedlightning.experiments.experiment import Experiment
from fedlightning.experiments.reproduce.table_runs import missing_data

LEAGUE = FOLDER / "league/league.yaml"
"""The league that comes with the package."""
DESCRIPTION = """\
Tune every method with the same number of trials, on validation data only, and test it on fresh splits.

A trial has values from the method's space; the learning rate is always in it, and the same trial
has the same learning rate in all methods. All trials get a third of the budget, the better half all
of it, the best three a second seed. The one with the lowest validation loss is run again with each
of the league's seeds, which draw other splits, and only these runs are tested. The budget of a task
is a number of gradient evaluations: that of FedAvg in its rounds.

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
    why = "every method has what the league's files say. Copy them."
    command = Parser("league", "[TASK ...]", DESCRIPTION, EXAMPLES, why)
    command.add_argument("tasks", nargs="*", metavar="TASK", help="tasks to run, or all; none: list what there is")
    command.add_argument("--methods", default="", metavar="A,B", help="methods to run; default: all")
    command.add_argument(
        "--league", type=Path, default=LEAGUE, metavar="FILE", help="tasks, methods, spaces and budget"
    )
    command.add_folder("--data-root", "data", "folder of the data")
    command.add_folder("--out", "runs/league", "folder of the runs")
    command.add_argument("--results", type=Path, metavar="DIR", help="folder of TASK.json; default: results in --out")
    command.add_argument("--minutes", type=float, metavar="N", help="stop after this time; the same command goes on")
    command.add_jobs()
    return command


def league(words: Sequence[str], main: Main) -> int:
    """Carry out the command and return its exit code."""
    options, _ = parser().parse(words)
    read = read_league(options.league, FOLDER)
    results, screen = options.results or options.out / "results", console()
    if not options.tasks:
        show_league(read, results, screen)
        return 0
    tasks = chosen([] if options.tasks == ["all"] else options.tasks, read.tasks, "task")
    methods = chosen([name.strip() for name in options.methods.split(",") if name.strip()], read.methods, "method")
    until, failed = Until(options.minutes), False
    for task in (read.tasks[name] for name in tasks):
        lacking = missing_data(task.data, options.data_root)
        if lacking:
            say(screen, f"{task.name} is not run: {lacking}.", markup=False)
            continue
        experiment = Experiment(options.out / task.name, screen, main, options.jobs, options.redo)
        file = results / f"{task.name}.json"
        with experiment.lock(command="fedlightning league"):
            for method in (read.methods[name] for name in methods if name not in task.without):
                row = read_rows(file).get(method.name)
                if row is None or "failed" in row or row["setting"] != read.setting(task, method) or options.redo:
                    contest = Contest(read, task, method, options.data_root, experiment, CLI, [until])
                    row = None if until.over else contest.carry_out()
                    if row is None:
                        say(screen, "\nInterrupted, or the time was up. The same command goes on from here.")
                        return INTERRUPTED
                    write_row(file, row)
                show_row(task, row, screen)
                failed |= "failed" in row
        say(screen, f"Rows: {shown(file)}")
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


def show_league(read: League, results: Path, screen: Console) -> None:
    """Print the tasks with what has been run of them, and the methods by group."""
    rows = []
    for name, task in read.tasks.items():
        done = [
            name_of_method for name_of_method in read_rows(results / f"{name}.json") if name_of_method in read.methods
        ]
        rows.append([name, escape(task.title), f"{len(done)} of {len(read.methods) - len(task.without)}"])
    print_table(screen, dict.fromkeys(("task", "what", "run"), FOLDED), rows)
    for group in dict.fromkeys(method.group for method in read.methods.values()):
        names = ", ".join(name for name, method in read.methods.items() if method.group == group)
        say(screen, f"{group}: {names}", markup=False)
    say(
        screen,
        f"\n{read.trials} trials of each method on each task with a third of the budget, the best {read.keep} with all of "
        f"it, the best {read.finalists} with another seed; then {len(read.seeds)} seeds.",
    )


def show_row(task: LeagueTask, row: Row, screen: Console) -> None:
    """Print the result of a method on a task."""
    scores = [run["score"] for run in row.get("seeds", {}).values()]
    values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row.get("best", {}).items())
    mean = (
        "diverged" if None in scores else f"{sum(scores) / len(scores):.3f}" if scores else f"failed: {row['failed']}"
    )
    say(screen, f"{task.name}, {row['method']}: {task.metric} {mean} ({values or 'no trial chosen'})", markup=False)

"""Execution of many runs, a number of them at a time, and who is told about it: a progress bar, and a check of the first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedlightning.config.input_errors import InputError, suggestion
from fedlightning.experiments.children import Child, Main, Outcome
from fedlightning.scores.metric_names import bare

LOG = "log.txt"
_TICK = 0.5  # seconds between looks at the runs


@dataclass(frozen=True)
class Task:
    """A run to be made.

    Attributes:
        name: Name of the method.
        seed: Seed of the run.
        folder: Folder of the run.
        words: `fit` and its options, without those that say where the files go.
        rounds: Number of rounds.
        then: Further commands for the same process.
    """

    name: str
    seed: int
    folder: Path
    words: list[str] = field(repr=False, compare=False)
    rounds: int = 1
    then: list[list[str]] = field(default_factory=list, repr=False, compare=False)

    @property
    def resumable(self) -> bool:
        """Whether the folder has a state to resume from."""
        return (self.folder / "checkpoints/last/manifest.json").exists()

    def commands(self) -> list[list[str]]:
        """Return the commands that make the run, or resume it."""
        place = [
            f"--trainer.default_root_dir={self.folder.parent.parent}",
            f"--trainer.name={self.folder.parent.name}",
            f"--trainer.version={self.folder.name}",
        ]
        resume = [f"--resume={self.folder}"] if self.resumable else []
        return [[*self.words, *place, *resume], *self.then]

    def clean(self) -> None:
        """Remove the files of a run that cannot be resumed, except its log."""
        if self.folder.exists() and not self.resumable:
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOG:
                    path.unlink()


class Watcher:
    """Base of objects that are told about the progress of runs. What they raise stops all runs."""

    def started(self, task: Task, resumed: bool) -> None:
        """Called when a run starts or is resumed."""

    def ended(self, task: Task, outcome: Outcome) -> None:
        """Called when a run has ended."""

    def tick(self, running: Mapping[Task, float]) -> None:
        """Called about twice a second with the runs that are going and the seconds since their start."""


class Running(Protocol):
    """A run that is going, as :class:`Child` is one."""

    @property
    def sentinel(self) -> int:
        """Handle for `multiprocessing.connection.wait`."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""

    def ended(self) -> bool:
        """Return True if the run has ended."""

    def outcome(self) -> Outcome:
        """Wait for the end and return how it ended."""

    def kill(self) -> None:
        """Kill the run, and return when it is gone."""


def execute(
    tasks: Sequence[Task],
    jobs: int,
    gpus: Sequence[str],
    watchers: Sequence[Watcher],
    main: Main,
    start: Callable[[Task, int], Running] | None = None,
) -> None:
    """Make every run, `jobs` at a time. A run that fails does not stop the others."""

    def process(task: Task, slot: int) -> Running:
        gpu = gpus[slot % len(gpus)] if gpus and jobs > 1 else None
        return Child(task.commands(), task.folder / LOG, 1 if jobs > 1 else None, gpu, main)

    waiting, free = list(tasks), list(range(jobs))
    running: dict[int, tuple[Task, Running]] = {}
    try:
        while waiting or running:
            while waiting and free:
                task, slot = waiting.pop(0), free.pop(0)
                resumed = task.resumable
                task.clean()
                running[slot] = task, (start or process)(task, slot)
                for watcher in watchers:
                    watcher.started(task, resumed)
            wait([child.sentinel for _, child in running.values()], timeout=_TICK)
            for slot, (task, child) in list(running.items()):
                if child.ended():
                    del running[slot]
                    free = sorted([*free, slot])
                    for watcher in watchers:
                        watcher.ended(task, child.outcome())
            for watcher in watchers:
                watcher.tick({task: child.seconds for task, child in running.values()})
    finally:
        for _, child in running.values():
            child.kill()


# -- the first result --------------------------------------------------------------------------------------------------
class FirstResult(Watcher):
    """A watcher that checks the folder of the first run that succeeds.

    Args:
        check: Function of a folder. If it raises `InputError`, the other runs are stopped; finished ones are kept.
    """

    def __init__(self, check: Callable[[Path], object]) -> None:
        self.check = check
        self.waiting = True

    def look(self, folder: Path) -> None:
        """Check the run in `folder`, unless another one has been checked."""
        if self.waiting:
            self.waiting = False
            self.check(folder)

    def ended(self, task: Task, outcome: Outcome) -> None:
        """Check the first run that succeeds; a failed one says nothing about metrics."""
        if outcome.error is None:
            self.look(task.folder)


def check_metric(folder: Path, metric: str) -> None:
    """Check that a finished run has test scores of `metric`, if it has any."""
    from fedlightning.study.finished_runs import load_run
    from fedlightning.study.run_scores import RunScores

    metrics = RunScores(load_run(folder)).metrics("test")
    kept = "Finished runs are kept: the same command with another --metric goes on from there."
    refuse_unknown(metric, metrics, f"the run in {folder} has no such score on test data. It has", kept)


def refuse_unknown(metric: str, metrics: Sequence[str], fault: str, otherwise: str) -> None:
    """Refuse a metric that is not one of those known, if any is; `fault` and `otherwise` say where, and what then."""
    if metrics and bare(metric) not in metrics:
        words = [
            f"--metric is '{metric}', and {fault} {', '.join(metrics)}.",
            suggestion(bare(metric), metrics),
            otherwise,
        ]
        raise InputError(" ".join(filter(None, words)))


# -- progress ----------------------------------------------------------------------------------------------------------
_TAIL = 4096  # bytes of metrics.csv in which the last line is looked for


def rounds_begun(folder: Path) -> int:
    """Return the newest round in the `metrics.csv` of a run, 0 before the first."""
    path = folder / "metrics.csv"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        # The first line may be cut off, and the last one half written.
        lines = file.read().decode(errors="replace").split("\n")[1:-1]
    numbers = [line.partition(",")[0] for line in lines]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


class Estimate:
    """An estimate of the time that is left.

    A run is expected to take as long as the finished runs of its method. If there is none yet, the finished rounds of a
    running one are extrapolated; else the mean over the other methods is taken.

    Args:
        tasks: Runs to be made.
        jobs: Number of runs at a time.
        seconds_by_name: Method -> seconds of runs that were finished before.
    """

    def __init__(self, tasks: Sequence[Task], jobs: int, seconds_by_name: Mapping[str, Sequence[float]]) -> None:
        self.left, self.jobs = list(tasks), jobs
        self.finished = {name: list(seconds) for name, seconds in seconds_by_name.items()}

    def ended(self, task: Task, seconds: float | None) -> None:
        """Record the end of a run. `seconds` is `None` if it measures nothing for other runs."""
        self.left.remove(task)
        if seconds is not None:
            self.finished.setdefault(task.name, []).append(seconds)

    def seconds(self, running: Mapping[Task, tuple[float, int]]) -> float | None:
        """Return the seconds that are left, or `None` while nothing is known."""
        expected = {name: sum(values) / len(values) for name, values in self.finished.items() if values}
        for task, (spent, rounds) in running.items():
            if rounds:
                expected.setdefault(task.name, spent * max(task.rounds, rounds) / rounds)
        if not expected:
            return None
        mean = sum(expected.values()) / len(expected)
        left = 0.0
        for task in self.left:
            spent = running[task][0] if task in running else 0.0
            left += max(expected.get(task.name, mean) - spent, 0.0)
        return left / max(1, min(self.jobs, len(self.left)))


class View(Watcher):
    """A progress bar of all runs with the time left. Without a terminal, one line for each start and end of a run.

    Args:
        tasks: Runs to be made.
        jobs: Number of runs at a time.
        seconds_by_name: Method -> seconds of runs that were finished before.
        console: Console to print to.
    """

    def __init__(
        self, tasks: Sequence[Task], jobs: int, seconds_by_name: Mapping[str, Sequence[float]], console: Console
    ) -> None:
        self.estimate = Estimate(tasks, jobs, seconds_by_name)
        self.console, self.total = console, len(tasks)
        self.done = self.failed = 0
        self.before: dict[Task, int] = {}
        self.bar: Progress | None = None

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("[bold]runs"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=self.console,
                transient=True,
            )
            self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def started(self, task: Task, resumed: bool) -> None:
        """Note the start of a run."""
        self.before[task] = rounds_begun(task.folder) if resumed else 0
        if self.bar is None:
            again = f", goes on after round {self.before[task]} of {task.rounds}" if resumed else ""
            self._say(f"started {task.name}, seed {task.seed}{again}")

    def ended(self, task: Task, outcome: Outcome) -> None:
        """Note the end of a run, and print it."""
        whole = outcome.error is None and not self.before.get(task)
        self.estimate.ended(task, outcome.seconds if whole else None)
        self.done += outcome.error is None
        self.failed += outcome.error is not None
        how = f"done in {duration(outcome.seconds)}"
        if outcome.error is not None:
            how = f"FAILED: {outcome.error.rstrip('.')}. See {task.folder / LOG}."
        self._say(f"[{self.done + self.failed}/{self.total}] {task.name}, seed {task.seed}: {how}")

    def tick(self, running: Mapping[Task, float]) -> None:
        """Update the bar."""
        if self.bar is None:
            return
        rounds = {task: rounds_begun(task.folder) for task in running}
        fresh = {task: (seconds, rounds[task] - self.before[task]) for task, seconds in running.items()}
        left = self.estimate.seconds(fresh)
        going = [f"{task.name} {task.seed} ({rounds[task]}/{task.rounds})" for task in running]
        more = f" +{len(going) - 3}" if len(going) > 3 else ""
        parts = [f"{self.failed} failed"] if self.failed else []
        parts += [f"{duration(left)} left"] if left is not None else []
        parts += [", ".join(going[:3]) + more] if going else []
        self.bar.update(self.bar.task_ids[0], completed=self.done + self.failed, description=escape("  ".join(parts)))

    def _say(self, text: str) -> None:
        self.console.print(escape(text), highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Write a duration.

    Example:
        >>> duration(75)
        '1 min 15 s'
    """
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"

"""Progress of many runs on the terminal: how many are done, which are running, and the time left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedlightning.experiments.children import Outcome
from fedlightning.experiments.execute import LOG, Task, Watcher

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
        known: Method -> seconds of runs that were finished before.
    """

    def __init__(self, tasks: Sequence[Task], jobs: int, known: Mapping[str, Sequence[float]]) -> None:
        self.left, self.jobs = list(tasks), jobs
        self.finished = {name: list(seconds) for name, seconds in known.items()}

    def ended(self, task: Task, seconds: float | None) -> None:
        """Record the end of a run. `seconds` is `None` if it is no measure for other runs."""
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
        known: Method -> seconds of runs that were finished before.
        console: Console to print to.
    """

    def __init__(
        self, tasks: Sequence[Task], jobs: int, known: Mapping[str, Sequence[float]], console: Console
    ) -> None:
        self.estimate = Estimate(tasks, jobs, known)
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
        how = f"done in {duration(outcome.seconds)}" if outcome.error is None else f"FAILED: {outcome.error}"
        count = f"[{self.done + self.failed}/{self.total}]"
        self._say(
            f"{count} {task.name}, seed {task.seed}: {how}" + (f" See {task.folder / LOG}." if outcome.error else "")
        )

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

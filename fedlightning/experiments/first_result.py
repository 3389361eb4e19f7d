"""A look at the first run that ends well: a metric that it does not have, no other run will have either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fedlightning.config.errors import InputError, suggestion
from fedlightning.experiments.children import Outcome
from fedlightning.experiments.execute import Task


class FirstResult:
    """Watches runs until one has ended well, and has `check` look at its folder.

    Args:
        check: raises `InputError` where the other runs had better not be made; they are stopped then, and those that
            are finished stay.
    """

    def __init__(self, check: Callable[[Path], object]) -> None:
        self.check = check
        self.waiting = True

    def look(self, folder: Path) -> None:
        """Check the run in `folder`, unless another one was."""
        if self.waiting:
            self.waiting = False
            self.check(folder)

    def started(self, task: Task, resumed: bool) -> None:
        """Nothing to look at yet."""

    def ended(self, task: Task, outcome: Outcome) -> None:
        """Look at the first one; what failed says nothing about metrics."""
        if outcome.error is None:
            self.look(task.folder)

    def tick(self, running: Mapping[Task, float]) -> None:
        """Nothing to look at."""


def check_metric(folder: Path, metric: str) -> None:
    """Refuse a metric that a finished run was tested for others than.

    Args:
        folder: the run's; metric: with or without `test_`.

    Raises:
        InputError: it has test scores, but none of this name; the sentence names those there are.
    """
    from fedlightning.scoring.metrics import bare
    from fedlightning.study.measures import RunScores
    from fedlightning.study.runs import load_run

    known = RunScores(load_run(folder)).metrics("test")
    if known and bare(metric) not in known:
        hint = suggestion(bare(metric), known)
        raise InputError(
            f"--metric is '{metric}', and the run in {folder} has no such score on test data. It has {', '.join(known)}. "
            f"{f'{hint} ' if hint else ''}Finished runs are kept: the same command with another --metric goes on from there."
        )

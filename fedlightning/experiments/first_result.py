"""A check of the first run that succeeds: a metric that it does not have is missing in all other runs, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedlightning.config.errors import InputError, suggestion
from fedlightning.experiments.children import Outcome
from fedlightning.experiments.execute import Task, Watcher


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
    from fedlightning.scores.metrics import bare
    from fedlightning.study.measures import RunScores
    from fedlightning.study.runs import load_run

    known = RunScores(load_run(folder)).metrics("test")
    if known and bare(metric) not in known:
        hint = suggestion(bare(metric), known)
        raise InputError(
            f"--metric is '{metric}', and the run in {folder} has no such score on test data. It has {', '.join(known)}. "
            f"{f'{hint} ' if hint else ''}Finished runs are kept: the same command with another --metric goes on from there."
        )


def check_known(metric: str, known: Sequence[str]) -> None:
    """Check a metric before the first run."""
    from fedlightning.scores.metrics import bare

    if known and bare(metric) not in known:
        hint = suggestion(bare(metric), known)
        raise InputError(
            f"--metric is '{metric}', and the runs will have no such score on test data. They will have "
            f"{', '.join(known)}.{f' {hint}' if hint else ''} No run was made."
        )

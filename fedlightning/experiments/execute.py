"""Execution of many runs, a number of them at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

from fedlightning.experiments.children import Child, Main, Outcome

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

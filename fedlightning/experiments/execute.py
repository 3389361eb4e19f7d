"""Keeps a number of runs going until none is left."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

from fedlightning.experiments.children import Child, Main, Outcome

LOG = "log.txt"
_TICK = 0.5  # seconds between looks at the runs


@dataclass(frozen=True)
class Task:
    """One run to make.

    Attributes:
        name, seed: what it is called; folder: where its files go.
        words: `fit` and its options, all but where the files go.
        rounds: how many it has; then: further commands to give in the same process.
    """

    name: str
    seed: int
    folder: Path
    words: list[str] = field(repr=False, compare=False)
    rounds: int = 1
    then: list[list[str]] = field(default_factory=list, repr=False, compare=False)

    @property
    def resumable(self) -> bool:
        """Whether there is a state to go on from."""
        return (self.folder / "checkpoints/last/manifest.json").exists()

    def commands(self) -> list[list[str]]:
        """The commands that make the run, or go on with it."""
        place = [
            f"--trainer.default_root_dir={self.folder.parent.parent}",
            f"--trainer.name={self.folder.parent.name}",
            f"--trainer.version={self.folder.name}",
        ]
        resume = [f"--resume={self.folder}"] if self.resumable else []
        return [[*self.words, *place, *resume], *self.then]

    def clean(self) -> None:
        """Remove what a run left that cannot be gone on with; its log stays."""
        if self.folder.exists() and not self.resumable:
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOG:
                    path.unlink()


class Watcher(Protocol):
    """Who wants to know how the runs get on."""

    def started(self, task: Task, resumed: bool) -> None:
        """A run begins, or goes on."""

    def ended(self, task: Task, outcome: Outcome) -> None:
        """A run is over."""

    def tick(self, running: Mapping[Task, float]) -> None:
        """Time passes; `running` says for how many seconds each run has been going."""


def execute(tasks: Sequence[Task], jobs: int, gpus: Sequence[str], watchers: Sequence[Watcher], main: Main) -> None:
    """Make every run, `jobs` at a time; a run that fails does not stop the others.

    Args:
        tasks: in the order in which they are begun.
        jobs: with more than one, every run has one thread and one GPU, given in turn.
        gpus: what `CUDA_VISIBLE_DEVICES` may hold; empty without GPUs.
        watchers: are told what happens.
        main: the command line that makes a run.

    Raises:
        KeyboardInterrupt: Ctrl-C; all runs are stopped and can be gone on with.
    """
    waiting, free = list(tasks), list(range(jobs))
    running: dict[int, tuple[Task, Child]] = {}
    try:
        while waiting or running:
            while waiting and free:
                task, slot = waiting.pop(0), free.pop(0)
                resumed = task.resumable
                task.clean()
                gpu = gpus[slot % len(gpus)] if gpus and jobs > 1 else None
                running[slot] = task, Child(task.commands(), task.folder / LOG, 1 if jobs > 1 else None, gpu, main)
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

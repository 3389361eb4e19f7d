"""The folder of a run: ``runs/<name>/<version>/`` and the files in it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedlightning.run.metrics import MetricsFile
from fedlightning.scores.rows import Row
from fedlightning.storage.files import is_writer, of_first_rank, readable_json, write_text_atomically, writing

RUN_FOLDER = "FEDLIGHTNING_RUN_FOLDER"


class RunFolder:
    """Paths and writers of one run.

    Args:
        root: Folder of all runs (`runs`).
        name: The experiment's name.
        version: Folder of this run; `None`: the next free `version_N`.
    """

    def __init__(self, root: str | Path, name: str, version: str | None = None) -> None:
        self._made: list[Path] = []
        base = Path(root) / name
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not group and not is_writer() and RUN_FOLDER in os.environ:
            self.path = Path(os.environ[RUN_FOLDER])
            return
        self.path = base / version if version is not None else self._next_version(base)
        self.path = Path(of_first_rank(str(self.path)))  # a later run of the same processes
        os.environ[RUN_FOLDER] = str(self.path)  # processes that DDP starts later inherit it

    def _next_version(self, base: Path) -> Path:
        """Return the next free `version_N`, made by the process that writes: runs that start at one instant get others."""
        while True:
            taken = [int(p.name[8:]) for p in base.glob("version_*") if p.name[8:].isdigit()] if base.exists() else []
            path = base / f"version_{max(taken, default=-1) + 1}"
            if not is_writer():
                return path
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            with writing(path):
                try:
                    path.mkdir(parents=True)
                    return path
                except FileExistsError:
                    if not path.exists():  # above it lies a link that leads nowhere, and will as often as it is tried
                        raise

    def remove_empty(self) -> None:
        """Remove the folders that were made for a run, if it has written nothing."""
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    @cached_property
    def metrics(self) -> MetricsFile:
        """The scores on disk."""
        return MetricsFile(self.path / "metrics.csv")

    @property
    def last(self) -> Path:
        """Complete resume state."""
        return self.path / "checkpoints" / "last"

    @property
    def decisions(self) -> Path:
        """Clients that were left out because of the machine (time, a killed worker), one a line."""
        return self.path / "left_out.jsonl"

    @property
    def figures(self) -> Path:
        """Where figures go; made when asked for."""
        folder = self.path / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_rows(self, rows: Iterable[Row]) -> tuple[int, int]:
        """Append scores to ``metrics.csv``. Return their first byte there, and the one after their last."""
        with writing(self.metrics.path):
            self.path.mkdir(parents=True, exist_ok=True)
            return self.metrics.append(rows)

    def read_rows(self, rounds: int, mark: dict[str, Any]) -> list[Row]:
        """Read the scores of the first `rounds` rounds, evaluations after training included.

        Args:
            rounds: Finished rounds of the saved state.
            mark: What the saved state knows of `metrics.csv`.

        Raises:
            DamagedMetricsError: If scores that the state knows are not there.
        """
        self.metrics.check(mark)
        return [row for row in self.metrics.rows() if row.round <= rounds]

    def keep_rounds(self, mark: dict[str, Any]) -> list[Row]:
        """Cut `metrics.csv` back to what the saved state knows (a resumed run writes the others again), and read it.

        Args:
            mark: As in :meth:`read_rows`.

        Raises:
            DamagedMetricsError: If scores that the state knows are not there.
        """
        self.metrics.check(mark)
        if is_writer():
            self.metrics.cut(mark)
        return self.metrics.rows()

    def write_config(self, text: str) -> None:
        """Write ``config.yaml``: what the command line needs to run this again."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.path / "config.yaml", text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json``."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.path / "summary.json", readable_json(summary, default=str))


def folder_of(path: str | Path) -> RunFolder:
    """Return the run's folder at `path`."""
    path = Path(path)
    return RunFolder(path.parent.parent, path.parent.name, path.name)

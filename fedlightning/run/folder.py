"""The folder of a run: ``runs/<name>/<version>/`` and the files in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedlightning.errors import ConfigurationError
from fedlightning.run.files import is_writer, readable_json, write_text_atomically, writing
from fedlightning.run.lock import LOCK, RunInUseError, RunLock
from fedlightning.run.metrics import MetricsFile
from fedlightning.run.persistence import BEFORE, MANIFEST, load
from fedlightning.run.signals import of_first_rank
from fedlightning.scoring.rows import Row

RUN_FOLDER = "FEDLIGHTNING_RUN_FOLDER"
AUTO = "auto"
"""Value of `resume`: go on if there is something to go on from, else start."""


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

    def refuse_used(self, discard_unsaved: bool = False) -> None:
        """Refuse to start a new run in a folder that holds one.

        Args:
            discard_unsaved: Remove what a run left that was killed before it had saved a state. One that came to its end
                without states (`save_state: 0`) has a summary, and is not touched.
        """
        if not is_writer():
            return
        if discard_unsaved and not has_state(self.path) and not (self.path / "summary.json").exists():
            with writing(self.path):
                for path in (self.path / "metrics.csv", *self.path.glob("logs*")):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if (self.path / "metrics.csv").exists():
            way_out = f", or resume it with resume='auto' or resume='{self.path}'" if has_state(self.path) else ""
            raise ValueError(
                f"There is a run in {self.path} already. Choose another version, or leave version out{way_out}."
            )

    @cached_property
    def metrics(self) -> MetricsFile:
        """The scores on disk."""
        return MetricsFile(self.path / "metrics.csv")

    @property
    def last(self) -> Path:
        """Complete resume state."""
        return self.path / "checkpoints" / "last"

    def rounds_saved(self) -> int:
        """Return the rounds of the state on disk; 0 if there is none that can be read."""
        with suppress(OSError, ValueError):
            return load(self.last).rounds_done
        return 0

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


def has_state(run: Path) -> bool:
    """Return True if a run has a saved state, if only the one before the newest."""
    return any((run / "checkpoints" / "last" / name).exists() for name in (MANIFEST, BEFORE))


def find_resumable(root: str | Path, name: str, version: str | None) -> Path | None:
    """Return the run to go on with, or `None` if there is nothing to go on from: one command for a requeued job."""
    if version is not None:
        path = Path(root) / name / version
        return path if has_state(path) else None
    try:
        return find_last(root, name)
    except FileNotFoundError:
        return None


def killed_version(root: str | Path, name: str) -> str | None:
    """Return the newest `version_N` whose run was killed before it had saved a state, to start again there; `None`: none.

    Its lock still lies there, and nobody holds it: a run that ends, be it with an error, takes its lock away.
    """
    places = (Path(root) / name).glob(f"version_*/{LOCK}") if is_writer() else ()
    found = {int(place.parent.name[8:]): place.parent for place in places if place.parent.name[8:].isdigit()}
    for _, path in sorted(found.items(), reverse=True):
        if not has_state(path) and not (path / "summary.json").exists():
            with suppress(RunInUseError), RunLock(path):
                return path.name
    return None


def find_last(root: str | Path, name: str) -> Path:
    """Return the run that wrote its state last."""
    manifests = list((Path(root) / name).glob("*/checkpoints/last/manifest*.json"))  # the newest may be lost
    if not manifests:
        raise FileNotFoundError(
            f"There is nothing to resume: no run under {Path(root) / name} has checkpoints/last/manifest.json. "
            "Start without resume, give resume='auto' to start or to go on, whichever there is, or the run's folder."
        )
    return max(manifests, key=lambda path: path.stat().st_mtime).parents[2]


def refuse_requeued(folder: Path) -> None:
    """Refuse a folder in which Lightning would find a checkpoint of a requeued job and load it into every client."""
    found = sorted(folder.glob("hpc_ckpt_*.ckpt"))
    if found:
        raise ConfigurationError(
            f"{found[0]} is a checkpoint of a job that SLURM ended; Lightning would load it into every client's training. "
            "Remove it: the run's own state is in checkpoints/last."
        )

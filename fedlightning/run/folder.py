"""The folder of a run: ``runs/<name>/<version>/`` and the files in it.

What a run is carried out with: versions of what its numbers depend on.

`metrics.csv` of a run: rows are only ever appended, and a saved state knows what stood in it.
"""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedlightning.compat import sheets
from fedlightning.scores.rows import CELLS, COLUMNS, DamagedMetricsError, Row, read_rows
from fedlightning.storage.files import (
    AppendOnlyFile,
    Mark,
    broadcast_from_rank_zero,
    is_the_one,
    is_writing_process,
    readable_json,
    sync,
    write_text_atomically,
    writing,
)

METRICS_MARK = "metrics_csv"
"""Entry of `summary.json`: length and checksum of the `metrics.csv` beside which it was written."""


class MetricsFile:
    """The scores of a run on disk.

    Args:
        path: `metrics.csv`; made with the first rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._so_far = AppendOnlyFile(path)

    def append(self, rows: Iterable[Row]) -> tuple[int, int]:
        """Append rows, under a header where the file is new. Return their first byte, and the one after their last."""
        with self.path.open("ab") as file:
            if file.tell() == 0:
                file.write(_as_csv([COLUMNS]))
            start = file.tell()
            file.write(_as_csv(map(CELLS, rows)))
            return start, file.tell()

    def mark(self) -> Mark:
        """Bring the file to the disk; return its length and checksum, for a saved state."""
        if self.path.exists():
            with writing(self.path), self.path.open("rb") as file:
                sync(file.fileno())
        return self._so_far.mark()

    def check(self, mark: dict[str, Any]) -> None:
        """Compare what a saved state knows with what is there."""
        what = self.fault(mark)
        if what is not None:
            raise DamagedMetricsError(
                f"{self.path} {what}: the saved state knows {mark['bytes']} bytes of scores that are not there any more. "
                "Put the file back from a copy, or start a new run."
            )

    def fault(self, mark: dict[str, Any]) -> str | None:
        """Return what has become of the file since `mark`; `None` if it begins with what it was."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size >= mark["bytes"] and (not mark["bytes"] or is_the_one(self.path, mark)):
            return None
        return "is missing" if not self.path.exists() else "was cut off" if size < mark["bytes"] else "was changed"

    def cut(self, mark: dict[str, Any]) -> None:
        """Cut off what was appended after `mark`; a resumed run writes it again."""
        if self.path.exists():
            with writing(self.path):
                os.truncate(self.path, mark["bytes"])
        self._so_far = AppendOnlyFile(self.path)

    def rows(self) -> list[Row]:
        """Read all rows; a last line that a killed process has cut off is left out."""
        return read_rows(self.path)

    def place(self) -> tuple[int, int] | None:
        """Return the bytes of all rows: the first, and the one after the last; `None` if they have other columns."""
        header = _as_csv([COLUMNS])
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            return (len(header), self.path.stat().st_size) if file.read(len(header)) == header else None


def _as_csv(lines: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    sheets.Writer(text).writerows(lines)
    return text.getvalue().encode()


def versions() -> dict[str, str]:
    """Versions of what numbers depend on."""
    packages = ("fedlightning", "torch", "lightning", "torchmetrics", "numpy")
    installed = {package: _version(package) for package in packages}
    return {"python": platform.python_version(), **{name: version for name, version in installed.items() if version}}


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


RUN_FOLDER = "FEDLIGHTNING_RUN_FOLDER"


class RunFolder:
    """Paths and writers of one run.

    Args:
        root: Folder of all runs (`runs`).
        name: The experiment's name.
        version: Folder of this run; `None`: the next free `version_N`.
    """

    def __init__(self, root: str | Path, name: str, version: str | None = None) -> None:
        self._new_folders: list[Path] = []
        base = Path(root) / name
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not group and not is_writing_process() and RUN_FOLDER in os.environ:
            self.path = Path(os.environ[RUN_FOLDER])
            return
        self.path = base / version if version is not None else self._next_version(base)
        self.path = Path(broadcast_from_rank_zero(str(self.path)))  # a later run of the same processes
        os.environ[RUN_FOLDER] = str(self.path)  # processes that DDP starts later inherit it

    def _next_version(self, base: Path) -> Path:
        """Return the next free `version_N`, made by the process that writes: runs that start at one instant get others."""
        while True:
            taken = [int(p.name[8:]) for p in base.glob("version_*") if p.name[8:].isdigit()] if base.exists() else []
            path = base / f"version_{max(taken, default=-1) + 1}"
            if not is_writing_process():
                return path
            self._new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
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
            for folder in self._new_folders:
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

    def truncate_rows(self, mark: dict[str, Any]) -> list[Row]:
        """Cut `metrics.csv` back to what the saved state knows (a resumed run writes the others again), and read it.

        Args:
            mark: As in :meth:`read_rows`.

        Raises:
            DamagedMetricsError: If scores that the state knows are not there.
        """
        self.metrics.check(mark)
        if is_writing_process():
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


def open_run_folder(path: str | Path) -> RunFolder:
    """Return the run's folder at `path`."""
    path = Path(path)
    return RunFolder(path.parent.parent, path.parent.name, path.name)

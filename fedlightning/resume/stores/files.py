"""Loggers that write files on this machine: they are cut back to the mark."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from fedlightning.compat.quiet import quiet
from fedlightning.resume.stores.arguments import name_version
from fedlightning.resume.stores.base import Store
from fedlightning.storage.files import Growing, Mark, is_the_one, set_aside


class FileStore(Store):
    """A logger that writes into a folder of this machine."""

    logger: CSVLogger | TensorBoardLogger

    @property
    def folder(self) -> Path:
        """The logger's folder."""
        return Path(self.logger.log_dir)

    def flush(self) -> None:
        if self.folder.is_dir():
            with quiet():
                self.logger.save()

    def mark(self) -> Mark:
        return super().mark() | {"root": self._place(Path(self.logger.root_dir))}

    def is_of(self, mark: Mark, by_name: bool) -> bool:
        return super().is_of(mark, by_name) and mark["root"] == self._place(Path(self.logger.root_dir))

    def _place(self, path: Path) -> str:
        """Return a path that a run which has been moved still knows."""
        path = path.resolve()
        run = None if self.run is None else self.run.resolve()
        return str(path.relative_to(run)) if run is not None and path.is_relative_to(run) else str(path)

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        if mark is not None:
            name_version(self.logger, mark["version"])
        if mark is not None and self._cut(mark):
            self.until = rounds
        else:
            for step, name in self._look():
                self.there.setdefault(step, set()).add(name)

    def _cut(self, mark: Mark) -> bool:
        """Remove what came after the mark; return False if what came before it is not all there."""
        raise NotImplementedError

    def _look(self) -> Iterator[tuple[int, str]]:
        """Yield step and name of everything that is there."""
        raise NotImplementedError


class CSVStore(FileStore):
    """The rows of a `CSVLogger`. Its file is rewritten whenever a new column comes, so a mark counts lines, too."""

    logger: CSVLogger

    def __init__(self, logger: Logger, run: Path | None = None) -> None:
        super().__init__(logger, run)
        self._so_far: Growing | None = None

    @property
    def file(self) -> Path:
        """The logger's file."""
        return self.folder / "metrics.csv"

    def mark(self) -> Mark:
        if self._so_far is None or self._so_far.path != self.file:
            self._so_far = Growing(self.file, has_header=True)
        return super().mark() | self._so_far.mark()

    def start(self) -> Mark:
        return super().mark() | {"lines": 0}  # what is there will be removed by the logger

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        super().reopen(mark, rounds, differs)
        if self.file.exists():
            self._go_on()

    @property
    def _kept(self) -> Path:
        return self.file.with_name("metrics.csv.kept")

    def _cut(self, mark: Mark) -> bool:
        if self._kept.exists():  # a resumed run was killed in `_go_on`
            os.replace(self._kept, self.file)
        if mark["lines"] == 0:
            self.file.unlink(missing_ok=True)
            return True
        if not self.file.exists():
            return False
        with self.file.open("rb") as file:
            header = file.readline().decode(errors="replace")
        known, columns = (set(next(csv.reader([line]), [])) for line in (mark["header"], header))
        whole = self.file.stat().st_size >= mark["bytes"]
        if not known <= columns or (known == columns and whole and not is_the_one(self.file, mark)):
            set_aside(self.file, "metrics.damaged.csv")
            return False
        end, lines = self._end_of(mark["lines"])
        os.truncate(self.file, end)
        return lines == mark["lines"]

    def _end_of(self, most: int) -> tuple[int, int]:
        """Return where the last of `most` whole lines ends, and how many there are."""
        end = lines = 0
        with self.file.open("rb") as file:
            for line in file:
                if lines == most or not line.endswith(b"\n"):
                    break
                end, lines = end + len(line), lines + 1
        return end, lines

    def _look(self) -> Iterator[tuple[int, str]]:
        if not self.file.exists():
            return
        with self.file.open(newline="", errors="replace") as file:
            for row in csv.DictReader(file):
                with suppress(TypeError, ValueError):
                    step = int(row["step"])
                    yield from ((step, name) for name, value in row.items() if name is not None and value)

    def _go_on(self) -> None:
        """Let the logger append to the file. It would remove it: a `CSVLogger` is made to begin anew."""
        with self.file.open(newline="", errors="replace") as file:
            columns = next(csv.reader(file), [])
        if "step" not in columns:  # nothing that a logger has written
            return
        os.replace(self.file, self._kept)
        try:
            with quiet():
                experiment = self.logger.experiment
        finally:
            os.replace(self._kept, self.file)
        experiment.metrics.clear()  # of an earlier fit with the same logger
        experiment.metrics_keys[:] = columns


class TensorBoardStore(FileStore):
    """The events of a `TensorBoardLogger`. Event files are only ever appended to."""

    logger: TensorBoardLogger

    def __init__(self, logger: Logger, run: Path | None = None) -> None:
        super().__init__(logger, run)
        self._so_far: dict[str, Growing] = {}

    def mark(self) -> Mark:
        marks = {path.name: self._so_far.setdefault(path.name, Growing(path)).mark() for path in self._files()}
        return super().mark() | {"files": marks}

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*tfevents*"))

    def _cut(self, mark: Mark) -> bool:
        self.logger.finalize("interrupted")  # of an earlier fit with the same logger; it has the file open
        complete = all((self.folder / name).exists() for name in mark["files"])
        for path in self._files():
            known = mark["files"].get(path.name)
            if known is None:
                path.unlink()
            elif path.stat().st_size < known["bytes"]:
                complete = False
            elif is_the_one(path, known):
                os.truncate(path, known["bytes"])
            else:
                set_aside(path, path.name.replace("tfevents", "damaged"))  # TensorBoard does not read it
                complete = False
        return complete

    def _look(self) -> Iterator[tuple[int, str]]:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        for path in self._files():
            for event in EventFileLoader(str(path)).Load():
                yield from ((event.step, value.tag) for value in event.summary.value)

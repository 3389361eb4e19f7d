"""The run's loggers, killed and resumed: whatever logger it is, every round is in it once.

`metrics.csv` holds every score of the rounds that a saved state knows. So a resumed run takes each logger back to where it
stood when the state was saved (:mod:`fedlightning.resume.loggers`), and gives it the rounds that it lacks from there.

What any logger holds, as far as Lightning's interface tells.

What the user has named when a logger was made: the one place that looks at loggers' private names for it.

Lightning takes a version or a run's id when a logger is made, and says only what came of it; the user has made the logger.

Loggers that write files on this machine: they are cut back to the mark.

Runs of a tracking server, found again by their ids. What is in them cannot be taken back, but can be looked at.

What Lightning's loggers keep, and how a resumed run goes on in it; a kind of logger, a class.

A *mark* says what a logger held when a state was saved. :meth:`Store.reopen` brings the logger back to it: files are cut,
runs of a tracking server are found again by their ids.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from fedlightning.compat.lightning_runs import quiet
from fedlightning.errors import ConfigurationError
from fedlightning.run.recorder import RoundLogs
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import LATEST, Row
from fedlightning.storage.files import AppendOnlyFile, Mark, is_the_one, set_aside, write_text_atomically


def given_version(logger: Logger) -> int | str | None:
    """Return the version, or the id of the run, that the user has named."""
    if isinstance(logger, CSVLogger | TensorBoardLogger):
        return logger._version
    if isinstance(logger, WandbLogger):
        return None if logger.version is None else str(logger.version)
    if isinstance(logger, MLFlowLogger):
        return logger._run_id
    return logger.version if isinstance(logger.version, int) else str(logger.version)


def name_version(logger: CSVLogger | TensorBoardLogger, version: int | str) -> None:
    """Let a logger whose user named no version go on in the folder that it had."""
    logger._version = version


def name_run(logger: WandbLogger | MLFlowLogger, run_id: str) -> None:
    """Let a logger whose user named no run go on in the run that it had."""
    if isinstance(logger, MLFlowLogger):
        logger._run_id = run_id
    elif logger.version is None:
        logger._id = run_id
        # without a network there is nothing to look the run up in
        logger._wandb_init |= {"id": run_id, "resume": "allow" if is_offline(logger) else "must"}


def is_offline(logger: WandbLogger) -> bool:
    """Return whether a logger of Weights & Biases writes files only."""
    return bool(logger._offline)


class Store:
    """What a logger holds, as far as Lightning's interface tells: which store it is, by `logger.version`.

    Such a logger gets again what came after the saved state. It gets nothing of what came before if it still has the version
    that it had then, and all rounds if it has another: it is a new store.

    Args:
        logger: The logger.
        run: The run's folder.

    Attributes:
        until: Rounds that are in it, all of them up to here.
        there: Names that are in it, by step, where somebody had to look.
    """

    def __init__(self, logger: Logger, run: Path | None = None) -> None:
        self.logger, self.run = logger, run
        self.until = 0
        self.names_by_step: dict[int, set[str]] = {}
        self._used = False

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Give the logger those values of a round that it has not got."""
        if round <= self.until:
            return
        names = self.names_by_step.get(round, ())
        # a logger's prefix stands before a '-'
        new = {name: value for name, value in values.items() if not any(is_known_as(name, logged) for logged in names)}
        if new:
            self.logger.log_metrics(new, step=round)
            self._used = True

    def flush(self) -> None:
        """Let the logger write what it holds back."""
        if self._used:
            self.logger.save()

    def mark(self) -> Mark:
        """Return what the logger holds now, in plain values."""
        version = self.logger.version
        return {"logger": type(self.logger).__name__, "version": version if isinstance(version, int) else str(version)}

    def start(self) -> Mark:
        """Return the mark of a run that has not begun."""
        return self.mark()

    def is_of(self, mark: Mark, by_name: bool) -> bool:
        """Return whether a mark may be of this logger."""
        version = given_version(self.logger)
        return mark["logger"] == type(self.logger).__name__ and (
            version == mark["version"] if by_name else version is None
        )

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        """Go on where the logger stood at `mark`, before anything is logged."""
        if mark is not None:
            self.until = rounds


def is_known_as(name: str, logged: str) -> bool:
    """Return True if a logger, which may have a prefix, knows `name` as `logged`."""
    return logged == name or logged.endswith(f"-{name}")


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
                self.names_by_step.setdefault(step, set()).add(name)

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
        self._so_far: AppendOnlyFile | None = None

    @property
    def file(self) -> Path:
        """The logger's file."""
        return self.folder / "metrics.csv"

    def mark(self) -> Mark:
        if self._so_far is None or self._so_far.path != self.file:
            self._so_far = AppendOnlyFile(self.file, has_header=True)
        return super().mark() | self._so_far.mark()

    def start(self) -> Mark:
        return super().mark() | {"lines": 0}  # what is there will be removed by the logger

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        super().reopen(mark, rounds, differs)
        if self.file.exists():
            self._go_on()

    @property
    def _backup(self) -> Path:
        return self.file.with_name("metrics.csv.kept")

    def _cut(self, mark: Mark) -> bool:
        if self._backup.exists():  # a resumed run was killed in `_go_on`
            os.replace(self._backup, self.file)
        if mark["lines"] == 0:
            self.file.unlink(missing_ok=True)
            return True
        if not self.file.exists():
            return False
        with self.file.open("rb") as file:
            header = file.readline().decode(errors="replace")
        names, columns = (set(next(csv.reader([line]), [])) for line in (mark["header"], header))
        whole = self.file.stat().st_size >= mark["bytes"]
        if not names <= columns or (names == columns and whole and not is_the_one(self.file, mark)):
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
        os.replace(self.file, self._backup)
        try:
            with quiet():
                experiment = self.logger.experiment
        finally:
            os.replace(self._backup, self.file)
        experiment.metrics.clear()  # of an earlier fit with the same logger
        experiment.metrics_keys[:] = columns


class TensorBoardStore(FileStore):
    """The events of a `TensorBoardLogger`. Event files are only ever appended to."""

    logger: TensorBoardLogger

    def __init__(self, logger: Logger, run: Path | None = None) -> None:
        super().__init__(logger, run)
        self._so_far: dict[str, AppendOnlyFile] = {}

    def mark(self) -> Mark:
        mark_by_file = {
            path.name: self._so_far.setdefault(path.name, AppendOnlyFile(path)).mark() for path in self._files()
        }
        return super().mark() | {"files": mark_by_file}

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*tfevents*"))

    def _cut(self, mark: Mark) -> bool:
        self.logger.finalize("interrupted")  # of an earlier fit with the same logger; it has the file open
        complete = all((self.folder / name).exists() for name in mark["files"])
        for path in self._files():
            mark_of_file = mark["files"].get(path.name)
            if mark_of_file is None:
                path.unlink()
            elif path.stat().st_size < mark_of_file["bytes"]:
                complete = False
            elif is_the_one(path, mark_of_file):
                os.truncate(path, mark_of_file["bytes"])
            else:
                set_aside(path, path.name.replace("tfevents", "damaged"))  # TensorBoard does not read it
                complete = False
        return complete

    def _look(self) -> Iterator[tuple[int, str]]:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        for path in self._files():
            for event in EventFileLoader(str(path)).Load():
                yield from ((event.step, value.tag) for value in event.summary.value)


ROUND = "fedlightning/round"
"""Entry of a Weights & Biases run that tells its newest round."""


class WandbStore(Store):
    """A run of Weights & Biases, found again by its id. Its history cannot be cut, but tells its newest round."""

    logger: WandbLogger

    def log(self, round: int, values: Mapping[str, float]) -> None:
        if round > self.until:
            super().log(round, {**values, ROUND: round})

    def mark(self) -> Mark:
        _ = self.logger.experiment  # the id is known when the run is there
        return super().mark()

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        if mark is None:
            return
        name_run(self.logger, mark["version"])
        if is_offline(self.logger):  # its own files cannot be read, but they hold what it was given
            self.until = rounds
            return
        summary = self.logger.experiment.summary
        newest = max((int(summary[name]) for name in _names(summary) if is_known_as(ROUND, name)), default=0)
        self.until = min(newest, rounds) if differs else newest


class MLFlowStore(Store):
    """A run of MLflow, found again by its id. Its metrics cannot be cut, but can be looked through."""

    logger: MLFlowLogger

    def log(self, round: int, values: Mapping[str, float]) -> None:
        super().log(round, {re.sub("[^a-zA-Z0-9_/. -]+", "", name): value for name, value in values.items()})

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        if mark is None:
            return
        name_run(self.logger, mark["version"])
        client, run = self.logger.experiment, self.logger.run_id
        for name in client.get_run(run).data.metrics:
            for metric in client.get_metric_history(run, name):
                if metric.step <= rounds or not differs:
                    self.names_by_step.setdefault(metric.step, set()).add(name)
        with suppress(AttributeError):  # MLflow before 2.1
            client.update_run(run, status="RUNNING")


def _names(summary: Any) -> list[str]:
    return [str(name) for name in summary.keys()]  # noqa: SIM118  a summary of W&B has keys, and no iterator


__all__ = ["ROUND", "CSVStore", "FileStore", "MLFlowStore", "Store", "TensorBoardStore", "WandbStore"]


BEGINNING = "loggers.json"
"""Where the loggers stood before round 1; there until a state tells where they stand."""


class LoggerStates(RoundLogs):
    """Gives the loggers of a run the means over clients, every round once.

    Args:
        loggers: Lightning loggers.
        folder: The run's folder; `None` where nothing is written.
    """

    def __init__(self, loggers: Sequence[Logger], folder: Path | None = None) -> None:
        self.loggers, self.folder = loggers, folder

    @cached_property
    def _stores(self) -> list[Store]:
        return [_store_of(logger, self.folder) for logger in self.loggers]

    def log(self, rows: Sequence[Row]) -> None:
        """Give every logger what it has not got of a round, and let it write."""
        means = _means(rows) if self.loggers else {}
        for store in self._stores if means else ():
            store.log(rows[0].round, means)
            store.flush()

    def mark(self) -> list[Mark]:
        """Let the loggers write what they hold; return where they stand, for a saved state."""
        for store in self._stores:
            store.flush()
        return [store.mark() for store in self._stores]

    def reopen(self, logger_marks: list[Mark], rows: Iterable[Row], rounds: int, differs: bool = False) -> None:
        """Go on from a saved state."""
        if not self.loggers:
            return
        for store, mark in self._matched(logger_marks):
            try:
                store.reopen(mark, rounds, differs)
            except Exception as error:
                where = "" if mark is None else f" ({mark['version']})"
                raise ConfigurationError(
                    f"{type(store.logger).__name__} cannot go on with what it logged before{where}: {error}. Make what it "
                    "wrote reachable again, give the logger another version or run id, or resume with another logger."
                ) from error
        if any(store.until < rounds for store in self._stores):
            for round, of_round in groupby(rows, lambda row: row.round):
                means = _means(list(of_round))
                for store in self._stores if means else ():
                    store.log(round, means)
        for store in self._stores:
            store.flush()

    def _matched(self, logger_marks: list[Mark]) -> Iterator[tuple[Store, Mark | None]]:
        """Yield the loggers that the run had before with their marks. One that it did not have begins with everything."""
        left, stores = list(logger_marks), list(self._stores)
        for by_name in (True, False):
            for store in list(stores):
                mark = next((mark for mark in left if store.is_of(mark, by_name)), None)
                if mark is not None:
                    left.remove(mark)
                    stores.remove(store)
                    yield store, mark

    def begin(self) -> None:
        """Note where the loggers stand before round 1; take back what a run has logged here that was killed in it."""
        if not self.loggers or self.folder is None:
            return
        path = self.folder / "checkpoints" / BEGINNING
        try:
            before = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            before = None
        if before is not None:
            self.reopen(before, (), 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps([store.start() for store in self._stores]))

    def begun(self) -> None:
        """Remove the note of :meth:`begin`: a state tells it from now on."""
        if self.loggers and self.folder is not None:
            (self.folder / "checkpoints" / BEGINNING).unlink(missing_ok=True)

    def close(self, status: str) -> None:
        """End the loggers."""
        for logger in self.loggers:
            logger.finalize(status)


def _means(rows: Iterable[Row]) -> dict[str, Any]:
    """Return what loggers get: means over clients, of the models as they stand; a third model's under its name."""
    return {
        "/".join((row["split"], row["stage"], row["data"], row["metric"], *_name_of(row["model"]))): row["mean"]
        for row in summarise(row for row in rows if row.split != "test" and row.checkpoint == LATEST)
        if row["mean"] is not None
    }


def _name_of(model: str) -> tuple[str, ...]:
    return () if model in ("global", "personal") else (model,)


def _store_of(logger: Logger, run: Path | None = None) -> Store:
    """Return the store of a logger."""
    if isinstance(logger, CSVLogger | TensorBoardLogger) and "://" not in logger.root_dir:
        return CSVStore(logger, run) if isinstance(logger, CSVLogger) else TensorBoardStore(logger, run)
    if isinstance(logger, WandbLogger):
        return WandbStore(logger, run)
    return MLFlowStore(logger, run) if isinstance(logger, MLFlowLogger) else Store(logger, run)

"""The run's loggers, killed and resumed: whatever logger it is, every round is in it once.

`metrics.csv` holds every score of the rounds that a saved state knows. So a resumed run takes each logger back to where it
stood when the state was saved (:mod:`fedlightning.resume.stores`), and gives it the rounds that it lacks from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from fedlightning.errors import ConfigurationError
from fedlightning.resume.stores import CSVStore, MLFlowStore, Store, TensorBoardStore, WandbStore
from fedlightning.run.recorder import RoundLogs
from fedlightning.scores.metrics import summarise
from fedlightning.scores.rows import LATEST, Row
from fedlightning.storage.files import Mark, write_text_atomically

BEGINNING = "loggers.json"
"""Where the loggers stood before round 1; there until a state tells where they stand."""


class Logs(RoundLogs):
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

    def reopen(self, marks: list[Mark], rows: Iterable[Row], rounds: int, differs: bool = False) -> None:
        """Go on from a saved state."""
        if not self.loggers:
            return
        for store, mark in self._matched(marks):
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

    def _matched(self, marks: list[Mark]) -> Iterator[tuple[Store, Mark | None]]:
        """Yield the loggers that the run had before with their marks. One that it did not have begins with everything."""
        left, stores = list(marks), list(self._stores)
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

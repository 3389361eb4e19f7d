"""What Lightning's loggers keep, and how a resumed run goes on in it; a kind of logger, a class.

A *mark* says what a logger held when a state was saved. :meth:`Store.reopen` brings the logger back to it: files are cut,
runs of a tracking server are found again by their ids.
"""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from fedlightning.run.stores.base import Store
from fedlightning.run.stores.files import CSVStore, FileStore, TensorBoardStore
from fedlightning.run.stores.tracking import ROUND, MLFlowStore, WandbStore

__all__ = ["ROUND", "CSVStore", "FileStore", "MLFlowStore", "Store", "TensorBoardStore", "WandbStore", "store_of"]


def store_of(logger: Logger, run: Path | None = None) -> Store:
    """Return the store of a logger."""
    if isinstance(logger, CSVLogger | TensorBoardLogger) and "://" not in logger.root_dir:
        return CSVStore(logger, run) if isinstance(logger, CSVLogger) else TensorBoardStore(logger, run)
    if isinstance(logger, WandbLogger):
        return WandbStore(logger, run)
    return MLFlowStore(logger, run) if isinstance(logger, MLFlowLogger) else Store(logger, run)

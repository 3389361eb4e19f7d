"""What Lightning's loggers keep, and how a resumed run goes on in it; a kind of logger, a class.

A *mark* says what a logger held when a state was saved. :meth:`Store.reopen` brings the logger back to it: files are cut,
runs of a tracking server are found again by their ids.
"""

from fedlightning.resume.logger_stores import (
    ROUND,
    CSVStore,
    FileStore,
    MLFlowStore,
    Store,
    TensorBoardStore,
    WandbStore,
)

__all__ = ["ROUND", "CSVStore", "FileStore", "MLFlowStore", "Store", "TensorBoardStore", "WandbStore"]

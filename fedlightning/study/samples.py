"""Predicted probabilities of test samples, kept beside a run: what calibration and decision curves are made of.

They are made where the data are in this process (:mod:`fedlightning.study.predicted`). The file holds a line a patient, so it
stays where the data may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fedlightning.storage.files import writing
from fedlightning.study.finished_runs import DEPLOYED

FILE = "test_samples.npz"


@dataclass(frozen=True)
class Predicted:
    """Predictions of each client's deployed model on its own test samples.

    Attributes:
        clients: Whose sample it is, shape `(n,)`.
        labels: Its class, shape `(n,)`.
        probabilities: Shape `(n, classes)`.
        columns: Column -> its cell for each sample, shape `(n,)`, for subgroups.
        reason: Why there are none; empty if there are.
        checkpoint: Which models of clients that trained; see :func:`predict_samples`.
    """

    clients: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.str_))
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    probabilities: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    reason: str = ""
    checkpoint: str = DEPLOYED

    def of(self, client: str) -> Predicted:
        """Return those of one client."""
        return self.at(self.clients == client)

    def at(self, rows: np.ndarray) -> Predicted:
        """Return some of them, given as truth values."""
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        arrays = self.clients[rows], self.labels[rows], self.probabilities[rows]
        return Predicted(*arrays, columns, self.reason, self.checkpoint)


def write(path: Path, predicted: Predicted) -> None:
    """Write the predictions of a run into its folder."""
    arrays: dict[str, Any] = {name: getattr(predicted, name) for name in ("clients", "labels", "probabilities")}
    arrays |= {name: np.array(getattr(predicted, name)) for name in ("reason", "checkpoint")}
    arrays |= {f"column {name}": cells for name, cells in predicted.columns.items()}
    with writing(path / FILE):
        np.savez_compressed(path / FILE, **arrays)


def read(path: Path) -> Predicted | None:
    """Return the predictions in the folder of a run, or `None`; of a damaged file, only why there are none."""
    if not (path / FILE).exists():
        return None
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        return Predicted(reason=f"{path / FILE} cannot be read ({' '.join(str(error).split())[:100]})", checkpoint="")


def _read(path: Path) -> Predicted:
    with np.load(path / FILE, allow_pickle=False) as arrays:
        columns = {name.removeprefix("column "): arrays[name] for name in arrays.files if name.startswith("column ")}
        words = str(arrays["reason"]), str(arrays["checkpoint"])
        return Predicted(arrays["clients"], arrays["labels"], arrays["probabilities"], columns, *words)

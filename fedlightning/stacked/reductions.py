"""Running reductions of logged values, for many clients at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedlightning.fast.log_sheet import STARTS


class Column:
    """A value for each client under one logged name, reduced step by step in the order of the client's own steps.

    The fast loop of one client keeps all values and reduces once an epoch (:func:`fedlightning.fast.log_sheet.reduce`),
    in Lightning's own order. The clients of a stack take their steps in groups, so that here every step is added to the
    rows of its clients.

    Args:
        clients: Number of clients.
        reduction: `"mean"`, `"sum"`, `"min"`, `"max"`, or `"last"` for the value of the last step.
        dtype: Type in which values are added up.

    Attributes:
        seen: Whether a client has logged a value, `(clients,)`.
    """

    def __init__(self, clients: int, reduction: str, dtype: Any = np.float64) -> None:
        self._reduction = reduction
        self._totals = np.full(clients, STARTS.get(reduction, 0.0), dtype=dtype)
        self._weights = np.zeros(clients)
        self.seen = np.zeros(clients, dtype=bool)

    def add(self, rows: Sequence[int] | np.ndarray, values: np.ndarray, weight: int = 1) -> None:
        """Add one step."""
        totals, values = self._totals, values.astype(self._totals.dtype, copy=False)
        self.seen[rows] = True
        if self._reduction == "mean":
            totals[rows] += values * totals.dtype.type(weight)
            self._weights[rows] += weight
        elif self._reduction == "sum":
            totals[rows] += values
        elif self._reduction == "last":
            totals[rows] = values
        else:
            totals[rows] = (np.minimum if self._reduction == "min" else np.maximum)(totals[rows], values)

    def values(self) -> list[float]:
        """Return the reduced value of each client; without meaning for those not :attr:`seen`."""
        if self._reduction != "mean":
            return self._totals.tolist()
        with np.errstate(all="ignore"):
            return (self._totals / self._weights.astype(self._totals.dtype)).tolist()

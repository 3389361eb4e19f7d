"""Values that modules log in stacked steps, and the metrics that Lightning would have made of them for each client.

Running reductions of logged values, for many clients at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.fast.log_sheet import STARTS, LogCall, log_call, scalar


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
        is_logged: Whether a client has logged a value, `(clients,)`.
    """

    def __init__(self, clients: int, reduction: str, dtype: Any = np.float64) -> None:
        self._reduction = reduction
        self._totals = np.full(clients, STARTS.get(reduction, 0.0), dtype=dtype)
        self._weights = np.zeros(clients)
        self.is_logged = np.zeros(clients, dtype=bool)

    def add(self, rows: Sequence[int] | np.ndarray, values: np.ndarray, weight: int = 1) -> None:
        """Add one step."""
        totals, values = self._totals, values.astype(self._totals.dtype, copy=False)
        self.is_logged[rows] = True
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


class StepLog:
    """Replaces `self.log` of a module while :meth:`recording`.

    Args:
        module: The module.

    Attributes:
        calls: By name, the last call that logged it.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: dict[str, LogCall] = {}
        self._logged: dict[str, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[dict[str, Tensor]]:
        """Within the block, `self.log` (which `self.log_dict` calls) writes to the dict that is given."""
        attributes = vars(self._module)
        before = {"log": attributes["log"]} if "log" in attributes else {}
        self._logged = {}
        attributes["log"] = self._log
        try:
            yield self._logged
        finally:
            del attributes["log"]
            attributes.update(before)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tensor | Number):
            raise TypeError(
                f"self.log('{name}', ...) got a {type(value).__name__} in training_step; a metric object keeps one state, "
                "and many clients step at once. Log a number (torchmetrics.functional)"
            )
        call = log_call("training_step", name, *args, **kwargs)
        if not call.rule.reduction:
            raise ValueError(
                f"self.log('{name}', reduce_fx={call.reduce_fx!r}): the reductions are {', '.join(STARTS)}"
            )
        self.calls[name], self._logged[name] = call, scalar(name, value, ValueError)


class StackedLogs:
    """The values that the clients of a stack log in one phase.

    Args:
        size: Number of clients.
    """

    def __init__(self, size: int) -> None:
        self._entries: list[tuple[Sequence[int], dict[str, Tensor], dict[str, LogCall], int]] = []
        self._epoch_start = [0] * size
        self._size = size

    def add(self, rows: Sequence[int], logged: dict[str, Tensor], calls: dict[str, LogCall], batch_size: int) -> None:
        """Add one step."""
        if logged:
            self._entries.append((rows, logged, {name: calls[name] for name in logged}, batch_size))

    def start_epoch(self, row: int) -> None:
        """Start a client's new epoch: values that are reduced over an epoch start anew."""
        self._epoch_start[row] = len(self._entries)

    def metrics(self) -> list[dict[str, float]]:
        """Return each client's metrics as Lightning's `callback_metrics` holds them after a fit.

        Logged by step only: the last value. By epoch: reduced over the last epoch, means weighted by batch sizes. By
        both: `name` and `name_epoch` hold the value of the epoch, `name_step` that of the last step. Sums are taken in
        float64, not in Lightning's precision: stacked losses differ from those of a client alone in the last bits anyway.
        """
        columns: dict[str, Column] = {}

        def column(key: str, reduction: str) -> Column:
            return columns.setdefault(key, Column(self._size, reduction))

        starts = np.array(self._epoch_start)
        for number, (rows, logged, calls, samples) in enumerate(self._entries):
            places = np.array(rows)
            current = starts[places] <= number
            for name, stacked in logged.items():
                call, values = calls[name], stacked.double().cpu().numpy()
                rule, weight = call.rule, samples if call.batch_size is None else call.batch_size
                if rule.on_step:
                    column(rule.step_name, "last").add(places, values)
                if rule.on_epoch and current.any():
                    for key in dict.fromkeys((name, rule.epoch_name)):
                        column(key, rule.reduction).add(places[current], values[current], weight)
        cells = [
            (key, column_of_key.is_logged.tolist(), column_of_key.values()) for key, column_of_key in columns.items()
        ]
        return [{key: values[row] for key, seen, values in cells if seen[row]} for row in range(self._size)]

"""What modules log in stacked steps, and the metrics that Lightning would have made of it for each client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(frozen=True)
class Options:
    """How a value was logged. ``batch_size``: its weight in a mean over the epoch; ``None``: the batch's."""

    on_step: bool
    on_epoch: bool
    reduce: str
    batch_size: int | None


class StepLog:
    """Takes the place of ``self.log`` in a module while :meth:`recording`."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.options: dict[str, Options] = {}
        self._logged: dict[str, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[dict[str, Tensor]]:
        """A block whose ``self.log`` and ``self.log_dict`` end up in the dict that is given."""
        attributes = vars(self._module)
        before: dict[str, Any] = {name: attributes[name] for name in ("log", "log_dict") if name in attributes}
        self._logged = {}
        attributes["log"], attributes["log_dict"] = self._log, self._log_dict
        try:
            yield self._logged
        finally:
            for name in ("log", "log_dict"):
                attributes.pop(name, None)
            attributes.update(before)

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **others: Any,
    ) -> None:
        if not isinstance(value, Tensor | Number):
            raise TypeError(
                f"self.log('{name}', ...) got a {type(value).__name__} in training_step; a metric object keeps one state, "
                "and many clients step at once. Log a number (torchmetrics.functional)"
            )
        reduce = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        reduce = {"avg": "mean"}.get(reduce.lower(), reduce.lower())
        if reduce not in REDUCTIONS:
            raise ValueError(f"self.log('{name}', reduce_fx={reduce_fx!r}): the reductions are {', '.join(REDUCTIONS)}")
        on_step, on_epoch = True if on_step is None else on_step, False if on_epoch is None else on_epoch
        self.options[name] = Options(on_step, on_epoch, reduce, batch_size)
        self._logged[name] = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float32).reshape(
            ()
        )

    def _log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            self._log(name, value, *args, **kwargs)


class StackedLogs:
    """Collects the logged values of a phase for the clients of a stack.

    Args:
        size: how many clients.
    """

    def __init__(self, size: int) -> None:
        self._entries: list[tuple[Sequence[int], dict[str, Tensor], dict[str, Options], int]] = []
        self._epoch_start = [0] * size
        self._size = size

    def add(self, rows: Sequence[int], logged: dict[str, Tensor], options: dict[str, Options], batch_size: int) -> None:
        """Note a step: which clients, per name their values ``(n,)``, and the number of samples in each batch."""
        if logged:
            self._entries.append((rows, logged, {name: options[name] for name in logged}, batch_size))

    def start_epoch(self, row: int) -> None:
        """A client's new epoch: what is reduced over an epoch starts anew."""
        self._epoch_start[row] = len(self._entries)

    def metrics(self) -> list[dict[str, float]]:
        """Each client's metrics as Lightning's ``callback_metrics`` holds them after a fit.

        Logged on steps only: the last value. On epochs: reduced over the last epoch, means weighted by batch sizes. On
        both: ``name`` and ``name_epoch`` hold the epoch's, ``name_step`` the last step's.
        """
        columns: dict[str, _Column] = {}

        def column(key: str, like: str) -> _Column:
            return columns.setdefault(key, _Column(self._size, like))

        starts = np.array(self._epoch_start)
        for number, (rows, logged, options, batch_size) in enumerate(self._entries):
            places = np.array(rows)
            current = starts[places] <= number
            for name, stacked in logged.items():
                option, values = options[name], stacked.double().cpu().numpy()
                if option.on_step:
                    column(f"{name}_step" if option.on_epoch else name, "last").add(places, values)
                if option.on_epoch and current.any():
                    size = batch_size if option.batch_size is None else option.batch_size
                    for key in (name, f"{name}_epoch") if option.on_step else (name,):
                        column(key, option.reduce).add(places[current], values[current], size)
        results: list[dict[str, float]] = [{} for _ in range(self._size)]
        for key, own in columns.items():
            for row, value in own.found():
                results[row][key] = value
        return results


class _Column:
    """A value of every client, reduced as it comes.

    Args:
        size: how many clients; reduce: ``"last"`` or one of ``REDUCTIONS``.
    """

    def __init__(self, size: int, reduce: str) -> None:
        first = {"min": np.inf, "max": -np.inf}.get(reduce, 0.0)
        self._total, self._weight = np.full(size, first), np.zeros(size)
        self._reduce = reduce

    def add(self, rows: np.ndarray, values: np.ndarray, size: int = 1) -> None:
        """Values of some clients, each of ``size`` samples."""
        total = self._total
        if self._reduce == "mean":
            total[rows] += values * size
            self._weight[rows] += size
            return
        self._weight[rows] = 1.0
        if self._reduce == "last":
            total[rows] = values
        elif self._reduce == "sum":
            total[rows] += values
        else:
            total[rows] = (np.minimum if self._reduce == "min" else np.maximum)(total[rows], values)

    def found(self) -> Iterator[tuple[int, float]]:
        """The clients that have a value, and it."""
        there = np.flatnonzero(self._weight)
        yield from zip(there.tolist(), (self._total[there] / self._weight[there]).tolist(), strict=True)

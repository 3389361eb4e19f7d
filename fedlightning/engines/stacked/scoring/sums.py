"""What many clients logged in stacked evaluation steps, reduced over the epoch in Lightning's order and precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedlightning.engines.stacked.scoring.step import Logged, Step
from fedlightning.engines.stacked.scoring.values import How, NotStacked

STARTS = {"mean": 0.0, "sum": 0.0, "min": np.inf, "max": -np.inf}


class Sums:
    """Running reductions of scalars for ``clients`` clients, each in the order of its own steps."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._how: dict[str, How] = {}
        self._seen: dict[str, np.ndarray] = {}
        self._metrics: dict[str, str] = {}
        self._totals: dict[str, np.ndarray] = {}
        self._weights: dict[str, np.ndarray] = {}
        self._losses = np.zeros(clients)
        self._samples = np.zeros(clients)

    def add(self, rows: Sequence[int], step: Step) -> None:
        """A step of the clients at ``rows``."""
        chosen = np.asarray(rows)
        if step.loss is not None:
            size = step.size or 1
            self._losses[chosen] += step.outputs[step.loss].double().cpu().numpy() * size
            self._samples[chosen] += size
        for event in step.events:
            if isinstance(event, Logged):
                self._check(event)
                self._seen.setdefault(event.name, np.zeros(self._clients, dtype=bool))[chosen] = True
                if event.place is not None:
                    self._reduce(chosen, event, step.outputs[event.place].cpu().numpy(), step.size)

    def _check(self, event: Logged) -> None:
        known = self._how.setdefault(event.name, event.how) == event.how
        if event.metric is not None:
            known = known and self._metrics.setdefault(event.name, event.metric) == event.metric
        if not known or (event.name in self._metrics) != (event.metric is not None):
            raise NotStacked(f"self.log({event.name!r}) is called in different ways")

    def _reduce(self, rows: np.ndarray, event: Logged, values: np.ndarray, batch: int) -> None:
        name, reduction = event.name, event.how.reduction
        if name not in self._totals:
            start = np.result_type(values.dtype, _default())
            self._totals[name] = np.full(self._clients, STARTS[reduction], dtype=start)
            self._weights[name] = np.zeros(self._clients, dtype=np.int64)
        totals = self._totals[name]
        values = values.astype(totals.dtype)
        if reduction in ("min", "max"):
            totals[rows] = (np.minimum if reduction == "min" else np.maximum)(totals[rows], values)
            return
        weight = batch if event.batch_size is None else event.batch_size
        totals[rows] += values * totals.dtype.type(weight) if reduction == "mean" else values
        self._weights[name][rows] += weight

    @property
    def metrics(self) -> set[str]:
        """Paths of the metrics that were logged themselves."""
        return set(self._metrics.values())

    def values(self) -> list[dict[str, float | str]]:
        """For each client what it logged, by the names a logger sees: its value, or the path of a metric that has it."""
        columns: list[tuple[str, list[bool], list[float] | str]] = []
        for name, how in self._how.items():
            if how.logger:
                values = self._metrics[name] if name in self._metrics else self._reduced(name)
                columns.append((f"{name}_epoch" if how.on_step else name, self._seen[name].tolist(), values))
        return [
            {name: values if isinstance(values, str) else values[row] for name, seen, values in columns if seen[row]}
            for row in range(self._clients)
        ]

    def _reduced(self, name: str) -> list[float]:
        totals = self._totals[name]
        if self._how[name].reduction == "mean":
            with np.errstate(all="ignore"):
                totals = totals / self._weights[name].astype(totals.dtype)
        result: list[float] = totals.tolist()
        return result

    def losses(self) -> list[dict[str, float]]:
        """The mean of the losses that steps returned, for clients whose module logs nothing."""
        pairs = zip(self._losses.tolist(), self._samples.tolist(), strict=True)
        return [{"loss": total / samples} if samples else {} for total, samples in pairs]


def _default() -> np.dtype:
    return np.dtype(np.float64 if torch.get_default_dtype() == torch.float64 else np.float32)

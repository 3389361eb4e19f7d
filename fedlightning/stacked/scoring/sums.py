"""Values that many clients log in stacked evaluation steps, reduced in Lightning's order and precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedlightning.fast.log_sheet import LogRule, wide_dtype
from fedlightning.stacked.reductions import Column
from fedlightning.stacked.scoring.log_limits import NotStacked
from fedlightning.stacked.scoring.step import Logged, Step


class Sums:
    """Running reductions over the epoch, each in the order of the client's own steps.

    Args:
        clients: Number of clients.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._rules: dict[str, LogRule] = {}
        self._metrics: dict[str, str] = {}
        self._columns: dict[str, Column] = {}
        self._losses = Column(clients, "mean")

    def add(self, rows: Sequence[int], step: Step) -> None:
        """Add a step of the clients at `rows`."""
        chosen = np.asarray(rows)
        if step.loss is not None:
            self._losses.add(chosen, step.outputs[step.loss].double().cpu().numpy(), step.size or 1)
        for event in step.events:
            if isinstance(event, Logged):
                self._check(event)
                self._add(chosen, event, step)

    def _check(self, event: Logged) -> None:
        name = event.rule.name
        known = self._rules.setdefault(name, event.rule) == event.rule
        if event.metric is not None:
            known = known and self._metrics.setdefault(name, event.metric) == event.metric
        if not known or (name in self._metrics) != (event.metric is not None):
            raise NotStacked(f"self.log({name!r}) is called in different ways")

    def _add(self, rows: np.ndarray, event: Logged, step: Step) -> None:
        name = event.rule.name
        if event.place is None:  # a metric, whose value each client's own one computes: note only who logged it
            self._columns.setdefault(name, Column(self._clients, "last")).seen[rows] = True
            return
        values = step.outputs[event.place].cpu().numpy()
        if name not in self._columns:
            widest = np.result_type(values.dtype, np.float64 if wide_dtype() == torch.float64 else np.float32)
            self._columns[name] = Column(self._clients, event.rule.reduction, widest)
        self._columns[name].add(rows, values, step.size if event.batch_size is None else event.batch_size)

    @property
    def metrics(self) -> set[str]:
        """Paths of the metrics that were logged themselves."""
        return set(self._metrics.values())

    def values(self) -> list[dict[str, float | str]]:
        """Return for each client what it logged, by the names that a logger sees.

        A value is a number, or the path of the metric that computes it.
        """
        columns: list[tuple[str, list[bool], list[float] | str]] = []
        for name, rule in self._rules.items():
            if rule.logger:
                own = self._columns[name]
                columns.append((rule.epoch_name, own.seen.tolist(), self._metrics.get(name) or own.values()))
        return [
            {name: values if isinstance(values, str) else values[row] for name, seen, values in columns if seen[row]}
            for row in range(self._clients)
        ]

    def losses(self) -> list[dict[str, float]]:
        """Return the mean of the losses that steps returned, for clients whose module logs nothing."""
        pairs = zip(self._losses.values(), self._losses.seen.tolist(), strict=True)
        return [{"loss": loss} if seen else {} for loss, seen in pairs]

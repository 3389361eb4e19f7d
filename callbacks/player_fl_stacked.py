"""PLayer-FL on a stack of clients: F's terms of every client, from the gradients of the stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedlightning.callbacks.diagnostics.sensitivity_terms import SensitivityAccumulator
from fedlightning.layers import ForwardOrder
from fedlightning.stacked.stacked_fit import StackHooks, Turn
from fedlightning.tensors import widen

if TYPE_CHECKING:
    from fedlightning.callbacks.player_fl import PLayerFL
    from fedlightning.stacked.stacked_fit import StackedFit


class StackedSensitivities(StackHooks):
    """The measurement of :class:`~fedlightning.callbacks.player_fl.PLayerFL` in round 1, for many clients at once.

    Each client's record is the `SensitivityAccumulator` that it has in other engines. The clients share one forward
    order, since all run the code of one module.

    Args:
        options: The callback with its hyper-parameters.
        fit: The fit of the stack.
    """

    def __init__(self, options: PLayerFL, fit: StackedFit) -> None:
        from fedlightning.callbacks.player_fl import PROBE

        self._trainees = fit.trainees
        first = {id(parameter): name for name, parameter in fit.module.named_parameters()}
        every = fit.module.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(parameter)] for name, parameter in every}  # a tied parameter counts once
        self._records: dict[int, SensitivityAccumulator] = {}
        for row, trainee in enumerate(fit.trainees):
            if trainee.client.message.tag == PROBE:
                record = SensitivityAccumulator(trainee.client.module, options.weights_only, options.order or ())
                self._records[row] = trainee.client.scratch[options.key] = record
        self._watch = ForwardOrder(fit.module) if self._records and options.order is None else None

    @torch.no_grad()
    def before_step(self, turn: Turn) -> None:
        """Add a step of the first epoch, before any correction."""
        self._stop_watching()
        if not turn.gradients or not any(self._probes(row) for row in turn.numbers):
            return
        squares = {self._names[name]: _squares(turn.parameters[name], turn.gradients[name]) for name in turn.gradients}
        stepped = {self._names[name] for name in turn.parameters}
        for place, row in enumerate(turn.numbers):
            if self._probes(row):
                self._records[row].add_terms({name: values[place] for name, values in squares.items()}, stepped)

    def _probes(self, row: int) -> bool:
        return row in self._records and self._trainees[row].epoch == 0

    def _stop_watching(self) -> None:
        """After the first batch the order in which it met the layers is known."""
        if self._watch is not None:
            order, self._watch = self._watch.names(), None
            for record in self._records.values():
                record.order = order

    def finish(self) -> None:
        """Let go of the module if no step was taken."""
        self._stop_watching()


def _squares(parameters: Tensor, gradients: Tensor) -> list[float]:
    """`sum (theta grad)^2` of every client."""
    values: list[float] = (widen(parameters) * widen(gradients)).square().flatten(1).sum(1).tolist()
    return values

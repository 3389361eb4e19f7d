"""APFL on a stack of clients: their local models train beside the stack of the models that travel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedlightning.algorithm import State, address
from fedlightning.callbacks.apfl import ParameterMixture, alpha_slope, mix, next_alpha
from fedlightning.stacked.stack import Stack, column, put, side_by_side, take
from fedlightning.stacked.stacked_fit import StackHooks, Turn
from fedlightning.stacked.step import clip, gradients

if TYPE_CHECKING:
    from fedlightning.callbacks.apfl import APFL
    from fedlightning.stacked.stacked_fit import StackedFit


class StackedMixtures(StackHooks):
    """The steps of :class:`~fedlightning.callbacks.apfl.ParameterMixture` for many clients at once.

    Args:
        options: The callback with its hyper-parameters.
        fit: The fit of the stack.

    Attributes:
        alpha: The share `a` of each client.
        new_alpha: Each client's share from the next step on; `None` if it stays.
        moves_alpha: Whether each client's `a` still has to move in this round.
        v: The local models.
        active: Rows of the clients whose `v` or `a` may move in this step.
        found: `a grad f(vbar)` of the active clients by name, `(num_active, ...)`.
    """

    def __init__(self, options: APFL, fit: StackedFit) -> None:
        self.options, self.fit = options, fit
        self.mixtures = [ParameterMixture(trainee.client, options) for trainee in fit.trainees]
        self.alpha = [mixture.alpha for mixture in self.mixtures]
        self.new_alpha: list[float | None] = [None] * len(self.mixtures)
        self.moves_alpha = [options.adaptive] * len(self.mixtures)
        self.v = Stack(self.mixtures[0].twin, len(self.mixtures), fit.device, fit.stack.shared)
        for row, mixture in enumerate(self.mixtures):
            self.v.pull(row, mixture.twin)
        self.optimizer = type(fit.optimizer)({name: self.v.tensors[name] for name in fit.names}, len(self.mixtures))
        self.scaled_gradients: State = {}
        self.active: list[int] = []

    def before_step(self, turn: Turn) -> None:
        """Take `a grad f(vbar)` and, on a client's first batch, compute its next `a`."""
        self.scaled_gradients = {}
        self.active = [row for row in turn.numbers if self.alpha[row] != 0.0 or self.moves_alpha[row]]
        if not self.active:
            return
        rows = side_by_side(self.active)
        v = {name: take(self.v.tensors[name], rows) for name in self.fit.names}
        w = {name: take(self.fit.stack.tensors[name], rows) for name in self.fit.names}
        at_vbar = self._mixture_gradient(turn, v, w)
        slopes: list[float] = alpha_slope(v, w, at_vbar, stacked=True).tolist()
        for row, slope, lr in zip(self.active, slopes, turn.rates(0, self.active), strict=True):
            if self.moves_alpha[row] and math.isfinite(slope):
                lr = lr if self.options.alpha_lr is None else self.options.alpha_lr
                self.new_alpha[row] = next_alpha(self.alpha[row], slope, lr, self.options.alpha_decay)
                self.moves_alpha[row] = False
        self.scaled_gradients = {name: gradient * self._share(gradient) for name, gradient in at_vbar.items()}

    def _mixture_gradient(self, turn: Turn, v: State, w: State) -> State:
        """`grad f(vbar)` of the active clients by name; their buffers move."""
        with torch.no_grad():
            vbar = {name: mix(v[name], w[name], self._share(v[name])).requires_grad_() for name in v}
        rows = side_by_side(self.active)
        frozen = [name for name in self.v.parameters if name not in vbar]
        rest = {name: self.v.take(name, rows) for name in (*frozen, *self.v.buffers)}
        tensors = [vbar[name] if name in vbar else rest[name] for name in (*self.v.parameters, *self.v.buffers)]
        seeds = [self.mixtures[row].client.next_probe() for row in self.active]
        generators = [torch.Generator().manual_seed(address(*seed)) for seed in seeds]
        losses = self.fit.step(tensors, turn.batch_of(self.active), turn.place, generators).losses
        for name in self.v.buffers:
            put(self.v.tensors[name], rows, rest[name])
        raw = zip(vbar, gradients(losses, list(vbar.values())), strict=True)
        return {name: gradient for name, gradient in raw if gradient is not None}

    def _share(self, like: Tensor) -> float | Tensor:
        return column([self.alpha[row] for row in self.active], like)

    def after_step(self, turn: Turn) -> None:
        """Do `v <- v - eta a grad f(vbar)` where `a` is not 0; then move `a`."""
        places = [place for place, row in enumerate(self.active) if self.alpha[row] > 0.0]
        if self.scaled_gradients and places:
            chosen = [self.active[place] for place in places]
            scaled = (
                self.scaled_gradients
                if len(chosen) == len(self.active)
                else {n: g[places] for n, g in self.scaled_gradients.items()}
            )
            if self.fit.clip_value:
                clip(scaled.values(), self.fit.clip_value, self.fit.clip_algorithm)
            for name, gradient in scaled.items():
                settings = turn.settings_of(self.fit.group_of[name], chosen)
                self.optimizer.step(name, side_by_side(chosen), gradient, settings)
        for row in turn.numbers:
            after = self.new_alpha[row]
            if after is not None:
                self.alpha[row], self.new_alpha[row] = after, None

    def finish(self) -> None:
        """Hand every client its mixture, for `on_send`."""
        for row, mixture in enumerate(self.mixtures):
            self.v.push(row, mixture.twin)
            mixture.alpha = self.alpha[row]
            mixture.parameters = {name: p for name, p in mixture.twin.named_parameters() if p.requires_grad}
            mixture.client.scratch[self.options.key] = mixture

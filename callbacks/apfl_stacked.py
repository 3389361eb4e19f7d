"""APFL on a stack of clients: every client's personal model, trained beside the stack of the models that travel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedlightning.algorithm import address
from fedlightning.callbacks.apfl_mixtures import ParameterMixture
from fedlightning.engines.stacked.hooks import StackHooks, Turn
from fedlightning.engines.stacked.stack import Stack, column, put, side_by_side, take
from fedlightning.engines.stacked.step import clip, gradients

if TYPE_CHECKING:
    from fedlightning.callbacks.apfl import APFL
    from fedlightning.engines.stacked.fit import StackedFit


class StackedMixtures(StackHooks):
    """:class:`~fedlightning.callbacks.apfl_mixtures.ParameterMixture` of many clients, step for step."""

    def __init__(self, options: APFL, fit: StackedFit) -> None:
        self.options, self.fit = options, fit
        self.mixtures = [ParameterMixture(trainee.client, options) for trainee in fit.trainees]
        self.alpha = [mixture.alpha for mixture in self.mixtures]
        self.next_alpha: list[float | None] = [None] * len(self.mixtures)
        self.moves_alpha = [options.adaptive] * len(self.mixtures)
        self.v = Stack(self.mixtures[0].twin, len(self.mixtures), fit.device)
        for row, mixture in enumerate(self.mixtures):
            self.v.pull(row, mixture.twin)
        self.optimizer = type(fit.optimizer)({name: self.v.tensors[name] for name in fit.names}, len(self.mixtures))
        self.found: dict[str, Tensor] = {}
        self.active: list[int] = []

    def before_step(self, turn: Turn) -> None:
        """``a grad f(vbar)`` and, on a client's first batch, its next ``a``."""
        self.found = {}
        self.active = [row for row in turn.numbers if self.alpha[row] != 0.0 or self.moves_alpha[row]]
        if not self.active:
            return
        rows = side_by_side(self.active)
        mixed, apart = self._mixed(rows)
        frozen = [name for name in self.v.parameters if name not in mixed]
        rest = {name: take(self.v.tensors[name], rows) for name in (*frozen, *self.v.buffers)}
        tensors = [mixed[name] if name in mixed else rest[name] for name in (*self.v.parameters, *self.v.buffers)]
        seeds = [self.mixtures[row].client.next_probe() for row in self.active]
        generators = [torch.Generator().manual_seed(address(*seed)) for seed in seeds]
        losses = self.fit.step(tensors, turn.batch_of(self.active), turn.place, generators).losses
        for name in self.v.buffers:
            put(self.v.tensors[name], rows, rest[name])
        raw = dict(zip(mixed, gradients(losses, list(mixed.values())), strict=True))
        there = {name: gradient for name, gradient in raw.items() if gradient is not None}
        slopes = self._slopes(apart, there)
        rates = turn.rates(0, self.active)
        for row, slope, rate in zip(self.active, slopes, rates, strict=True):
            if self.moves_alpha[row] and math.isfinite(slope):
                lr = rate if self.options.alpha_lr is None else self.options.alpha_lr
                slope += self.options.alpha_decay * self.alpha[row]
                self.next_alpha[row] = min(max(self.alpha[row] - lr * slope, 0.0), 1.0)
                self.moves_alpha[row] = False
        shares = [self.alpha[row] for row in self.active]
        self.found = {name: gradient * column(shares, gradient) for name, gradient in there.items()}

    @torch.no_grad()
    def _mixed(self, rows: slice | list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """``vbar``, ready for a gradient, and ``v - w``; by name."""
        mixed, apart = {}, {}
        for name in self.fit.names:
            v, own = take(self.v.tensors[name], rows), take(self.fit.stack.tensors[name], rows)
            share = column([self.alpha[row] for row in self.active], v)
            mixed[name] = (share * v + (1 - share) * own).requires_grad_()
            apart[name] = v - own
        return mixed, apart

    @staticmethod
    def _slopes(apart: dict[str, Tensor], found: dict[str, Tensor]) -> Sequence[float]:
        """Each client's ``<v - w, grad f(vbar)>``."""
        terms = [(apart[name].double() * gradient.double()).flatten(1).sum(1) for name, gradient in found.items()]
        slopes: list[float] = torch.stack(terms).sum(0).tolist()
        return slopes

    def after_step(self, turn: Turn) -> None:
        """``v <- v - eta a grad f(vbar)`` where ``a`` is not 0; then ``a`` moves."""
        places = [place for place, row in enumerate(self.active) if self.alpha[row] > 0.0]
        if self.found and places:
            chosen = [self.active[place] for place in places]
            found = self.found if len(chosen) == len(self.active) else {n: g[places] for n, g in self.found.items()}
            if self.fit.clip_value:
                clip(found.values(), self.fit.clip_value, self.fit.clip_algorithm)
            for name, gradient in found.items():
                settings = turn.settings_of(self.fit.group_of[name], chosen)
                self.optimizer.step(name, side_by_side(chosen), gradient, settings)
        for row in turn.numbers:
            after = self.next_alpha[row]
            if after is not None:
                self.alpha[row], self.next_alpha[row] = after, None

    def finish(self) -> None:
        """Hand every client its mixture, for ``on_send``."""
        for row, mixture in enumerate(self.mixtures):
            self.v.push(row, mixture.twin)
            mixture.alpha = self.alpha[row]
            mixture.parameters = {name: p for name, p in mixture.twin.named_parameters() if p.requires_grad}
            mixture.client.scratch[self.options.key] = mixture

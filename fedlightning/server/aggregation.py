"""How a round's updates become the next models."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedlightning.contract.messages import GLOBAL, Update
from fedlightning.errors import ConfigurationError
from fedlightning.server.server import Server
from fedlightning.tensors import State, WeightedMean, clone, equal, has_mean, load_state, module_state, narrow, widen
from fedlightning.tensors.parametrized import keeps_vectors, settle


class Aggregation:
    """Folds a round's updates into the next models, one by one in client order.

    Memory is one accumulator per model, unless a callback's `reduce` needs all updates at once.

    Args:
        server: Holds the models before, and after :meth:`finish`.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.reducer = server.callbacks.role("reduce")
        self.means: dict[str, WeightedMean] = {}
        self.updates: dict[str, list[Update]] = {}

    def fold(self, update: Update, base: Mapping[str, Tensor] | None = None) -> None:
        """Take in one update, which has been checked. Its model entries are released unless the reducer needs them."""
        server = self.server
        server.callbacks.event("on_update", server, update)
        if base is not None:
            update = replace(update, state=self._moved(update, base))
        if self.reducer is not None:
            self.updates.setdefault(update.model, []).append(update)
        else:
            self.means.setdefault(update.model, WeightedMean()).add(update.state, server.weight(update))

    def _moved(self, update: Update, base: Mapping[str, Tensor]) -> State:
        """Return the update's entries, moved as far as the server's have moved since they were sent."""
        now, moved = self.server.models[update.model], dict(update.state)
        for name, value in update.state.items():
            then = base.get(name)
            if then is None or then is now[name] or not has_mean(value):
                continue
            if not torch.equal(then, now[name]):
                moved[name] = narrow(widen(now[name]) + (widen(value) - widen(then)), value)
        return moved

    def finish(self, nobody: bool = False) -> None:
        """Replace the server's models by the new ones."""
        server = self.server
        reduced = {model: self._mean(model, mean) for model, mean in self.means.items()}
        for model, updates in self.updates.items():
            assert self.reducer is not None
            server.models.combining = model
            reduced[model] = self.reducer.reduce(server, updates)
        if nobody and any(callback.claims("on_reduced") for callback in server.callbacks):
            present = server.models[GLOBAL]
            reduced[GLOBAL] = reduced.get(GLOBAL) or {name: present[name] for name in server.shared_names()}
        step = server.callbacks.role("server_step")
        for model, state in reduced.items():
            if not state:
                continue
            server.models.combining = model
            for callback in server.callbacks:
                state = callback.on_reduced(server, state)
            old: dict[str, Tensor] = {name: server.models[model][name] for name in state}
            if nobody and equal(old, state):  # momentum alone would move the model
                continue
            new = state if step is None else step.server_step(server, old, state)
            moved = {**server.models[model], **new}
            server.models[model] = _settled(server.models.architecture(model).module, moved, new)
        server.models.combining = GLOBAL

    def _mean(self, model: str, mean: WeightedMean) -> State:
        """Return the weighted mean, or the change divided by the number that a callback names."""
        server, owner, found = self.server, self.server.callbacks.role("denominator"), mean.result()
        server.models.combining = model
        divisor = None if owner is None else owner.denominator(server)
        if divisor is None:
            return found
        if not 0.0 < divisor < math.inf:
            assert owner is not None
            raise ConfigurationError(f"{owner.key}.denominator is {divisor!r}, which must be a positive number.")
        for name, value in found.items():
            share = mean.weight(name) / divisor
            if has_mean(value) and share != 1.0:
                old = widen(server.models[model][name])
                found[name] = narrow(old + share * (widen(value) - old), value)
        return found


def _settled(module: nn.Module, state: State, came: Collection[str]) -> State:
    """Return all entries of a model with the vectors of its spectral norms, which are of its matrices."""
    if not keeps_vectors(state):
        return state
    made = copy.deepcopy(module)
    load_state(made, state)
    settle(made, came)
    return clone(module_state(made, state))

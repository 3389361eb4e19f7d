"""How a round's updates become the next models."""

from __future__ import annotations

from torch import Tensor

from fedlightning.federation.server import Server
from fedlightning.messages import GLOBAL, Update
from fedlightning.tensors import WeightedMean


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

    def fold(self, update: Update) -> None:
        """Take in one update, which has been checked. Its model entries are released unless the reducer needs them."""
        server = self.server
        server.callbacks.event("on_update", server, update)
        if self.reducer is not None:
            self.updates.setdefault(update.model, []).append(update)
        else:
            self.means.setdefault(update.model, WeightedMean()).add(update.state, server.weight(update))

    def finish(self) -> None:
        """Replace the server's models by the new ones."""
        server = self.server
        reduced = {model: mean.result() for model, mean in self.means.items()}
        for model, updates in self.updates.items():
            assert self.reducer is not None
            server.combining = model
            reduced[model] = self.reducer.reduce(server, updates)
        step = server.callbacks.role("server_step")
        for model, state in reduced.items():
            if not state:
                continue
            server.combining = model
            for callback in server.callbacks:
                state = callback.on_reduced(server, state)
            old: dict[str, Tensor] = {name: server.models[model][name] for name in state}
            new = state if step is None else step.server_step(server, old, state)
            server.models[model] = {**server.models[model], **new}
        server.combining = GLOBAL

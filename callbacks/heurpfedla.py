"""HeurpFedLA."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedlightning.algorithm import Client, Job, Message, Server, Setup, Update, clone, module_state, partition
from fedlightning.callbacks.pfedla import PFedLA, layers_of


class HeurpFedLA(PFedLA):
    """pFedLA that saves traffic: the layers a client relies on itself for most are not sent. See :class:`PFedLA`.

    The k layers with the largest ``alpha_i[l, i]`` stay as the client trained them (``thbar_i[l] = theta_i[l]``): they
    do not travel down, and the hypernetwork gets no gradient through them. All layers still go up, since others mix
    them. State at the client: its last model.

    Args:
        keep_layers: k, less than the number of layers (the paper tunes it; default 1).
        hn_lr, embedding, hidden, normalise: as in pFedLA.
    """

    def __init__(
        self,
        keep_layers: int = 1,
        hn_lr: float = 5e-3,
        embedding: int = 100,
        hidden: int = 100,
        normalise: Literal["softmax", "relu"] = "softmax",
    ) -> None:
        super().__init__(hn_lr, embedding, hidden, normalise)
        self.keep_layers = keep_layers

    def check(self, setup: Setup) -> None:
        """Refuse to keep everything."""
        super().check(setup)
        count = len([layer for layer in partition(setup.module) if layer])
        if not 0 <= self.keep_layers < count:
            raise ValueError(
                f"HeurpFedLA got keep_layers={self.keep_layers}; {type(setup.template).__name__} has {count} layers. "
                "Keep fewer than all, or use Local()."
            )

    def kept(self, server: Server, client: str) -> list[int]:
        """The layers that stay; none before the client has a model of its own."""
        if client not in server.state.get(self.key, {}).get("models", {}):
            return []
        travelling = set(server.shared_names())
        itself = self.weights(server, client)[:, server.clients.index(client)].tolist()
        layers = [index for index, layer in enumerate(layers_of(server)) if travelling.intersection(layer)]
        return sorted(layers, key=lambda layer: -itself[layer])[: self.keep_layers]

    def rows(self, server: Server, client: str) -> Tensor:
        """All weight on itself in the layers that stay."""
        rows = self.weights(server, client).clone()
        rows[self.kept(server, client)] = torch.eye(len(server.clients), dtype=rows.dtype)[server.clients.index(client)]
        return rows

    def mixed(self, server: Server, client: str) -> list[int]:
        """All but those that stay."""
        kept = self.kept(server, client)
        return [layer for layer in super().mixed(server, client) if layer not in kept]

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """``thbar_i`` without what stays."""
        super().on_broadcast(server, job, message)
        if job.client in server.clients:
            stays = {name for index in self.kept(server, job.client) for name in layers_of(server)[index]}
            message.state = {name: value for name, value in message.state.items() if name not in stays}

    def on_receive(self, client: Client, message: Message) -> None:
        """What did not come is the client's own."""
        message.state = client.state.get(self.key, {}).get("theta", {}) | message.state

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``theta_i``: what a client sends does not stay by itself."""
        if client.steps:
            own = clone(module_state(client.module, client.message.returns), "cpu")
            client.state[self.key] = {"theta": own}

"""HeurpFedLA."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedlightning.algorithm import Change, Client, Facts, Job, Message, Server, Setup, Update
from fedlightning.callbacks.pfedla import layers_of, pFedLA
from fedlightning.layers import partition
from fedlightning.tensors import clone, module_state, ties


class HeurpFedLA(pFedLA):
    """pFedLA that saves traffic: the layers for which a client relies on itself most are not sent.

    Ma et al., CVPR 2022 (see :class:`pFedLA`). k layers stay as the client trained them, ``thbar_i[l] = theta_i[l]``:
    those with the largest ``alpha_i[l, i]``. They do not travel down, and the hypernetwork gets no gradient through
    them. All layers still go up, since others mix them.

    The first weights are noise around ``1/N``, and a layer that stays gets no gradient, so a choice made before anything is
    learned would last. By default the k layers are those whose ``alpha_i[l, i]`` has *grown* most since the start, and none
    stays that has not grown.

    * Down: ``thbar_i`` without k layers. Up: ``theta_i``.
    * State: as in pFedLA, and ``theta_i`` at the client.
    * Deployed: ``thbar_i`` at stage L1. There is no global model.

    Args:
        keep_layers: k, less than the number of layers. Default 1 (the paper tunes it).
        keep_by: ``"growth"`` (default) of ``alpha_i[l, i]`` since the start, or its ``"weight"``, the first ones included.
        hn_lr: Learning rate of the hypernetworks. Default 0.5, as in pFedLA.
        embedding: Size of ``e_i``. Default 100.
        hidden: Width of the perceptron's layers. Default 100.
        normalise: ``"softmax"`` (default) or ``"relu"``, as in pFedLA.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        By weight, a client that has sent a model keeps one layer; one that never took part gets all of them. By growth,
        none stays before something is learned.

        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from fedlightning.callbacks import HeurpFedLA
        >>> module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
        >>> server = SimpleNamespace(module=module, clients=["a", "b"], state={"HeurpFedLA": {"models": {"a": {}}}},
        ...                          seed_of=lambda source: 0, shared_names=module.state_dict)
        >>> [len(HeurpFedLA(keep_layers=1, keep_by="weight").choose_layers(server, client)) for client in server.clients]
        [1, 0]
        >>> HeurpFedLA(keep_layers=1).choose_layers(server, "a")
        []
    """

    @property
    def facts(self) -> Facts:
        """Training starts from a mixture with the client's own model."""
        return super().facts.extend(changes={Change.START, Change.ONE_WAY})

    def __init__(
        self,
        keep_layers: int = 1,
        hn_lr: float = 0.5,
        embedding: int = 100,
        hidden: int = 100,
        normalise: Literal["softmax", "relu"] = "softmax",
        keep_by: Literal["growth", "weight"] = "growth",
    ) -> None:
        super().__init__(hn_lr, embedding, hidden, normalise)
        self.keep_layers = keep_layers
        self.keep_by = keep_by

    def check(self, setup: Setup) -> None:
        """Refuse to keep all layers.

        Raises:
            ValueError: If ``keep_layers`` is negative or not less than the number of layers, or a callback changes one
                global model.
        """
        super().check(setup)
        count = len([layer for layer in partition(setup.module) if layer])
        if not 0 <= self.keep_layers < count:
            raise ValueError(
                f"HeurpFedLA got keep_layers={self.keep_layers}; {type(setup.template).__name__} has {count} layers. "
                "Keep fewer than all, or use Local()."
            )

    def choose_layers(self, server: Server, client: str) -> list[int]:
        """Return the indices of the layers that stay; none before the client has a model of its own, or has learned."""
        if client not in server.state.get(self.key, {}).get("models", {}):
            return []
        travelling = set(server.shared_names())
        place = server.clients.index(client)
        itself = self.weights(server, client)[:, place]
        layers = [index for index, layer in enumerate(layers_of(server)) if travelling.intersection(layer)]
        if self.keep_by == "growth":
            with torch.no_grad():
                itself = itself - self.network(server, client)()[:, place]
            layers = [layer for layer in layers if itself[layer] > 0]
        ranks = ties.levelled(itself).tolist()
        return sorted(layers, key=lambda layer: -ranks[layer])[: self.keep_layers]

    def rows(self, server: Server, client: str) -> Tensor:
        """Return ``alpha_i`` with all weight on the client itself in the layers that stay."""
        rows = self.weights(server, client).clone()
        rows[self.choose_layers(server, client)] = torch.eye(len(server.clients), dtype=rows.dtype)[
            server.clients.index(client)
        ]
        return rows

    def mixed(self, server: Server, client: str) -> list[int]:
        """Return the indices of all layers but those that stay."""
        kept = self.choose_layers(server, client)
        return [layer for layer in super().mixed(server, client) if layer not in kept]

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ``thbar_i`` without the layers that stay."""
        super().on_broadcast(server, job, message)
        if job.client in server.clients:
            stays = {name for index in self.choose_layers(server, job.client) for name in layers_of(server)[index]}
            message.state = {name: value for name, value in message.state.items() if name not in stays}

    def on_receive(self, client: Client, message: Message) -> None:
        """Fill what did not come with the client's own entries."""
        message.state = client.state.get(self.key, {}).get("theta", {}) | message.state

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``theta_i``: the core does not keep what a client sends."""
        if client.contributed:
            theta = clone(module_state(client.module, client.message.returns), "cpu")
            client.state[self.key] = {"theta": theta}

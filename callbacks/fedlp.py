"""FedLP."""

from __future__ import annotations

import torch

from fedlightning.algorithm import POOLED, Change, Client, Facts, FederatedCallback, Update, WeightingName, requires
from fedlightning.layers import partition
from fedlightning.ranges import Share


class FedLP(FederatedCallback):
    """Layer-wise pruning of the uplink: a client trains the whole model and sends a random choice of its layers.

    Zhu, Shi, Luo, Wang, Peng, Fan, Letaief, "FedLP: layer-wise pruning mechanism for communication-efficient federated
    learning", ICC 2023 (the homogeneous scheme).

    * Client: local training from ``w^t``. For each layer ``l`` it draws ``b_il ~ Bernoulli(q_i)``, anew in every round.
    * Server, per layer: ``w_l = sum_i b_il p_i w_il / sum_i b_il p_i``. A layer that nobody sent keeps its value.
    * Down: ``w^t``. Up: the layers with ``b_il = 1``. State: none.
    * Deployed: the global model ``w``.

    A layer is an operation with its bias and its normalisation, which share one draw.

    Args:
        q: Probability that a layer is sent, or one for each client by id. Default 0.7 (the PLayer-FL comparison); the
            paper uses 0.1 to 0.7. 1 is FedAvg.
        weighting: ``"samples"`` (paper, default) or ``"uniform"`` (the authors' code).

    Raises:
        ValueError: If a probability is outside [0, 1].

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import FedLP
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> client = SimpleNamespace(id="0", module=module, rng=lambda _: torch.Generator().manual_seed(1))
        >>> update = SimpleNamespace(state=module.state_dict())
        >>> FedLP(q=0.5).on_send(client, update)
        >>> list(update.state)
        ['1.weight', '1.bias']
    """

    facts = Facts(changes={Change.PARTS}, requires=[requires.ForEveryClient(of=("q",))])

    def __init__(self, q: Share | dict[str, Share] = 0.7, weighting: WeightingName | None = None) -> None:
        self.q = q
        self.weighting = weighting

    def on_send(self, client: Client, update: Update) -> None:
        """Send only the layers that were drawn."""
        if not update.state or client.id == POOLED:
            return
        q = self.q[client.id] if isinstance(self.q, dict) else self.q
        layers = list(partition(client.module).values())
        sent = torch.rand(len(layers), generator=client.rng("layers to send")) < q
        names = {name for layer, chosen in zip(layers, sent.tolist(), strict=True) if chosen for name in layer}
        update.state = {name: value for name, value in update.state.items() if name in names}

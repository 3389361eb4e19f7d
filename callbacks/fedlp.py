"""FedLP."""

from __future__ import annotations

import torch

from fedlightning.algorithm import POOLED, Client, FederatedCallback, Setup, Update, WeightingName, partition


class FedLP(FederatedCallback):
    r"""Layer-wise pruning of the uplink: a client trains the whole model and sends a random choice of its layers.

    Zhu, Shi, Luo, Wang, Peng, Fan, Letaief, "FedLP: layer-wise pruning mechanism for communication-efficient federated
    learning", ICC 2023 (the homogeneous scheme).

    Down: ``w^t``. Up: the layers ``l`` with ``b_il = 1``, where ``b_il ~ Bernoulli(q_i)`` is drawn anew for each
    client, round and layer. Server, per layer: ``w_l = sum_i b_il p_i w_il / sum_i b_il p_i``; a layer that nobody sent
    keeps its value. A layer is an operation with its bias and its normalisation, and they share one draw. No state.

    Args:
        q: probability that a layer is sent (paper: 0.1 to 0.7; default 0.7, as in the PLayer-FL comparison), or one for
            each client by id. 1 is FedAvg.
        weighting: ``"samples"`` (paper) or ``"uniform"`` (the authors' code).
    """

    def __init__(self, q: float | dict[str, float] = 0.7, weighting: WeightingName | None = None) -> None:
        for value in q.values() if isinstance(q, dict) else [q]:
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"FedLP got q={q}; the probability that a layer is sent must be in [0, 1].")
        self.q = q
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse a table of probabilities that leaves a client out."""
        missing = [client for client in setup.clients if isinstance(self.q, dict) and client not in self.q]
        if missing:
            raise ValueError(f"FedLP got no q for client '{missing[0]}'. Give one number, or one for each client.")

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the layers whose coin says so."""
        if not update.state or client.id == POOLED:
            return
        q = self.q[client.id] if isinstance(self.q, dict) else self.q
        layers = list(partition(client.module).values())
        sent = torch.rand(len(layers), generator=client.rng("layers to send")) < q
        names = {name for layer, chosen in zip(layers, sent.tolist(), strict=True) if chosen for name in layer}
        update.state = {name: value for name, value in update.state.items() if name in names}

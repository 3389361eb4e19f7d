"""FLIU."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedlightning.algorithm import (
    POOLED,
    Change,
    Client,
    Facts,
    FederatedCallback,
    Job,
    Message,
    Server,
    Update,
    WeightingName,
    Wire,
)
from fedlightning.ranges import Share
from fedlightning.tensors import clone, interpolate, module_state


class FLIU(FederatedCallback):
    """Individualised updates: a client blends the model it had with the one it receives.

    Hussaini, Theiß, Stein, "Local performance vs. out-of-distribution generalization ...", 2025.

    * L1: ``theta_k <- gamma_k theta_k + (1 - gamma_k) Theta`` over parameters and float buffers; integers are
      ``Theta``'s.
    * L2: local training from there.
    * Server: ``Theta = (1/K) sum_k theta_k``.
    * Down: ``Theta``, n and K. Up: ``theta_k``.
    * State: ``theta_k`` at each client. A client that was absent blends what it had then with the present ``Theta``.
    * Deployed: the blend. The global model is ``Theta``.

    With ``gamma="adaptive"`` the share depends on the client's size ``n_k``, with ``nbar = n/K``: 0.9 if
    ``n_k > 10 nbar``, 0.75 if ``n_k > 5 nbar``, 0.5 if ``n_k > nbar``, 0.25 if ``n_k > nbar/2``, else 0.1. With K = 10
    or fewer clients 0.9 cannot occur, with 5 or fewer neither can 0.75.

    Args:
        gamma: A fixed share in [0, 1] of the client's own model, or ``"adaptive"`` (default): by size, as above.
        weighting: ``"uniform"`` (the pseudocode, default) or ``"samples"`` (objectives (1)-(2)).

    Raises:
        ValueError: If ``gamma`` is neither ``"adaptive"`` nor in [0, 1].

    Example:
        >>> from fedlightning.callbacks import FLIU
        >>> [FLIU().gamma_of(samples, total=1000, clients=20) for samples in (600, 300, 60, 30, 10)]
        [0.9, 0.75, 0.5, 0.25, 0.1]
    """

    facts = Facts(changes={Change.START})

    def __init__(
        self, gamma: Share | Literal["adaptive"] = "adaptive", weighting: WeightingName | None = "uniform"
    ) -> None:
        self.gamma = gamma
        self.weighting = weighting

    def wire(self, module: nn.Module) -> Wire:
        """Declare n and K down, which the adaptive rule needs."""
        return Wire(down={"total_samples": "scalar", "num_clients": "scalar"})

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send n and K, over all clients, present or not."""
        total = sum(server.num_samples.values())
        message.extras[self.key] = {"total_samples": total, "num_clients": len(server.clients)}

    def gamma_of(self, samples: int, total: int, clients: int) -> float:
        """Return the share of the client's own model.

        The adaptive rule compares ``n_k K`` with multiples of ``n``, which is exact in integers.

        Args:
            samples: ``n_k``, the client's training samples.
            total: ``n``, those of all clients.
            clients: ``K``, the number of clients.
        """
        if self.gamma != "adaptive":
            return float(self.gamma)
        scaled = samples * clients
        for factor, gamma in ((10, 0.9), (5, 0.75), (1, 0.5)):
            if scaled > factor * total:
                return gamma
        return 0.25 if 2 * scaled > total else 0.1

    def on_receive(self, client: Client, message: Message) -> None:
        """Blend ``Theta`` with the client's own model (stage L1). A client that has not trained yet takes ``Theta``."""
        own_model = client.state.get(self.key, {}).get("theta")
        if own_model is None or message.client == POOLED:
            return
        payload = message.extras[self.key]
        gamma = self.gamma_of(client.num_samples, payload["total_samples"], payload["num_clients"])
        received = {name: value for name, value in message.state.items() if name in own_model}
        message.state = message.state | interpolate(own_model, received, gamma)

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``theta_k`` for the next blend."""
        if client.contributed:
            client.state[self.key] = {"theta": clone(module_state(client.module, client.received))}

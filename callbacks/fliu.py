"""FLIU."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    Job,
    Message,
    Server,
    Update,
    WeightingName,
    Wire,
    clone,
    interpolate,
    module_state,
)


class FLIU(FederatedCallback):
    """Federated learning with individualised updates: a client blends what it had with what it receives.

    Hussaini, Theiß, Stein, "Local performance vs. out-of-distribution generalization ...", 2025.

    Down: ``Theta``. Up: ``theta_k``. State: ``theta_k`` at each client. L1: ``theta_k <- gamma_k theta_k + (1 -
    gamma_k) Theta`` over parameters and float buffers (integers from ``Theta``); L2: local training from there; G:
    ``Theta = (1/K) sum_k theta_k``. A client that was absent blends what it had then with the present ``Theta``.

    With K = 10 or fewer clients the 0.9 of the adaptive rule cannot occur, with 5 or fewer the 0.75 neither.

    Args:
        gamma: a fixed share in [0, 1] of the client's own model, or ``"adaptive"``: by size, with ``nbar = n/K``:
            0.9 if ``n_k > 10 nbar``, 0.75 if ``> 5 nbar``, 0.5 if ``> nbar``, 0.25 if ``> nbar/2``, else 0.1.
        weighting: ``"uniform"`` (the pseudocode) or ``"samples"`` (objectives (1)-(2)).
    """

    def __init__(self, gamma: float | Literal["adaptive"] = "adaptive", weighting: WeightingName = "uniform") -> None:
        if gamma != "adaptive" and not (isinstance(gamma, int | float) and 0.0 <= gamma <= 1.0):
            raise ValueError(f"FLIU got gamma={gamma!r}. Use a number in [0, 1] or 'adaptive'.")
        self.gamma = gamma
        self.weighting = weighting

    def wire(self, module: nn.Module) -> Wire:
        """What the adaptive rule needs to know of the others: n and K."""
        return Wire(down={"total_samples": "scalar", "num_clients": "scalar"})

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """N and K over all clients, present or not."""
        total = sum(server.num_samples.values())
        message.extras[self.key] = {"total_samples": total, "num_clients": len(server.clients)}

    def gamma_of(self, samples: int, total: int, clients: int) -> float:
        """The client's share of its own model; exact integer comparisons of ``n_k K`` with multiples of ``n``."""
        if self.gamma != "adaptive":
            return float(self.gamma)
        scaled = samples * clients
        for factor, gamma in ((10, 0.9), (5, 0.75), (1, 0.5)):
            if scaled > factor * total:
                return gamma
        return 0.25 if 2 * scaled > total else 0.1

    def on_receive(self, client: Client, message: Message) -> None:
        """L1: blend. A client that has not trained yet takes ``Theta``."""
        own = client.state.get(self.key, {}).get("theta")
        if own is None or message.client == "pooled":
            return
        payload = message.extras[self.key]
        gamma = self.gamma_of(client.num_samples, payload["total_samples"], payload["num_clients"])
        received = {name: value for name, value in message.state.items() if name in own}
        message.state = message.state | interpolate(own, received, gamma)

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``theta_k`` for the next blend."""
        if client.steps:
            client.state[self.key] = {"theta": clone(module_state(client.module, client.received))}

"""FedAvgM."""

from __future__ import annotations

from fedlightning.algorithm import FederatedCallback, Server, State, WeightingName


class FedAvgM(FederatedCallback):
    """FedAvg with momentum on the server.

    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification",
    2019.

    Down: ``w^t``. Up: ``w_i``. State: the velocity ``vel`` at the server, in float64, from 0. On trainable parameters:

    * ``q = w^t - sum_i p_i w_i``
    * ``vel <- beta vel + q`` (heavy ball without dampening; MOON's and other code damps ``q`` by ``1 - beta``, which
      is this rule with ``eta_s (1 - beta)``)
    * ``w^{t+1} = w^t - eta_s vel``

    Buffers are averaged. A constant ``q`` is amplified to ``q / (1 - beta)``: where FedAvg's steps are large already,
    lower ``server_lr``.

    Args:
        beta: ``beta`` in [0, 1); the paper tunes it in {0, 0.7, 0.9, 0.97, 0.99, 0.997}. Default 0.9.
        server_lr: ``eta_s`` (paper: 1).
        weighting: ``"samples"`` (paper) or ``"uniform"``.
    """

    def __init__(self, beta: float = 0.9, server_lr: float = 1.0, weighting: WeightingName | None = None) -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"FedAvgM got beta={beta}; a momentum must be in [0, 1). Use 0 for FedAvg.")
        if server_lr <= 0:
            raise ValueError(f"FedAvgM got server_lr={server_lr}; it must be positive, or nothing is learned.")
        self.beta = beta
        self.server_lr = server_lr
        self.weighting = weighting

    def claims(self, role: str) -> bool:
        """``beta = 0, eta_s = 1`` is FedAvg: there is no server step then."""
        return super().claims(role) and not (role == "server_step" and self.beta == 0.0 and self.server_lr == 1.0)

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """One heavy-ball step on trainable parameters; every other entry is what the clients' mean says."""
        vel, new = dict(server.state.get(self.key, {}).get("vel", {})), dict(reduced)
        trainable = set(server.trainable)
        for name in reduced:
            if name in trainable:
                q = old[name].double() - reduced[name].double()
                vel[name] = self.beta * vel[name] + q if name in vel else q
                new[name] = (old[name].double() - self.server_lr * vel[name]).to(old[name].dtype)
        server.state[self.key] = {"vel": vel}
        return new

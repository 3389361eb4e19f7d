"""FedAvgM."""

from __future__ import annotations

from typing import Annotated

from fedlightning.algorithm import Facts, FederatedCallback, Newcomers, Server, State, WeightingName
from fedlightning.callbacks.shared.steps import memory, remember
from fedlightning.ranges import PositiveFloat, Range, make_init
from fedlightning.tensors import narrow, widen


@make_init
class FedAvgM(FederatedCallback):
    """FedAvg with momentum on the server.

    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification",
    2019.

    On trainable parameters the server takes a heavy-ball step, without dampening:

    * ``q = w^t - sum_i p_i w_i``
    * ``vel <- beta vel + q``
    * ``w^{t+1} = w^t - eta_s vel``

    Buffers are averaged. A constant ``q`` is amplified to ``q / (1 - beta)``: lower ``server_lr`` where FedAvg's steps
    are large already. MOON's and other code damps ``q`` by ``1 - beta``, which is this rule with ``eta_s (1 - beta)``.

    * Down: ``w^t``. Up: ``w_i``.
    * State: the velocity ``vel`` at the server, in float64, from 0.
    * Deployed: the global model ``w``.

    Args:
        beta: Momentum ``beta`` in [0, 1). Default 0.9; the paper tunes it in {0, 0.7, 0.9, 0.97, 0.99, 0.997}.
        server_lr: Server learning rate ``eta_s``. Default 1 (paper).
        weighting: ``"samples"`` (paper, default) or ``"uniform"``.

    Raises:
        ValueError: If ``beta`` is outside [0, 1) or ``server_lr`` is not positive.

    Example:
        The clients' mean is 1 ahead of the server twice; the second step is longer by ``beta``.

        >>> import torch
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import FedAvgM
        >>> server, w = SimpleNamespace(state={}, trainable=["w"], combining="global"), torch.zeros(1)
        >>> for _ in range(2):
        ...     w = FedAvgM(beta=0.9).server_step(server, {"w": w}, {"w": w + 1})["w"]
        ...     print(w)
        tensor([1.])
        tensor([2.9000])
    """

    # a step of the server is a step, whoever's changes it takes
    facts = Facts(mixes_architectures=True, asynchronous=True, newcomers=Newcomers(join=True))

    beta: Annotated[float, Range("[0, 1)", "0 is FedAvg.")] = 0.9
    server_lr: PositiveFloat = 1.0
    weighting: WeightingName | None = None

    def claims(self, role: str) -> bool:
        """Decline the server step where ``beta = 0, eta_s = 1``, which is FedAvg."""
        return super().claims(role) and not (role == "server_step" and self.beta == 0.0 and self.server_lr == 1.0)

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Take a heavy-ball step on trainable parameters; every other entry is the clients' mean."""
        vel, new = dict(memory(server, self.key).get("vel", {})), dict(reduced)
        trainable = set(server.trainable)
        for name in reduced:
            if name in trainable:
                q = widen(old[name]) - widen(reduced[name])
                vel[name] = self.beta * vel[name] + q if name in vel else q
                new[name] = narrow(widen(old[name]) - self.server_lr * vel[name], old[name])
        remember(server, self.key, {"vel": vel})
        return new

"""L2GD."""

from __future__ import annotations

import torch
from torch import nn

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    Job,
    Message,
    Plan,
    Server,
    Setup,
    Update,
    WeightingName,
    Wire,
    entry_kinds,
    interpolate,
    select,
)


class L2GD(FederatedCallback):
    r"""Loopless local gradient descent: a shared coin decides between a local step and a step towards the mean.

    Hanzely, Richtárik, "Federated learning of a mixture of global and local models", 2020.

    Minimises ``(1/N) sum_i f_i(x_i) + (lam/(2N)) sum_i ||x_i - xbar||^2``. Every step, one coin for all clients:

    * with probability ``1 - p``: ``x_i <- x_i - eta grad f_i(x_i)``, ``eta = a / (N (1 - p))``;
    * with probability ``p``: ``x_i <- (1 - theta) x_i + theta xbar``, ``theta = a lam / (N p) = eta lam (1 - p) / p``.

    ``eta`` is the learning rate of the module's optimizer (plain SGD), so ``a = eta N (1 - p)`` and the step does not
    shrink with the number of clients. Stochastic gradients are the loader's batches.

    Only a local step followed by an aggregation step communicates, so a **round** is m aggregation steps in a row (they
    leave ``xbar`` alone: the distance to it shrinks by ``(1 - theta)^m``), then k local steps, then ``x_i`` is sent.
    ``m >= 1`` and ``k >= 1`` come from the coin: on average ``1/(1 - p)`` and ``1/p``. That is why the trainer must
    count ``local_steps``; its value is not used.

    Down: ``xbar, m``. Up: ``x_i``. State: ``x_i`` and the learning rate at each client, the next m at the server. L1
    and the deployed model: ``x_i`` after the aggregation steps; the global model is ``xbar``. The method is meant for
    full participation: absent clients miss the steps of a round, and ``xbar`` is the mean of those who came.

    Args:
        lam: how much clients are alike in the end: 0 is training alone, infinity one model (paper: a parameter of the
            problem; default 1).
        p: probability of aggregation, in (0, 1) (ours: 0.1, ten local steps a round on average). ``theta <= 1`` is
            needed.
        weighting: ``"uniform"`` (paper): it alone keeps ``xbar`` the mean of the ``x_i``.
    """

    def __init__(self, lam: float = 1.0, p: float = 0.1, weighting: WeightingName = "uniform") -> None:
        if lam < 0:
            raise ValueError(f"L2GD got lam={lam}; a penalty cannot be negative. Use 0 for training alone.")
        if not 0.0 < p < 1.0:
            raise ValueError(f"L2GD got p={p}; a coin needs 0 < p < 1. Use Local() for p=0; p=1 trains nothing.")
        self.lam = lam
        self.p = p
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse epochs and a step past the mean; warn where steps are not plain SGD's."""
        if setup.local_steps is None:
            raise ValueError(
                f"L2GD decides by a coin how many steps a round has, but the trainer counts local_epochs="
                f"{setup.local_epochs}. Set local_steps=1 (the number itself is not used)."
            )
        for optimizer in setup.optimizers:
            theta = self.theta(max(float(group["lr"]) for group in optimizer.param_groups))
            if theta > 1.0:
                raise ValueError(
                    f"L2GD(lam={self.lam}, p={self.p}) would step past the mean: theta = lr * lam * (1 - p) / p = "
                    f"{theta:.3g}, and 1 is the mean itself. Lower lam or the learning rate, or raise p."
                )
            if type(optimizer).__name__ != "SGD" or optimizer.defaults.get("momentum"):
                setup.warn(
                    f"L2GD balances plain SGD steps against steps towards the mean; {type(optimizer).__name__} with a "
                    "memory or scale of its own shifts that balance. Use SGD without momentum."
                )

    def theta(self, lr: float) -> float:
        """The aggregation step that belongs to local steps of ``lr``."""
        return lr * self.lam * (1.0 - self.p) / self.p

    def wire(self, module: nn.Module) -> Wire:
        """How many aggregation steps in a row."""
        return Wire(down={"m": "scalar"})

    # -- server: the coin ----------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """K local steps for everybody, then the aggregation steps that the next message asks for."""
        coin = server.rng("coin")
        k = 1
        while float(torch.rand((), generator=coin)) >= self.p:
            k += 1
        m = 1
        while float(torch.rand((), generator=coin)) < self.p:
            m += 1
        yield [Job(client, work=k) for client in server.participants()]
        server.state[self.key] = {"m": m}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """m; before the first round there is nothing to aggregate."""
        message.extras[self.key] = {"m": server.state.get(self.key, {}).get("m", 0)}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_receive(self, client: Client, message: Message) -> None:
        """``x_i <- xbar + (1 - theta)^m (x_i - xbar)``; a newcomer starts at ``xbar``."""
        own = client.state.get(self.key)
        if own is None:
            return
        share = max(1.0 - self.theta(own["lr"]), 0.0) ** message.extras[self.key]["m"]
        x = {name: value for name, value in own["x"].items() if name in message.state}
        floats = {name: message.state[name] for name, value in x.items() if value.is_floating_point()}
        message.state = {**message.state, **x, **interpolate(x, floats, share)}

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``x_i`` and the learning rate it moved with."""
        if client.steps:
            moving = [name for name, kind in entry_kinds(client.module).items() if kind != "frozen"]
            x = select(client.model_state(), set(moving) & set(client.received))
            client.state[self.key] = {"x": x, "lr": client.lr_sum / client.steps}

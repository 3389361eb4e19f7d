"""L2GD."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import nn

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    FederatedCallback,
    Job,
    Message,
    Need,
    Newcomers,
    Plan,
    Server,
    Setup,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.steps import largest_lr
from fedlightning.ranges import Range, make_init
from fedlightning.tensors import entry_kinds, has_mean, interpolate, select

MEAN_MODEL = Need("pulls the clients towards the mean of their models", ("server_step", "on_reduced", "reduce"))


@make_init
class L2GD(FederatedCallback):
    """Loopless local gradient descent: a shared coin decides between a local step and a step towards the mean.

    Hanzely, Richtárik, "Federated learning of a mixture of global and local models", 2020.

    Minimises ``(1/N) sum_i f_i(x_i) + (lam/(2N)) sum_i ||x_i - xbar||^2``. In every step one coin is thrown for all
    clients:

    * with probability ``1 - p``: ``x_i <- x_i - eta grad f_i(x_i)``, ``eta = a / (N (1 - p))``;
    * with probability ``p``: ``x_i <- (1 - theta) x_i + theta xbar``, ``theta = a lam / (N p) = eta lam (1 - p) / p``.

    ``eta`` is the learning rate of the module's optimizer (plain SGD), so ``a = eta N (1 - p)`` and the step does not
    shrink with the number of clients. Stochastic gradients are the loader's batches.

    Only a local step followed by an aggregation step communicates. So a **round** is m aggregation steps in a row (they
    leave ``xbar`` alone: the distance to it shrinks by ``(1 - theta)^m``), then k local steps, then ``x_i`` is sent.
    ``m >= 1`` and ``k >= 1`` come from the coin: on average ``1/(1 - p)`` and ``1/p``. That is why the trainer must
    count ``local_steps``; its value is not used.

    * Down: ``xbar, m``. Up: ``x_i``.
    * State: ``x_i`` and the learning rate at each client, the next m at the server.
    * Deployed: ``x_i`` after the aggregation steps (stage L1). The global model is ``xbar``.

    The method is meant for full participation: absent clients miss the steps of a round, and ``xbar`` is the mean of
    those who came.

    Args:
        lam: Penalty: 0 is training alone, infinity one model. Default 1 (paper: a parameter of the problem).
        p: Probability of aggregation, in (0, 1). Default 0.1 (ours: ten local steps a round on average). ``theta <= 1``
            is needed.
        weighting: ``"uniform"`` (paper, default): it alone keeps ``xbar`` the mean of the ``x_i``.

    Raises:
        ValueError: If ``lam`` is negative or ``p`` is outside (0, 1).

    Example:
        >>> from fedlightning.callbacks import L2GD
        >>> round(L2GD(lam=1.0, p=0.1).theta(lr=0.05), 3)
        0.45
    """

    @property
    def facts(self) -> Facts:
        """Clients go on from their own models, for as many steps as a coin says: more than usual, once in 10^12 rounds."""
        most = 1 + math.ceil(12 * math.log(10) / -math.log1p(-self.p))
        return Facts(
            changes={Change.START, Change.WORK},
            needs=[MEAN_MODEL],
            requires=[
                requires.LocalSteps("draws how many steps a round has", "Set local_steps=1 (the number is not used)."),
                requires.PlainSGD(
                    "balances steps of plain SGD against steps towards the mean", "Use SGD without momentum."
                ),
            ],
            counts_steps=True,
            most_work=lambda usual: most,
            newcomers=Newcomers(join=True),
        )

    lam: Annotated[float, Range("[0, inf)", "0 is training alone.")] = 1.0
    p: Annotated[float, Range("(0, 1)", "Use Local() for p=0; p=1 trains nothing.")] = 0.1
    weighting: WeightingName | None = "uniform"

    def check(self, setup: Setup) -> None:
        """Refuse several optimizers and a step past the mean.

        Raises:
            ValueError: If there are several, or ``theta > 1``.
        """
        if len(setup.optimizers) > 1:
            raise ValueError(
                f"L2GD balances steps of one size against steps towards the mean, and the module has {len(setup.optimizers)} "
                "optimizers, each with steps of its own. Use one optimizer, with parameter groups."
            )
        theta = self.theta(max(map(largest_lr, setup.optimizers), default=0.0))
        if theta > 1.0:
            raise ValueError(
                f"L2GD(lam={self.lam}, p={self.p}) would step past the mean: theta = lr * lam * (1 - p) / p = "
                f"{theta:.3g}, and 1 is the mean itself. Lower lam or the learning rate, or raise p."
            )

    def theta(self, lr: float) -> float:
        """Return the size of the aggregation step that belongs to local steps of ``lr``."""
        return lr * self.lam * (1.0 - self.p) / self.p

    def wire(self, module: nn.Module) -> Wire:
        """Declare the number m of aggregation steps down."""
        return Wire(down={"m": "scalar"})

    # -- server: the coin ----------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Throw the coin: plan k local steps for every participant, and store the next message's m."""
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
        """Send m. Before the first round there is nothing to aggregate, so it is 0."""
        message.extras[self.key] = {"m": server.state.get(self.key, {}).get("m", 0)}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_receive(self, client: Client, message: Message) -> None:
        """Set ``x_i <- xbar + (1 - theta)^m (x_i - xbar)``. A new client starts at ``xbar``."""
        client_state = client.state.get(self.key)
        if client_state is None:
            return
        share = max(1.0 - self.theta(client_state["lr"]), 0.0) ** message.extras[self.key]["m"]
        x = {name: value for name, value in client_state["x"].items() if name in message.state}
        floats = {name: message.state[name] for name, value in x.items() if has_mean(value)}
        message.state = {**message.state, **x, **interpolate(x, floats, share)}

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``x_i`` and the learning rate it moved with."""
        if client.steps:
            moving = [name for name, kind in entry_kinds(client.module).items() if kind != "frozen"]
            x = select(client.model_state(), set(moving) & set(client.received))
            client.state[self.key] = {"x": x, "lr": client.lr_sum / client.steps}

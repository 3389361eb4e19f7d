"""FedNova."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.algorithm import (
    GLOBAL,
    Change,
    Client,
    Extra,
    Facts,
    FederatedCallback,
    Job,
    Message,
    Need,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.fedprox import FedProx
from fedlightning.tensors import narrow, widen


class FedNova(FederatedCallback):
    """Normalised averaging: clients that take more steps do not pull the mean their way.

    Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous federated
    optimization", NeurIPS 2020.

    A client's change is a weighted sum of the gradients it saw: ``w_i - w^t = -sum_k a_k g_k``, with
    ``A_i = sum_k a_k``.

    * Client: local training, which says ``d_i = (w^t - w_i) / A_i``.
    * Server, on trainable parameters: ``w^{t+1} = w^t - (sum_i p_i A_i) sum_i p_i d_i``. Buffers are averaged.
    * Down: ``w^t``, and FedProx's ``mu`` where FedProx is in the list. Up: ``w_i`` and ``A_i``.
    * State: each client's last ``A_i``. Where optimizers go on (``optimizer_state="keep"``), so does the count: the
      momentum ``c`` that a visit begins with is kept too.
    * Deployed: the global model ``w``.

    ``A_i`` is counted along with the steps that really happen (:func:`count_step`): ``c <- rho c + 1 - mu A``,
    ``A <- A + eta_k c``. ``rho`` is the momentum, with torch's dampening and Nesterov. ``mu`` is FedProx's: its pull is
    part of the gradient here, so it goes through the momentum. ``A_i`` contains the learning rate, so schedules are
    weighted rightly and a constant ``eta`` cancels. Weight decay counts as part of the gradient. With plain SGD
    ``A_i = eta tau_i``. Adam has no such ``a``: it is counted like plain SGD, with a warning.

    For server momentum (an option in the paper) add ``FedAvgM`` to the list. Any other server optimizer fits as well.

    Args:
        weighting: ``"samples"`` (the paper's ``p_i``, default) or ``"uniform"``.

    Example:
        One client moves by -1 in one step, another by +3 in three. FedAvg's mean moves by 1, FedNova's by 0.

        >>> from fedlightning.callbacks.fednova import count_step
        >>> a, c = 0.0, None
        >>> for _ in range(3):
        ...     a, c = count_step(a, c, {"lr": 1.0})
        >>> (-1 + 3) / 2, (1 + a) / 2 * (-1 / 1 + 3 / a) / 2
        (1.0, 0.0)
    """

    facts = Facts(
        needs=[
            Need("averages normalised changes, each the sum of a client's steps from w^t", ("reduce", Change.START))
        ],
        requires=[
            requires.AutomaticOptimization("counts the steps of one optimizer", "Use FedAvg."),
            requires.PlainSGD(
                "knows how SGD weights its gradients", "Any other is normalised by its number of steps.", "momentum"
            ),
        ],
        counts_steps=True,
    )

    def __init__(self, weighting: WeightingName | None = None) -> None:
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse groups of differing momentum: their changes are not one sum of gradients."""
        for optimizer in (candidate for candidate in setup.optimizers if type(candidate).__name__ == "SGD"):
            if len({group.get("momentum", 0.0) for group in optimizer.param_groups}) > 1:
                raise ValueError(
                    f"FedNova has one count for all, but {type(setup.template).__name__} has groups of differing momentum. "
                    "Give them one."
                )

    def wire(self, module: nn.Module) -> Wire:
        """Declare ``mu`` down and ``A_i`` up."""
        return Wire(down={"mu": "scalar"}, up={"a": Extra("scalar", low=0.0)})

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the strength of FedProx's proximal term.

        Raises:
            ValueError: If the server has several models.
        """
        if job.model != GLOBAL:
            raise ValueError("FedNova normalises the changes of one global model, but there are several. Use FedAvg.")
        prox = server.callbacks.find(FedProx)
        if prox is not None:
            message.extras[self.key] = {"mu": prox.mu}

    # -- client: count A_i -----------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting steps. Momentum starts anew with the optimizer, or goes on with it."""
        client = self.client
        if client.phase.federated:
            counter = client.scratch.setdefault(self.key, {"a": 0.0, "kept": {}})
            kept = client.state.get(self.key, {}).get("c", {}) if client.keeps_optimizers else {}
            counter["c"] = kept.get(client.phase.name)
            counter["hook"] = trainer.optimizers[0].register_step_post_hook(lambda opt, *_: self._stepped(client, opt))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting steps."""
        if self.client.phase.federated:
            counter = self.client.scratch[self.key]
            counter.pop("hook").remove()
            counter["kept"][self.client.phase.name] = counter["c"]

    def _stepped(self, client: Client, optimizer: Optimizer) -> None:
        """Count a step that really happened, if anything that travels took part in it."""
        travels = {id(parameter) for name, parameter in client.module.named_parameters() if name in client.received}
        for group in optimizer.param_groups:
            if any(id(parameter) in travels and parameter.grad is not None for parameter in group["params"]):
                counter = client.scratch[self.key]
                mu = float(client.message.extras.get(self.key, {}).get("mu", 0.0))
                counter["a"], counter["c"] = count_step(counter["a"], counter["c"], group, mu)
                return

    def on_send(self, client: Client, update: Update) -> None:
        """Send ``A_i``. It is kept too, since a plan may collect the update later."""
        if client.contributed:
            counter = client.scratch[self.key]
            client.state[self.key] = {"a": counter["a"]} | ({"c": counter["kept"]} if client.keeps_optimizers else {})
        if update.state and self.key in client.state:
            update.extras[self.key] = {"a": client.state[self.key]["a"]}

    # -- server ------------------------------------------------------------------------------------------------------
    def check_update(
        self, server: Server, message: Message, update: Update
    ) -> Mapping[str, tuple[float, float]] | None:
        """Measure the change divided by ``A_i``, which a tiny ``A_i`` makes large."""
        a = float(update.extras.get(self.key, {}).get("a", 0.0))
        pairs = [(value, server.model[name]) for name, value in update.state.items() if name in server.trainable]
        if a <= 0.0 or not pairs:
            return None
        norm = _norm(widen(value) - widen(base) for value, base in pairs) / a
        return {"change by a": (norm, _norm(base for _, base in pairs) or 1.0)}

    def on_update(self, server: Server, update: Update) -> None:
        """Add ``p_i d_i`` and ``p_i A_i`` to the sums of each name, over the clients that sent it."""
        a, weight = float(update.extras.get(self.key, {}).get("a", 0.0)), server.weight(update)
        if a <= 0.0 or weight == 0.0:
            return
        sums: dict[str, State | dict[str, float]] = server.state.setdefault(self.key, {"d": {}, "a": {}, "weight": {}})
        trainable = set(server.trainable)
        for name in update.state:
            if name in trainable:
                d = (widen(server.model[name]) - widen(update.state[name])) / a
                for label, term in (("d", d), ("a", a), ("weight", 1.0)):
                    sums[label][name] = sums[label].get(name, 0.0) + weight * term  # type: ignore[assignment]

    def on_reduced(self, server: Server, state: State) -> State:
        """Return ``w^t - (sum_i p_i A_i) sum_i p_i d_i`` on trainable parameters."""
        sums = server.state.pop(self.key, {"d": {}})
        normalised = {}
        for name, d in sums["d"].items():
            total, old = sums["weight"][name], server.model[name]
            normalised[name] = narrow(widen(old) - (sums["a"][name] / total) * (d / total), old)
        return {**state, **normalised}


def _norm(values: Iterable[Tensor]) -> float:
    return math.hypot(*(float(widen(value).norm()) for value in values))


def count_step(a: float, c: float | None, group: Mapping[str, Any], mu: float = 0.0) -> tuple[float, float]:
    """Return ``A`` and the momentum buffer after one more optimizer step.

    ``A`` is the distance that a client would have moved by now if all its raw gradients were 1.

    Example:
        >>> a, c = count_step(0.0, None, {"lr": 0.5, "momentum": 0.5})
        >>> count_step(a, c, {"lr": 0.5, "momentum": 0.5})
        (1.25, 1.5)
    """
    rho = float(group.get("momentum", 0.0))
    gradient = 1.0 - mu * a
    c = gradient if c is None else rho * c + (1.0 - float(group.get("dampening", 0.0))) * gradient
    step = gradient + rho * c if group.get("nesterov") else c
    return a + float(group["lr"]) * step, c

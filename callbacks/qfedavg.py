"""q-FedAvg."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from torch import nn

from fedlightning.algorithm import (
    WEIGHTINGS,
    Change,
    Client,
    Extra,
    Facts,
    FederatedCallback,
    Need,
    Newcomers,
    Server,
    Update,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.server_models import parameter_names
from fedlightning.ranges import PositiveFloat, Range, make_init
from fedlightning.tensors import widen

EPS = 1e-10
"""Added to every loss (authors' code): `F^(q-1)` of a loss of 0 is not finite for `q < 1`."""
LARGEST = 600.0
"""Largest logarithm of a weight: sums of such weights are still finite."""

LOSS_OF_WHAT_CAME = Need(
    "weighs each client's change once, by the loss of the model that it was sent",
    (Change.START, "reduce", "plan_round", Change.PARTS, Change.SMALLER, "encode"),
)


@make_init
class QFedAvg(FederatedCallback):
    r"""q-FedAvg for q-FFL: clients with a large loss count more, so that accuracy is more even over the clients.

    Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020.

    Minimises :math:`\sum_k F_k(w)^{q+1} / (q + 1)`. A larger `q` is fairer: 0 is FedAvg's objective, and for `q` to
    infinity the largest loss alone counts.

    * Client: `F_k`, the mean loss over its training data in eval mode at the model that it received, before it trains.
      Then local training as in FedAvg, to `w_k`.
    * Server: with `dw_k = L (w - w_k)` and `h_k = q F_k^(q-1) ||dw_k||^2 + L F_k^q`, the norm over all parameters that
      travel,

    .. math:: w \leftarrow w - \frac{\sum_k F_k^q \, dw_k}{\sum_k h_k}

    * Down: `w`. Up: `w_k` and the number `F_k`. State: none.
    * Deployed: the global model `w`.

    `L` is 1 over the learning rate: the mean over all steps of the round, so that schedules are followed. With momentum or
    Adam a change is not a sum of gradients times it; a warning says so. Steps get shorter with `q`: one client alone moves by
    `F / (F + q eta ||dw||^2)` of its change, and by less the more steps its visit has. On digits over ten clients
    (ten rounds of about 18 steps, three seeds) accuracy is 0.877 at `q = 0`, 0.872 at 0.01, 0.794 at 0.1 and 0.405 at 1;
    with `lipschitz = 1 / (lr * steps)` it is 0.872 at 0.1 and 0.853 at 1.

    Losses are compared relative to that of the round's first client, so that large `q` and small losses do not leave the
    range of floating point; a common factor does not change the rule. Some public code takes the running mean or the sum
    of the training losses for `F_k`, which are of other models.

    Args:
        q: Fairness. Default 0.01 (measured, see above); the paper tunes it in {0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15}.
        lipschitz: `L`. `None`: 1 over the learning rate that the clients really used (paper).
        shares: What clients count beside their losses: `"uniform"` (the authors' sum, for clients sampled uniformly), or
            `"samples"`: `F_k^q dw_k` and `h_k` are multiplied by their samples (the paper's `p_k`).

    Raises:
        ValueError: If `q` is negative or `lipschitz` is not positive.

    Example:
        A client whose loss is twice another's counts `2^q` times as much.

        >>> relative_power(1.0, 0.5, q=2.0), relative_power(1.0, 0.5, q=0.0)
        (4.0, 1.0)
    """

    q: Annotated[float, Range("[0, inf)", "0 is FedAvg.")] = 0.01
    lipschitz: PositiveFloat | None = None
    shares: Literal["uniform", "samples"] = "uniform"

    @property
    def facts(self) -> Facts:
        """Every change is weighed by one loss; what the server keeps is of one round."""
        sgd = requires.PlainSGD(
            "takes L = 1 / lr, which is that of plain SGD", "Set lipschitz, or use SGD without momentum."
        )
        loss = requires.AutomaticOptimization("weighs clients by the loss that training_step returns")
        return Facts(
            needs=[LOSS_OF_WHAT_CAME] if self.q else [],
            requires=[loss, *([sgd] if self.lipschitz is None else [])] if self.q else [],
            counts_steps=True,
            newcomers=Newcomers(join=True),
        )

    def claims(self, role: str) -> bool:
        """Decline the divisor where `q = 0`, which is FedAvg."""
        return super().claims(role) and not (role == "denominator" and self.q == 0.0)

    def wire(self, module: nn.Module) -> Wire:
        """Declare the loss, up."""
        return Wire(up={"loss": Extra("scalar", low=0.0, due=("",))}) if self.q else Wire()

    # -- client --------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Find `F_k(w)` before training."""
        if self.q:
            client.scratch[self.key] = client.loss()

    def on_send(self, client: Client, update: Update) -> None:
        """Send `F_k(w)`."""
        if client.contributed and self.q:
            update.extras[self.key] = {"loss": client.scratch[self.key]}

    # -- server --------------------------------------------------------------------------------------------------------
    def on_round_start(self, server: Server) -> None:
        """Begin the sums of a round."""
        if self.q:
            server.state[self.key] = {"sums": {}}

    def on_update(self, server: Server, update: Update) -> None:
        """Add `F_k^q` and `F_k^(q-1) ||w - w_k||^2` to the sums of the model, both relative to `reference^q`."""
        if not (self.q and update.contributed):
            return
        loss, old = self._loss(update), server.models[update.model]
        sums = server.state[self.key]["sums"]
        model_sums = sums.get(update.model) or {"reference": loss, "weights": 0.0, "bends": 0.0, "lr": 0.0, "steps": 0}
        weight = self._weight(update, model_sums["reference"])
        names = parameter_names(server, update.state)
        change = sum(float((widen(old[name]) - widen(update.state[name])).square().sum()) for name in names)
        added = {
            "reference": model_sums["reference"],
            "weights": model_sums["weights"] + weight,
            "bends": model_sums["bends"] + weight * change / loss,
            "lr": model_sums["lr"] + update.lr_sum,
            "steps": model_sums["steps"] + update.steps,
        }
        server.state[self.key] = {"sums": {**sums, update.model: added}}

    def weighting(self, server: Server, update: Update) -> float:
        """Return `F_k^q` relative to `reference^q`, times the client's samples if these count."""
        if not self.q:
            return self._weight(update, 0.0)
        model_sums = server.state[self.key]["sums"].get(update.model)
        # the first update of a model is the reference, also for a callback before this one that asks for its weight
        return self._weight(update, self._loss(update) if model_sums is None else model_sums["reference"])

    def denominator(self, server: Server) -> float:
        """Return `sum_k h_k / L`: the core divides `sum_k F_k^q (w_k - w)` by it."""
        model_sums = server.state[self.key]["sums"][server.combining]
        rate = 1.0 / self.lipschitz if self.lipschitz else model_sums["lr"] / model_sums["steps"]
        return float(model_sums["weights"] + (self.q / rate * model_sums["bends"] if rate else 0.0))

    def _weight(self, update: Update, reference: float) -> float:
        power = relative_power(self._loss(update), reference, self.q) if self.q else 1.0
        return power * WEIGHTINGS[self.shares](update.num_samples)

    def _loss(self, update: Update) -> float:
        """Return `F_k`, above 0."""
        return max(float(update.extras[self.key]["loss"]), 0.0) + EPS  # the check on arrival has some slack


def relative_power(loss: float, reference: float, q: float) -> float:
    """Return `(loss / reference)^q`.

    Raises:
        ValueError: If it is too large for a weight.
    """
    exponent = q * math.log(loss / reference)
    if exponent > LARGEST:
        raise ValueError(
            f"QFedAvg(q={q}) weighs clients by their losses to the power q, and those of this round ({loss:.3g} and "
            f"{reference:.3g}) are too far apart for that. Use a smaller q."
        )
    return (loss / reference) ** q

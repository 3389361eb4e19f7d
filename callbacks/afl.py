"""AFL."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    Change,
    Client,
    Extra,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Server,
    ServerModels,
    State,
    Update,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.server_models import reported_module, send_reported
from fedlightning.ranges import Range, make_init
from fedlightning.tensors import has_mean, narrow, widen

ONE_MODEL = Need(
    "gives each client a share of one model's step, by its loss at the model that all are sent",
    (Change.START, "reduce", "model_of", "global_module", "plan_round"),
)


@make_init
class AFL(ServerModels):
    r"""Agnostic federated learning: the model that is best for the worst mixture of the clients.

    Mohri, Sivek, Suresh, "Agnostic federated learning", ICML 2019.

    Solves :math:`\min_w \max_\lambda \sum_k \lambda_k F_k(w)` over all `lambda` that are not negative and sum to 1:

    * Client: `F_k`, the mean loss over its training data in eval mode at the model that it received. Then local training, to
      `w_k` (paper: one stochastic gradient).
    * Server: `w <- w + sum_k lambda_k (w_k - w)` with the `lambda` of before. Then `lambda` is the point of the simplex
      nearest to `lambda + gamma F(w)`.
    * Deployed: the running mean of the server's models, which is what converges; training goes on from the last one.

    Where a part of the clients takes part (Deng, Kamani, Mahdavi, "Distributionally robust federated averaging", NeurIPS
    2020, has the idea), their shares are divided by their sum, and `lambda` moves at the m participants by
    `gamma (N/m) F_k`. If all of them have the share 0, the model stays as it is, and counts once in the mean.

    * Down: `w`; to a client that is evaluated, the mean. Up: `w_k` and the number `F_k`.
    * State: `lambda` and the mean at the server.

    Losses on different scales are compared as they are: a client whose labels are noisy can take all weight. With many
    clients most shares become 0. On digits over ten clients (ten rounds, three seeds) the last model has an accuracy of
    0.906, its worst client 0.859, and with `gamma=0.01` 0.885 and 0.781; the mean of the models of so few rounds has 0.839.

    Args:
        gamma: Step of `lambda`. Default 0.1 (measured, see above); the paper tunes it, easyFL has 0.01. 0: fixed shares.
        start: First `lambda`: `"uniform"` (default), or the share of the `"samples"`.
        report: `"mean"`: what is scored, exported and sent for evaluation is the mean of the models of all rounds (paper).
            `"last"`: the last model.

    Raises:
        ValueError: If `gamma` is negative, or a word is unknown.

    Example:
        >>> import torch
        >>> nearest_shares(torch.tensor([0.5, 0.3, 0.2]) + 0.1 * torch.tensor([1.0, 2.0, 4.0]))
        tensor([0.3667, 0.2667, 0.3667])
    """

    facts = Facts(
        needs=[ONE_MODEL],
        requires=[
            requires.AutomaticOptimization("weighs clients by the loss that training_step returns", when="gamma")
        ],
        newcomers=Newcomers(join=True),
    )

    gamma: Annotated[float, Range("[0, inf)", "0 keeps the first shares.")] = 0.1
    start: Literal["uniform", "samples"] = "uniform"
    report: Literal["mean", "last"] = "mean"

    def claims(self, role: str) -> bool:
        """Decline what is about the mean of the models where the last one is reported."""
        of_mean = role in ("server_step", "global_module", "on_broadcast")
        return super().claims(role) and not (of_mean and self.report == "last")

    def wire(self, module: nn.Module) -> Wire:
        """Declare the loss, up."""
        return Wire(up={"loss": Extra("scalar", due=("",))}) if self.gamma else Wire()

    # -- client --------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Find `F_k(w)` before training."""
        if self.gamma:
            client.scratch[self.key] = client.loss()

    def on_send(self, client: Client, update: Update) -> None:
        """Send `F_k(w)`."""
        if client.contributed and self.gamma:
            update.extras[self.key] = {"loss": client.scratch[self.key]}

    # -- server --------------------------------------------------------------------------------------------------------
    def shares(self, server: Server) -> dict[str, float]:
        """Return `lambda` by client; 0 for one that has come later."""
        server_state = server.state.get(self.key, {})
        if "lambda" in server_state:
            return {client: server_state["lambda"].get(client, 0.0) for client in server.clients}
        sizes = {client: server.num_samples[client] for client in server.clients}
        weights = sizes if self.start == "samples" else {client: float(size > 0) for client, size in sizes.items()}
        return {client: weight / sum(weights.values()) for client, weight in weights.items()}

    def weighting(self, server: Server, update: Update) -> float:
        """Return `lambda_k`."""
        return self.shares(server)[update.client]

    def on_update(self, server: Server, update: Update) -> None:
        """Collect `F_k(w)`."""
        if extras := update.extras.get(self.key):
            server_state = server.state.get(self.key, {})
            losses = {**server_state.get("losses", {}), update.client: float(extras["loss"])}
            server.state[self.key] = {**server_state, "losses": losses}

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Take the new model into the mean, in float64."""
        server_state = server.state.get(self.key, {})
        count, mean = server_state.get("count", 0) + 1, server_state.get("mean", {})
        new = {
            name: mean[name] + (widen(value) - mean[name]) / count if name in mean else widen(value)
            for name, value in reduced.items()
            if has_mean(value)
        }
        server.state[self.key] = {**server_state, "count": count, "mean": new}
        return reduced

    def on_round_end(self, server: Server) -> None:
        """Move `lambda` by the losses of those that took part."""
        server_state = server.state.get(self.key, {})
        losses = server_state.get("losses", {})
        if not losses:
            return
        shares = self.shares(server)
        factor = sum(size > 0 for size in server.num_samples.values()) / len(losses)
        moved = [shares[client] + self.gamma * factor * losses.get(client, 0.0) for client in server.clients]
        nearest = nearest_shares(torch.tensor(moved, dtype=torch.float64)).tolist()
        kept = {name: value for name, value in server_state.items() if name != "losses"}
        server.state[self.key] = {**kept, "lambda": dict(zip(server.clients, nearest, strict=True))}

    # -- what is deployed ----------------------------------------------------------------------------------------------
    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send a client that is evaluated the mean."""
        send_reported(job, message, self._mean(server))

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the mean of the models of all rounds."""
        return reported_module(server, self._mean(server))

    def _mean(self, server: Server) -> State:
        """Return the mean of the models of all rounds, in their own precision; nothing before the first."""
        mean: State = server.state.get(self.key, {}).get("mean", {})
        return {name: narrow(value, server.model[name]) for name, value in mean.items()}


def nearest_shares(values: Tensor) -> Tensor:
    """Return the point nearest to `values`, `(n,)`, of all that are not negative and sum to 1.

    With the values sorted downwards as `u`, it is `max(values - t, 0)`, where `t = (u_1 + ... + u_r - 1) / r` for the
    largest `r` with `u_r > t` (Duchi, Shalev-Shwartz, Singer, Chandra, ICML 2008).
    """
    values = values - values.max()  # large values would leave no digits for the shares
    u = values.sort(descending=True).values
    t = (u.cumsum(0) - 1.0) / torch.arange(1, len(u) + 1, dtype=u.dtype)
    r = int((u > t).sum())
    return (values - t[r - 1]).clamp_min(0.0)

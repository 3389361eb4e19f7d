"""IFCA and HypCluster."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import (
    GLOBAL,
    Client,
    Extra,
    Facts,
    Job,
    Message,
    Newcomers,
    Plan,
    Server,
    State,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.memberships import Clusters, cluster_module, in_client_order
from fedlightning.callbacks.shared.server_models import NO_SERVER_STEP, DifferentStarts, another_start
from fedlightning.ranges import Counts, NonNegativeFloat, PositiveFloat, Range, make_init, needs
from fedlightning.tensors import add, first_nonfinite, select, ties

GRADIENT = "gradient at the chosen centre"


@needs("server_lr", "option", value=1, why="model averaging has no step of the server. Leave it out, or set option=1.")
@make_init
class IFCA(Clusters):
    """Iterative federated clustering: several models, of which each client trains the one that fits its data best.

    Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020.

    Client: ``j* = argmin_j F_i(theta_j)``, the mean *training* loss over all its data in eval mode, chosen anew in
    every round. A tie goes to the lowest j. Then

    * option 2 (model averaging): local training from ``theta_{j*}`` gives ``w_i``. Each centre becomes the mean of its
      clients' models, and stays as it is if nobody chose it;
    * option 1 (gradient averaging): nothing is trained. The client sends the gradient ``g_i`` of ``F_i`` at
      ``theta_{j*}``, and ``theta_j <- theta_j - gamma (1/m) sum_i s_ij g_i`` with m the participants of the round, not
      of the cluster. A round is one step of gradient descent, so it takes hundreds of rounds.

    What travels and what is kept:

    * Down: all K centres ``theta_j``. Up: ``w_i`` (or ``g_i``) and ``j*``.
    * State at the server: the K centres, centre 0 as its ``"global"`` model, and which centre each client chose last
      (for stage G).
    * Deployed: the centre that fits the client's data best.

    With one cluster this is FedAvg. Equal centres never separate, since every tie goes to the first. So centre 0 starts
    as the module is, and the others are initialised anew from seeds of their own, or moved away from it.

    Args:
        num_clusters: K. Default 2 (authors: 4 on rotated MNIST, 2 on rotated CIFAR, 2-3 on FEMNIST).
        option: 2 (default) or 1.
        server_lr: ``gamma`` of option 1. Default 0.1 (authors, on MNIST).
        init: ``"random"`` (default): ``reset_parameters()`` of every submodule under another seed. A number: the
            standard deviation of noise added to the module's own parameters (for pre-trained modules). Frozen
            parameters stay.
        deploy_split: Data on which the deployed centre is chosen: ``"train"`` (default) or ``"val"``, never test.
        weighting: ``"uniform"`` (paper, MNIST and CIFAR code, default) or ``"samples"`` (FEMNIST code), within a
            cluster; with option 1, over the participants.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import IFCA
        >>> losses = {"theta_0": 0.9, "theta_1": 0.2, "theta_2": 0.4}
        >>> client = SimpleNamespace(evaluating=False, loader=lambda split: [...], loss=lambda state, _: losses[state])
        >>> IFCA(num_clusters=3).choose(client, list(losses))
        1
    """

    rank = -1  # the centre is chosen before others work on it

    num_clusters: Annotated[int, Range("[1, inf)", "1 is FedAvg."), Counts("clients")] = 2
    option: Literal[1, 2] = 2
    server_lr: PositiveFloat = 0.1
    init: NonNegativeFloat | Literal["random"] = "random"
    deploy_split: Literal["train", "val"] = "train"
    weighting: WeightingName | None = "uniform"

    @property
    def facts(self) -> Facts:
        """Several centres have models of their own; a client that joins tries them all."""
        loss = requires.AutomaticOptimization("compares models by the loss that training_step returns")
        return Facts(
            needs=[NO_SERVER_STEP] if self.num_clusters > 1 else [],
            requires=[loss, DifferentStarts()] if self.num_clusters > 1 or self.option == 1 else [],
            newcomers=Newcomers(join=True),
        )

    def claims(self, role: str) -> bool:
        """Decline the plan of the round under option 2, and the global model where there is one cluster."""
        declined = {"plan_round": self.option == 2, "global_module": self.num_clusters == 1}
        return super().claims(role) and not declined.get(role, False)

    def wire(self, module: nn.Module) -> Wire:
        """Declare the other centres down; the choice and, for option 1, a gradient up."""
        return Wire(
            down={"centres": "states"},
            up={
                "cluster": Extra("scalar", low=0, high=self.num_clusters - 1, whole=True, due=("", GRADIENT)),
                "gradient": "parameters",
            },
        )

    # -- server --------------------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Initialise centres 1 to K-1 from seeds of their own."""
        seed = server.seed_of("initialisation")
        for j in range(1, self.num_clusters):
            start = another_start(server.module, self.init, seed, self.key, j)
            server.models.setdefault(centre(j), start)

    def plan_round(self, server: Server) -> Plan:
        """Collect gradients at the chosen centres, then move each centre by one step (option 1)."""
        updates = yield [Job(client, work=0, tag=GRADIENT) for client in server.participants()]
        sent = [update for update in updates if update.error is None and "gradient" in update.extras.get(self.key, {})]
        weights = [server.callbacks.weight(server, update) for update in sent]
        for update, weight in zip(sent, weights, strict=True):
            key, gradient = centre(update.extras[self.key]["cluster"]), update.extras[self.key]["gradient"]
            tied = server.architecture(key).tied  # a gradient has one of the names, the model has all
            gradient = {alias: value for name, value in gradient.items() for alias in tied.get(name, {name})}
            server.models[key] = add(server.models[key], gradient, alpha=-self.server_lr * weight / sum(weights))

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send all K centres. The first is the message's own state."""
        others = {centre(j): server.models[centre(j)] for j in range(1, self.num_clusters)}
        message.extras[self.key] = {"centres": {key: select(state, message.state) for key, state in others.items()}}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_receive(self, client: Client, message: Message) -> None:
        """Choose ``j* = argmin_j F_i(theta_j)``. From here on it is as if only this centre had been sent."""
        centres = [message.state, *message.extras[self.key]["centres"].values()]
        chosen = self.choose(client, centres)
        message.state = dict(centres[chosen])
        client.received = dict(centres[chosen])  # terms that refer to what was sent mean this centre
        client.scratch[self.key] = chosen

    def choose(self, client: Client, centres: list[State]) -> int:
        """Return the index of the centre of least loss; 0 where no loss is a number.

        Args:
            client: The client, which gives losses and data.
            centres: The K centres.
        """
        if len(centres) == 1:
            return 0
        split = self.deploy_split if client.evaluating else "train"
        loader = client.loader(split)
        split = split if loader is not None and len(loader) > 0 else "train"
        losses = torch.tensor([client.loss(state, split) for state in centres], dtype=torch.float64)
        return int(ties.first_least(torch.where(losses.isfinite(), losses, torch.inf)))

    def on_send(self, client: Client, update: Update) -> None:
        """Send ``w_i``, or ``g_i`` under option 1, for the chosen centre.

        Raises:
            FloatingPointError: If the gradient is not finite. The core then drops the update.
        """
        chosen = client.scratch[self.key]
        if client.message.tag == GRADIENT:
            update.extras[self.key] = {"cluster": chosen}
            if client.num_samples > 0:  # else it has no gradient, and none is averaged
                gradient = client.gradient(split="train")
                bad = first_nonfinite(gradient)
                if bad is not None:
                    raise FloatingPointError(f"the gradient of '{bad}' holds NaN or infinite values")
                update.extras[self.key]["gradient"] = select(gradient, client.received)
        elif update.state:
            update.model = centre(chosen)
            update.extras[self.key] = {"cluster": chosen}

    # -- server, after the visits --------------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Note which centre the client chose."""
        extras = update.extras.get(self.key)
        if extras:
            chosen = server.state.get(self.key, {}).get("clusters", {}) | {update.client: extras["cluster"]}
            server.state[self.key] = {"clusters": in_client_order(server, chosen)}

    def memberships(self, server: Server) -> dict[str, dict[str, float]]:
        """Return which centre each client chose last; nothing where there is one for all."""
        centre_by_client = server.state.get(self.key, {}).get("clusters", {}) if self.num_clusters > 1 else {}
        return {client: {centre(chosen): 1.0} for client, chosen in centre_by_client.items()}

    def models_in_use(self, server: Server) -> list[str]:
        """Return the keys of all centres; the first one is the global model."""
        return [centre(j) for j in range(self.num_clusters)]

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the centre that ``client`` chose last; ``None`` for all, and for a client that never took part."""
        chosen = server.state.get(self.key, {}).get("clusters", {}).get(client)
        return cluster_module(server, None if chosen is None else centre(chosen))


class HypCluster(IFCA):
    """IFCA with models averaged by samples and the deployed hypothesis chosen on validation data.

    Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with applications to federated learning", 2020.

    A client trains the hypothesis ``h_k`` of least training loss; the server takes ``n_i``-weighted means. What
    travels, what is kept and what is deployed are as in :class:`IFCA` with option 2.

    Args:
        num_clusters: q, the number of hypotheses. Default 2.
        init: Start of the other hypotheses: ``"random"`` (default), or the standard deviation of noise, as in IFCA.
        deploy_split: Data on which the deployed hypothesis is chosen: ``"val"`` (default) or ``"train"``.
        weighting: ``"samples"`` (the objective weights clients by their share of the samples, default) or
            ``"uniform"``.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> from fedlightning.callbacks import HypCluster
        >>> HypCluster(num_clusters=3).hyperparameters()
        {'num_clusters': 3, 'init': 'random', 'deploy_split': 'val', 'weighting': 'samples'}
    """

    def __init__(
        self,
        num_clusters: int = 2,
        init: float | Literal["random"] = "random",
        deploy_split: Literal["train", "val"] = "val",
        weighting: WeightingName | None = "samples",
    ) -> None:
        super().__init__(num_clusters, 2, init=init, deploy_split=deploy_split, weighting=weighting)


def centre(j: int) -> str:
    """Return the server's name of centre j: ``"global"`` for 0.

    Example:
        >>> centre(0), centre(1)
        ('global', 'centre 1')
    """
    return GLOBAL if j == 0 else f"centre {j}"

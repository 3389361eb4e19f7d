"""IFCA and HypCluster."""

from __future__ import annotations

import math
from typing import Literal

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import (
    GLOBAL,
    WEIGHTINGS,
    Client,
    FederatedCallback,
    Job,
    Message,
    Plan,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    Wire,
    add,
    equal,
    first_nonfinite,
    module_state,
    select,
)
from fedlightning.callbacks.shared.server_models import another_start, refuse_global_steps

GRADIENT = "gradient at the chosen centre"


class IFCA(FederatedCallback):
    r"""Iterative federated clustering: several models; each client trains the one that fits its data best.

    Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020.

    Down: all K centres ``theta_j``. Client: ``j* = argmin_j F_i(theta_j)``, the mean *training* loss over all its data
    in eval mode (a tie: the lowest j), chosen anew in every round. Then

    * option 2 (model averaging): local training from ``theta_{j*}``; up ``w_i`` and ``j*``; each centre becomes the
      mean of its clients' models, and stays as it is if nobody chose it;
    * option 1 (gradient averaging): up the gradient ``g_i`` of ``F_i`` at ``theta_{j*}``, nothing is trained;
      ``theta_j <- theta_j - gamma (1/m) sum_i s_ij g_i`` with m the participants of the round, not of the cluster.
      A round is one step of gradient descent, so it takes hundreds of rounds.

    State: the K centres, centre 0 as the server's ``"global"`` model, and who chose what last (for stage G). A client
    deploys the centre that fits its data best; with one cluster this is FedAvg. Traffic down is K models.

    Centres that are equal never separate, since every tie goes to the first. So centre 0 starts as the module is, and
    the others are initialised anew from seeds of their own, or moved away from it.

    Args:
        num_clusters: K (authors: 4 on rotated MNIST, 2 on rotated CIFAR, 2-3 on FEMNIST).
        option: 2, or 1.
        server_lr: ``gamma`` of option 1 (authors: 0.1 on MNIST).
        init: ``"random"``: ``reset_parameters()`` of every submodule under another seed; or the standard deviation of
            noise added to the module's own parameters (for pre-trained modules). Frozen parameters stay.
        deploy_split: data on which the deployed centre is chosen: ``"train"`` or ``"val"``, never test.
        weighting: ``"uniform"`` (paper, MNIST and CIFAR code) or ``"samples"`` (FEMNIST code), within a cluster; with
            option 1, over the participants.
    """

    def __init__(
        self,
        num_clusters: int = 2,
        option: Literal[1, 2] = 2,
        server_lr: float = 0.1,
        init: float | Literal["random"] = "random",
        deploy_split: Literal["train", "val"] = "train",
        weighting: WeightingName = "uniform",
    ) -> None:
        if num_clusters < 1:
            raise ValueError(f"{self.key} got num_clusters={num_clusters}. Use 1 (FedAvg) or more centres.")
        if option not in (1, 2):
            raise ValueError(f"{self.key} got option={option!r}. Option 1 averages gradients, option 2 models.")
        if server_lr <= 0:
            raise ValueError(f"{self.key} got server_lr={server_lr}; the step of option 1 must be positive.")
        if init != "random" and not (isinstance(init, int | float) and 0 <= init < math.inf):
            raise ValueError(f"{self.key} got init={init!r}. Use 'random', or the standard deviation of noise.")
        if deploy_split not in ("train", "val"):
            raise ValueError(f"{self.key} got deploy_split={deploy_split!r}. Use 'train' or 'val', never test.")
        self.num_clusters = num_clusters
        self.option = option
        self.server_lr = server_lr
        self.init = init
        self.deploy_split = deploy_split
        self.weighting = weighting

    def claims(self, role: str) -> bool:
        """Only option 1 has a plan of its own; one cluster has a global model."""
        declined = {"plan_round": self.option == 2, "global_module": self.num_clusters == 1}
        return super().claims(role) and not declined.get(role, False)

    def check(self, setup: Setup) -> None:
        """Refuse server steps over several centres, and centres that cannot separate."""
        if self.num_clusters == 1:
            return
        refuse_global_steps(self, setup)
        if self.init == 0:
            setup.warn(
                f"{self.key}(init=0) starts all centres from one model: they never separate, all clients choose 0."
            )
        elif equal(module_state(setup.module), another_start(setup.module, self.init, 0, self.key)):
            raise ValueError(
                f"{self.key} cannot initialise {type(setup.template).__name__} anew: no submodule has "
                f"reset_parameters(). Use {self.key}(init=0.1): noise on its parameters."
            )

    def wire(self, module: nn.Module) -> Wire:
        """The other centres down; the choice (and a gradient) up."""
        return Wire(down={"centres": "states"}, up={"cluster": "scalar", "gradient": "parameters"})

    # -- server --------------------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Centres 1..K-1 from seeds of their own."""
        seed = server.blueprint.settings.seed
        for j in range(1, self.num_clusters):
            start = another_start(server.module, self.init, seed, self.key, j)
            server.models.setdefault(centre(j), start)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """All K centres: the first in the message's own place."""
        others = {centre(j): server.models[centre(j)] for j in range(1, self.num_clusters)}
        message.extras[self.key] = {"centres": {key: select(state, message.state) for key, state in others.items()}}

    def on_update(self, server: Server, update: Update) -> None:
        """Note the choice."""
        extras = update.extras.get(self.key)
        if extras:
            chosen = server.state.get(self.key, {}).get("clusters", {}) | {update.client: extras["cluster"]}
            server.state[self.key] = {"clusters": {c: chosen[c] for c in server.clients if c in chosen}}

    def plan_round(self, server: Server) -> Plan:
        """Option 1: gradients at the chosen centres, one step of each centre."""
        updates = yield [Job(client, work=0, tag=GRADIENT) for client in server.participants()]
        sent = [update for update in updates if update.error is None and "gradient" in update.extras.get(self.key, {})]
        weights = [WEIGHTINGS[str(self.weighting)](update.num_samples) for update in sent]
        for update, weight in zip(sent, weights, strict=True):
            key, gradient = centre(update.extras[self.key]["cluster"]), update.extras[self.key]["gradient"]
            server.models[key] = add(server.models[key], gradient, alpha=-self.server_lr * weight / sum(weights))

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """The centre that ``client`` chose last; none for all, nor for who never took part."""
        chosen = server.state.get(self.key, {}).get("clusters", {}).get(client)
        complete = len(server.shared_names()) == len(server.kinds)
        return server.module_with(server.models[centre(chosen)]) if chosen is not None and complete else None

    # -- client --------------------------------------------------------------------------------------------------------
    def on_receive(self, client: Client, message: Message) -> None:
        """``j* = argmin_j F_i(theta_j)``; from here on it is as if only this centre had been sent."""
        centres = [message.state, *message.extras[self.key]["centres"].values()]
        chosen = self.choose(client, centres)
        message.state = dict(centres[chosen])
        client.received = dict(centres[chosen])  # terms that refer to what was sent mean this centre
        client.scratch[self.key] = chosen

    def choose(self, client: Client, centres: list[State]) -> int:
        """The centre of least loss; 0 where no loss is a number."""
        if len(centres) == 1:
            return 0
        split = self.deploy_split if client.evaluating else "train"
        loader = client.loader(split)
        split = split if loader is not None and len(loader) > 0 else "train"
        losses = [client.loss(state, split) for state in centres]
        return min(range(len(losses)), key=lambda j: losses[j] if math.isfinite(losses[j]) else math.inf)

    def on_send(self, client: Client, update: Update) -> None:
        """``w_i`` (or ``g_i``) for the centre that was chosen."""
        chosen = client.scratch[self.key]
        if client.message.tag == GRADIENT and client.num_samples > 0:
            gradient = client.gradient(split="train")
            bad = first_nonfinite(gradient)
            if bad is not None:
                raise FloatingPointError(f"the gradient of '{bad}' holds NaN or infinite values")
            update.extras[self.key] = {"cluster": chosen, "gradient": select(gradient, client.received)}
        elif update.state:
            update.model = centre(chosen)
            update.extras[self.key] = {"cluster": chosen}


class HypCluster(IFCA):
    """IFCA with models averaged by samples; the deployed hypothesis is chosen on validation data. See :class:`IFCA`.

    Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with applications to federated learning", 2020: a
    client trains the hypothesis ``h_k`` of least training loss; the server takes ``n_i``-weighted means.

    Args:
        num_clusters: q.
        init: as in IFCA.
        deploy_split: ``"val"`` or ``"train"``.
        weighting: ``"samples"`` (the objective weights clients by their share of the samples) or ``"uniform"``.
    """

    def __init__(
        self,
        num_clusters: int = 2,
        init: float | Literal["random"] = "random",
        deploy_split: Literal["train", "val"] = "val",
        weighting: WeightingName = "samples",
    ) -> None:
        super().__init__(num_clusters, 2, init=init, deploy_split=deploy_split, weighting=weighting)


def centre(j: int) -> str:
    """The server's key of centre j."""
    return GLOBAL if j == 0 else f"centre {j}"

"""FedSoft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    NEWCOMER,
    Change,
    Client,
    Extra,
    Facts,
    GradientContext,
    Job,
    Message,
    Plan,
    Server,
    State,
    Update,
    Wire,
    contributors,
    facts,
    requires,
)
from fedlightning.callbacks.shared.memberships import Clusters, best_fitted, cluster_module, in_client_order
from fedlightning.callbacks.shared.server_models import (
    NO_SERVER_STEP,
    DifferentStarts,
    NoAnchors,
    NoWeightings,
    another_start,
    parameter_names,
)
from fedlightning.ranges import ClientCount, NonNegativeFloat, PositiveInt, Share, make_init
from fedlightning.tensors import WeightedMean, narrow, select, ties, widen

ESTIMATE = "estimate"


@make_init
class FedSoft(Clusters):
    r"""Soft clusters: each client's data are a mixture, and its own model is pulled to all centres by their shares.

    Ruan, Joe-Wong, "FedSoft: soft clustered federated learning with proximal local updating", AAAI 2022.

    * Every `interval` rounds, and when they first take part, the clients count for how many of their samples each centre
      has the least loss: `n_is`, and `u_is = n_is / n_i` (`sigma` where there are none).
    * For each centre s, `selected` clients are drawn without replacement, with probabilities in proportion to
      `u_is n_i`. A client that is drawn for several centres trains once.
    * Client: goes on from its own `w_i` and minimises `F_i(w) + lam/2 sum_s u_is ||w - c_s||^2`.
    * Server: `c_s` is the plain mean of the selected clients' `w_i`, since the draw has weighted them.

    Down: all S centres for an estimate; else one tensor a parameter, `sum_s u_is c_s`, and `sum_s u_is`, which is all that
    the gradient of the pull needs. Up: counts, or `w_i`. State of a client: `w_i`. State at the server: S centres, `u`.
    Deployed: `w_i`, and the common start before a client was ever drawn.

    Args:
        num_clusters: S. Default 2 (paper).
        lam: Pull to the centres. Default 0.1 (authors' code on letters and MNIST; 0.01 on CIFAR-10).
        selected: Clients drawn for each centre. `None`: no draw; all participants train, and `c_s` is their mean by
            `u_is n_i`.
        interval: `tau`, rounds between estimates. Default 2 (authors).
        sigma: Share of a centre for which no sample is nearest. Default 1e-4 (authors).
        init: Start of the centres: `"random"` (default), or the standard deviation of noise on the module's parameters.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> losses = torch.tensor([[0.1, 0.9, 0.3], [0.4, 0.2, 0.3]])  # of two centres, for three samples
        >>> shares(losses, sigma=1e-4)
        tensor([0.6667, 0.3333], dtype=torch.float64)
        >>> shares(losses[:1].repeat(2, 1), sigma=1e-4)
        tensor([1.0000e+00, 1.0000e-04], dtype=torch.float64)
    """

    facts = Facts(
        changes={Change.START, Change.ONE_WAY},
        needs=[NO_SERVER_STEP, facts.WHOLE_UPDATES],
        requires=[
            requires.AutomaticOptimization("compares centres by the loss that training_step returns"),
            DifferentStarts(),
            NoWeightings(),
            NoAnchors(of=("correct_gradient", "training_loss")),
        ],
    )

    num_clusters: ClientCount = 2
    lam: NonNegativeFloat = 0.1
    selected: ClientCount | None = None
    interval: PositiveInt = 2
    sigma: Share = 1e-4
    init: NonNegativeFloat | Literal["random"] = "random"

    @property
    def centres(self) -> list[str]:
        """Keys of the centres at the server."""
        return [f"centre {s}" for s in range(1, self.num_clusters + 1)]

    def wire(self, module: nn.Module) -> Wire:
        """Declare all centres, or the point that they pull to, down; counts of samples up."""
        shares = Extra((self.num_clusters,), low=0.0, high=1.0, due=(ESTIMATE,))
        return Wire(down={"centres": "states", "target": "parameters", "total": "scalar"}, up={"shares": shares})

    # -- server --------------------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Initialise the centres from seeds of their own."""
        for number, centre in enumerate(self.centres, start=1):
            seed = server.seed_of("initialisation")
            server.models[centre] = another_start(server.module, self.init, seed, self.key, number)
        server.state[self.key] = {"shares": {}, "trained": []}

    def plan_round(self, server: Server) -> Plan:
        """Estimate where it is time, draw, train, and average."""
        available = server.participants()
        server_state = server.state[self.key]
        due = server.round % self.interval == 0
        asked = [client for client in available if due or client not in server_state["shares"]]
        if asked:
            client_shares = dict(server_state["shares"])
            for update in (yield [Job(client, work=0, returns=(), tag=ESTIMATE) for client in asked]):
                if update.error is None:
                    client_shares[update.client] = update.extras[self.key]["shares"]
            server.state[self.key] = {**server_state, "shares": in_client_order(server, client_shares)}
        drawn = self.draw(server, available)
        chosen = [client for client in available if any(client in members for members in drawn.values())]
        answers = {}
        for update in (yield [Job(client, keep=True) for client in chosen]) if chosen else ():
            if contributors([update]):
                answers[update.client] = update
        for centre, weights in drawn.items():
            mean = WeightedMean()
            for client, weight in weights.items():
                if client in answers:
                    mean.add(answers[client].state, weight)
            server.models[centre] = {**server.models[centre], **mean.result()}
        trained = {*server_state["trained"], *answers}
        ordered = [client for client in server.clients if client in trained]
        server.state[self.key] = {**server.state[self.key], "trained": ordered}

    def draw(self, server: Server, available: list[str]) -> dict[str, dict[str, float]]:
        """Return for each centre the clients that train for it, and their weights in its mean.

        Args:
            server: The server, which knows the shares.
            available: Clients that may be drawn.
        """
        client_shares = server.state[self.key]["shares"]
        drawn: dict[str, dict[str, float]] = {}
        for s, centre in enumerate(self.centres):
            weights = {c: float(client_shares[c][s]) * server.num_samples[c] for c in available if c in client_shares}
            weights = {client: weight for client, weight in weights.items() if weight > 0}
            if self.selected is not None and weights:
                chances = torch.tensor(list(weights.values()), dtype=torch.float64)
                count, draw = min(self.selected, len(weights)), server.rng(f"selection of {centre}", "participation")
                places = torch.multinomial(chances, count, generator=draw).tolist()
                weights = {list(weights)[place]: 1.0 for place in sorted(places)}
            drawn[centre] = weights
        return drawn

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Average nothing into a global model: it stays the common start."""
        return {}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send all centres for an estimate, else the point they pull to; the common start to those who need it.

        A client that takes no part in training gets the centres too.
        """
        server_state = server.state.get(self.key, {})
        shared = list(message.state)
        if job.client in server_state.get("trained", ()):
            message.state = {}
        models = [server.models[centre] for centre in self.centres if centre in server.models]
        if job.tag in (ESTIMATE, NEWCOMER):
            states = {centre: select(model, shared) for centre, model in zip(self.centres, models, strict=True)}
            message.extras[self.key] = {"centres": states}
        elif job.work != 0 and job.client in server_state.get("shares", {}):
            share = server_state["shares"][job.client].tolist()
            names = parameter_names(server, dict.fromkeys(shared))  # type: ignore[arg-type]
            target = weighted_sum(share, [select(model, names) for model in models])
            message.extras[self.key] = {"target": target, "total": sum(share)}

    def memberships(self, server: Server) -> dict[str, dict[str, float]]:
        """Return every known client's shares."""
        client_shares = server.state[self.key]["shares"]
        return {client: dict(zip(self.centres, u.tolist(), strict=True)) for client, u in client_shares.items()}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_receive(self, client: Client, message: Message) -> None:
        """Go on from the client's own model. What was sent is not an anchor: only the centres pull.

        A client that takes no part in training has no model of its own: it uses the centre that fits most of its samples.
        """
        own_model = client.state.get(self.key, {}).get("model", {})
        message.state = {**message.state, **own_model}
        centres = list(message.extras.get(self.key, {}).get("centres", {}).values())
        if centres and message.tag != ESTIMATE and not own_model:
            message.state |= centres[int(ties.first_largest(self._shares(client, centres)))]
        client.received = {}

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Add `lam sum_s u_is (w - c_s) = lam (U w - sum_s u_is c_s)` with `U = sum_s u_is`."""
        target = ctx.payload.get("target", {}).get(name)
        if target is None:
            return gradient
        wide = torch.promote_types(parameter.dtype, torch.float32)
        pull = ctx.payload["total"] * parameter.to(wide) - target.to(parameter.device, wide)
        return gradient + (self.lam * pull).to(gradient.dtype)

    def on_send(self, client: Client, update: Update) -> None:
        """Send the shares, or keep the trained model."""
        if client.message.tag == ESTIMATE:
            centres = list(client.message.extras[self.key]["centres"].values())
            update.extras[self.key] = {"shares": self._shares(client, centres)}
        elif update.state:
            client.state[self.key] = {"model": dict(update.state)}

    def _shares(self, client: Client, centres: list[State]) -> Tensor:
        """Return `u`, `(centres,)`, for the client's training samples."""
        losses = torch.stack([client.losses(state) for state in centres])
        if losses.numel() and losses.isnan().all():  # with equal shares of nothing it would hardly ever be drawn
            raise ValueError(
                f"{self.key} finds no training sample of client '{client.id}' with a loss under any centre."
            )
        return shares(losses, self.sigma)

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the centre that has the largest share of a client's data; `None` for all, and before an estimate."""
        share = server.state.get(self.key, {}).get("shares", {}).get(client)
        return cluster_module(server, None if share is None else self.centres[int(ties.first_largest(share))])


def shares(losses: Tensor, sigma: float) -> Tensor:
    """Return `u_s = n_s / n`, float64 of shape `(centres,)`, where `n_s` counts the samples that centre s fits best."""
    counts = best_fitted(losses)
    return torch.where(counts > 0, counts, torch.full_like(counts, sigma))


def weighted_sum(weights: Sequence[float], states: Sequence[State]) -> State:
    """Return `sum_s u_s c_s`, added up in float64, in the type of the states."""
    return {
        name: narrow(
            torch.stack([u * widen(state[name]) for u, state in zip(weights, states, strict=True)]).sum(0), value
        )
        for name, value in states[0].items()
    }

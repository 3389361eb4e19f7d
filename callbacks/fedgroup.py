"""FedGroup."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import (
    GLOBAL,
    Client,
    Facts,
    Job,
    Message,
    Newcomers,
    Placing,
    Plan,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    address,
    contributors,
    requires,
)
from fedlightning.callbacks.shared.memberships import Clusters, cluster_module, first_groups, in_client_order
from fedlightning.callbacks.shared.server_models import NO_SERVER_STEP, one_visit
from fedlightning.ranges import Counts, PositiveInt, Range, make_init, needs
from fedlightning.tensors import WeightedMean, narrow, select, subtract, to_row, widen

COLD_START = "cold start"
"""Key of the first model at the server while clients pre-train from it; their scores go under it too."""


@needs("mix_mean", "mix", why="groups do not mix. Leave it out, or set mix.")
@make_init
class FedGroup(Clusters):
    r"""Clients are grouped once, by the directions of their first updates; each group then trains by FedAvg.

    Duan et al., "FedGroup: efficient federated learning via decomposed similarity-based clustering", ISPA 2021; FlexCFL,
    IEEE TPDS 2022.

    * Cold start (round 1): `alpha m` clients, drawn from all, pre-train from `w^0`. With `Delta_i = w_i - w^0` and `v_1 ...
      v_m` the first right singular vectors of all `Delta_i`, client i becomes the point `(cos(Delta_i, v_1), ...,
      cos(Delta_i, v_m))`, and k-means finds m groups of points. A group's model is the plain mean of its members' models,
      its direction the mean of their `Delta_i`. No more is trained in this round.
    * Then each group is a FedAvg of its own.
    * A newcomer, whose first visit is later, pre-trains from `w^0` and joins the group with the direction of largest
      cosine with its `Delta_i`; then it trains with that group, in the same round. Where everybody is in the cold start,
      only who failed there comes later; it pre-trains in one round and trains with its group from the next.
    * With `mix`, groups learn from each other after a round: `w_g <- w_g + mix sum_{h != g} w_h / ||w_h||`.

    Nobody changes its group. (FlexCFL's migration of clients whose data have changed is not here.) Down and up: one model;
    twice for a newcomer. State at the server: `w^0`, m models, m directions, who is where. Deployed: the model of the
    client's group, and `w^0` before its first visit.

    Args:
        num_clusters: m. Default 2 (authors: 2 to 5).
        alpha: Clients in the cold start, as a multiple of m. Default 20 (authors).
        pretrain: Epochs or steps of pre-training, as the trainer counts work (authors: 50 steps). `None`: as much as in a
            round.
        unit: Directions are found from `Delta_i / ||Delta_i||`, so that no client counts more because it has moved more.
            False: from `Delta_i` (authors' code).
        mix: `eta_G`. Default 0 (authors' default): groups do not mix.
        mix_mean: Divide by the sum of the weights when groups mix (authors' code). Default False (paper).
        weighting: `"samples"` (authors, default) or `"uniform"`, within a group. The cold start is uniform.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> directions(torch.tensor([[2.0, 0.0], [0.5, 0.0], [0.0, 1.0]]), 2).abs().tolist()
        [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """

    @property
    def facts(self) -> Facts:
        """Groups have models of their own; newcomers pre-train first, and may then train again with their group."""
        why = "finds a client's group by the update of its training, and has none for one that never trained"
        once = one_visit(
            "lets a newcomer train twice in a round",
            "use participation=1.0 and an alpha that takes all clients",
            self._twice_in,
        )
        return Facts(
            needs=[NO_SERVER_STEP, once],
            requires=[requires.FreshOptimizers("lets a newcomer train twice in a round", when="_twice_in")],
            most_work=lambda usual: max(usual, self.pretrain or 0),
            newcomers=Newcomers(no_model=why, join=True, place=self._place),
        )

    num_clusters: Annotated[int, Range("[1, inf)", "1 is FedAvg."), Counts("clients")] = 2
    alpha: PositiveInt = 20
    pretrain: Annotated[int, Range("[1, inf)", "Who does not train has no direction.")] | None = None
    unit: bool = True
    mix: Annotated[float, Range("[0, inf)", "0 does not mix.")] = 0.0
    mix_mean: bool = False
    weighting: WeightingName | None = "samples"

    @property
    def clusters(self) -> list[str]:
        """Keys of the groups' models at the server."""
        return [f"cluster {k}" for k in range(1, self.num_clusters + 1)]

    def _twice_in(self, setup: Setup) -> bool:
        return self._twice(setup.run.participation, len(setup.run.clients))

    def _twice(self, participation: float, clients: int) -> bool:
        """Return whether a newcomer may pre-train and train with its group in one round.

        Not where all are in the cold start: then nothing is refused that clients keep, and it would train in both visits.
        """
        share = participation < clients if isinstance(participation, int) else participation < 1.0
        return share or self.alpha * self.num_clusters < clients

    # -- server --------------------------------------------------------------------------------------------------------
    def cluster_of(self, server: Server, client: str) -> str:
        """Return the key of the model of a client's group; of the first model for who has none yet."""
        cluster: str = server.state.get(self.key, {}).get("clusters", {}).get(client, GLOBAL)
        return cluster

    def plan_round(self, server: Server) -> Plan:
        """Find the groups in the first round; then place newcomers, and train each group."""
        if self.key not in server.state:
            yield from self._cold_start(server)
            return
        participants = server.participants()
        new = [client for client in participants if self.cluster_of(server, client) == GLOBAL]
        if new:
            yield from self._join(server, new)
        if not self._twice(server.participation.share, len(server.clients)):
            participants = [client for client in participants if client not in new]
        placed = [(client, self.cluster_of(server, client)) for client in participants]
        jobs = [Job(client, tag=cluster) for client, cluster in placed if cluster != GLOBAL]
        if jobs:
            yield jobs
        if self.mix:
            yield []
            self._mix(server)

    def _pretrained(
        self, server: Server, clients: Sequence[str]
    ) -> Generator[list[Job], list[Update], dict[str, State]]:
        """Let clients train from the first model; return what they have made of it."""
        server.models[COLD_START] = server.model
        jobs = [Job(client, model=COLD_START, work=self.pretrain, keep=True) for client in clients]
        updates = yield jobs
        yield []  # their mean is made of that model, which is not kept
        del server.models[COLD_START]
        return {update.client: update.state for update in contributors(updates) if update.state}

    def _cold_start(self, server: Server) -> Generator[list[Job], list[Update], None]:
        self._names(server)
        pool = [client for client in server.clients if server.num_samples[client]] or list(server.clients)
        order = torch.randperm(len(pool), generator=server.rng(COLD_START, "participation"))[
            : self.alpha * self.num_clusters
        ]
        answers = yield from self._pretrained(server, [pool[place] for place in sorted(order.tolist())])
        if not answers:
            return  # nobody took a step: the next round tries again
        moved = {client: self._moved(server, state) for client, state in answers.items()}
        points = directions(torch.stack([to_row(delta) for delta in moved.values()]), self.num_clusters, self.unit)
        groups = first_groups(points, self.num_clusters, address(server.blueprint.settings.seed, self.key))
        clusters: dict[str, str] = {}
        paths: dict[str, State] = {}
        for cluster, places in zip(self.clusters, groups, strict=True):
            members = [list(answers)[place] for place in places]
            server.models[cluster] = {**server.model, **_mean([answers[client] for client in members])}
            paths[cluster] = _mean([moved[client] for client in members])
            clusters = dict.fromkeys(members, cluster) | clusters  # equal groups, where clients are too few: the first
        server.state[self.key] = {"clusters": in_client_order(server, clusters), "directions": paths}

    def _join(self, server: Server, new: Sequence[str]) -> Placing:
        """Place newcomers by the cosines of their first updates with the groups' directions; return their groups."""
        kept = server.state[self.key]
        clusters: dict[str, str] = {}
        for client, state in (yield from self._pretrained(server, new)).items():
            moved = to_row(self._moved(server, state))
            cosines = [
                float(torch.cosine_similarity(moved, to_row(path), dim=0)) for path in kept["directions"].values()
            ]
            clusters[client] = self.clusters[cosines.index(max(cosines))]
        server.state[self.key] = {**kept, "clusters": in_client_order(server, kept["clusters"] | clusters)}
        return clusters

    def _place(self, server: Server, clients: Sequence[str]) -> Placing:
        """Let clients that are onboarded pre-train, and place them as newcomers."""
        if self.key not in server.state:
            raise ValueError("FedGroup has found no groups yet: no client has trained in the cold start. Train first.")
        cluster_by_client = yield from self._join(server, clients)
        server_state = server.state[self.key]
        server.state[self.key] = {**server_state, "clusters": {**server_state["clusters"], **cluster_by_client}}
        return cluster_by_client

    def _moved(self, server: Server, state: State) -> State:
        """Return what training has added to the parameters of the first model; 0 for those that were not sent."""
        first = select(server.model, self._names(server))
        return subtract({**first, **select(state, [name for name in first if name in state])}, first)

    def _names(self, server: Server) -> list[str]:
        """Return the parameters that train and travel."""
        names = [name for name in server.trainable if name in set(server.returned_names())]
        if not names:
            raise ValueError("FedGroup groups clients by how the model moves, and no parameter that trains travels.")
        return names

    def _mix(self, server: Server) -> None:
        """Add the other groups' models, each of length `mix`, to every group's."""
        names = self._names(server)
        before = {cluster: server.models[cluster] for cluster in self.clusters}
        weights = {
            cluster: self.mix / max(float(to_row(select(w, names)).norm()), 1e-12) for cluster, w in before.items()
        }
        for cluster, own_model in before.items():
            others = [(weights[other], model) for other, model in before.items() if other != cluster]
            whole = 1.0 + sum(weight for weight, _ in others) if self.mix_mean else 1.0
            mixed = {}
            for name in names:
                added = sum((weight * widen(model[name]) for weight, model in others), start=widen(own_model[name]))
                mixed[name] = narrow(added / whole, own_model[name])
            server.models[cluster] = {**own_model, **mixed}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the model of the client's group, unless it is to pre-train."""
        if job.model == GLOBAL:
            message.state = select(server.models[self.cluster_of(server, job.client)], message.state)

    # -- client --------------------------------------------------------------------------------------------------------
    def on_send(self, client: Client, update: Update) -> None:
        """Answer for the group."""
        if client.message.tag and update.state:  # else a visit after the last round, whose tag is another method's
            update.model = client.message.tag

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model of a client's group; `None` for all, and before the client has one."""
        cluster = GLOBAL if client is None else self.cluster_of(server, client)
        return cluster_module(server, None if cluster == GLOBAL else cluster)


def directions(rows: Tensor, count: int, unit: bool = True) -> Tensor:
    """Return the cosines of updates with their first singular vectors, `(clients, count)`: FedGroup's "EDC".

    Where there are fewer singular vectors, or fewer that carry anything, the rest are 0.
    """
    lengths = rows.norm(dim=1, keepdim=True)
    turned = torch.where(lengths > 0, rows / lengths.clamp_min(1e-300), torch.zeros_like(rows))
    _, strengths, vectors = torch.linalg.svd(turned if unit else rows, full_matrices=False)
    vectors = vectors[:count] * (strengths[:count, None] > 1e-12 * strengths[0].clamp_min(1e-300))
    cosines = (turned @ vectors.T).clamp(-1, 1)
    return torch.cat([cosines, cosines.new_zeros(len(rows), count - cosines.shape[1])], dim=1)


def _mean(states: Sequence[State]) -> dict[str, Any]:
    """Return the plain mean of models."""
    mean = WeightedMean()
    for state in states:
        mean.add(state, 1.0)
    return mean.result()

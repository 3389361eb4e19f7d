"""CFL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import (
    GLOBAL,
    Change,
    Client,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Placing,
    Plan,
    Server,
    State,
    Update,
    WeightingName,
    contributors,
    requires,
)
from fedlightning.callbacks.shared.memberships import Clusters, cluster_module, in_client_order
from fedlightning.callbacks.shared.server_models import NO_SERVER_STEP
from fedlightning.ranges import ClientCount, Counts, NonNegativeFloat, Range, ShareBelowOne, make_init
from fedlightning.tensors import WeightedMean, select, subtract, ties, to_row

SPLITS = Need(
    "splits the model for all into one for each cluster",
    (Change.GLOBAL_SELECTION,),
    "use LocalCheckpoint() in its place",
)


@make_init
class CFL(Clusters):
    r"""Clustered federated learning: a cluster whose clients pull apart when it has stopped to move is split in two.

    Sattler, Mueller, Samek, "Clustered federated learning: model-agnostic distributed multi-task optimization under
    privacy constraints", IEEE TNNLS 2021.

    In each cluster, `Delta_i` is what client i's training has added to the model. The model moves by the mean of its
    members' `Delta_i`. The cluster is split if

    * `||mean_i Delta_i|| < eps1`, it is near a stationary point of its members' common objective, but
    * `max_i ||Delta_i|| > eps2`, some of them are not at one of their own, and
    * `sqrt((1 - max cos) / 2) > gap`, where the maximum is over pairs of clients that the split takes apart.

    The two parts are those of complete linkage on the cosines of the members' `Delta_i`. Each goes on from the model
    before the round with its own mean.

    A client that is onboarded goes down the tree of splits (the paper's algorithm 3): it trains from the model of which a
    cluster was split, and goes to the part that has the client with whose `Delta_i` of then its own has the largest cosine.

    Down and up: the cluster's model. State at the server: the models of all clusters, also of those that were split, and
    who is where; for every split the model before it and all members' `Delta_i` (O(N * model)). Deployed: the model of the
    client's cluster.

    The paper's thresholds are norms, which depend on model, rate and number of steps. Here they are by default multiples
    of the largest norm in round 1. (Not of the mean's: where groups are opposed, that is near 0 from the start.) With
    several local epochs the mean slows down little in tens of rounds, so it is mostly `gap` that decides: in clients that
    disagree about labels or orientation of digits it was 0.6 to 0.85, in clients with equal tasks 0.25 to 0.58, also under
    label skew (Dirichlet 0.5).

    Args:
        eps1: Largest norm of the mean. Default 0.8 of round 1's largest (authors' demonstration: 0.4, absolute).
        eps2: Smallest norm of the largest. Default 0.6 of round 1's largest (authors: 1.6, absolute).
        relative: `eps1` and `eps2` are multiples of the largest norm in round 1. False: they are norms.
        gap: Least separation, in [0, 1). Default 0.6. 0: every split is taken (authors' code).
        start_round: First round in which a cluster may be split, from 1. Default 2 (authors: 20).
        min_size: A cluster of so few members is not split. Default 2 (authors).
        weighting: `"uniform"` (authors) or `"samples"`, within a cluster.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> updates = {"a": {"w": torch.tensor([1.0, 0.1])}, "b": {"w": torch.tensor([-1.0, 0.0])}}
        >>> updates |= {"c": {"w": torch.tensor([0.9, 0.0])}}
        >>> CFL().halves(updates)
        (['a', 'c'], ['b'])
    """

    @property
    def facts(self) -> Facts:
        """Clusters have models of their own; a client is placed by its update."""
        why = "finds a client's cluster by the updates of its training, and has none for one that never trained"
        return Facts(
            needs=[NO_SERVER_STEP, SPLITS],
            requires=[requires.EveryClient("splits a cluster by the updates of all its members")],
            newcomers=Newcomers(no_model=why, place=self._place),
        )

    eps1: NonNegativeFloat = 0.8
    eps2: NonNegativeFloat = 0.6
    relative: bool = True
    gap: ShareBelowOne = 0.6
    start_round: Annotated[int, Range("[1, inf)"), Counts("rounds")] = 2
    min_size: ClientCount = 2
    weighting: WeightingName | None = "uniform"

    # -- server --------------------------------------------------------------------------------------------------------
    def cluster_of(self, server: Server, client: str) -> str:
        """Return the key of a client's model at the server: all begin with the global one."""
        cluster: str = server.state.get(self.key, {}).get("clusters", {}).get(client, GLOBAL)
        return cluster

    def plan_round(self, server: Server) -> Plan:
        """Train every cluster; split those that are to be split."""
        members: dict[str, list[str]] = {}
        for client in server.participants():
            members.setdefault(self.cluster_of(server, client), []).append(client)
        before = {cluster: server.models[cluster] for cluster in members}
        updates = yield [
            Job(client, tag=cluster, keep=True) for cluster, clients in members.items() for client in clients
        ]
        yield []
        for cluster, clients in members.items():
            answers = {update.client: update for update in contributors(updates) if update.client in clients}
            heard = [client for client in clients if server.num_samples[client]]  # the others never have an update
            if answers and all(client in answers for client in heard):  # else some are not heard: not in this round
                self._split_if_due(server, cluster, before[cluster], answers)

    def _split_if_due(self, server: Server, cluster: str, before: State, answers: Mapping[str, Update]) -> None:
        """Split a cluster if its members pull apart where it stands still; note the largest norm of round 1."""
        deltas = {client: self.delta(server, before, update) for client, update in answers.items()}
        mean, largest = self.norms(deltas)
        server_state = server.state.get(self.key, {})
        if "first" not in server_state:
            server_state = server.state[self.key] = {"clusters": {}, "parents": {}, "first": largest, **server_state}
        unit = server_state["first"] if self.relative else 1.0
        due = server.round + 1 >= self.start_round and len(deltas) > self.min_size
        if not due or mean >= self.eps1 * unit or largest <= self.eps2 * unit:
            return
        halves = self.halves(deltas)
        if self.separation(deltas, *halves) <= self.gap:
            return
        clusters, parents = dict(server_state["clusters"]), dict(server_state["parents"])
        sides: dict[str, dict[str, State]] = {}
        for number, clients in enumerate(halves, start=1):
            child = f"cluster {number}" if cluster == GLOBAL else f"{cluster}.{number}"
            total = WeightedMean()
            for client in clients:
                total.add(select(answers[client].state, server.returned_names()), server.weight(answers[client]))
            server.models[child] = {**before, **total.result()}
            clusters |= dict.fromkeys(clients, child)
            parents[child] = cluster
            sides[child] = {client: deltas[client] for client in clients}
        splits = {**server_state.get("splits", {}), cluster: {"model": before, "updates": sides}}
        ordered_clusters = in_client_order(server, clusters)
        server.state[self.key] = {**server_state, "clusters": ordered_clusters, "parents": parents, "splits": splits}

    def _place(self, server: Server, clients: Sequence[str]) -> Placing:
        """Let clients that are onboarded go down the tree of splits, a visit for each."""
        server_state = server.state.get(self.key, {})
        splits, clusters = server_state.get("splits", {}), dict.fromkeys(clients, GLOBAL)
        while any(cluster in splits for cluster in clusters.values()):
            server.models.update({f"before {cluster}": split["model"] for cluster, split in splits.items()})
            at = {client: cluster for client, cluster in clusters.items() if cluster in splits}
            updates = yield [Job(client, model=f"before {cluster}", keep=True) for client, cluster in at.items()]
            # who failed goes no further
            clusters = {client: cluster for client, cluster in clusters.items() if client not in at}
            for update in updates:
                split = splits[at[update.client]]
                clusters[update.client] = self.side(self.delta(server, split["model"], update), split["updates"])
        if splits:  # else all are served by the model of all
            server.state[self.key] = {**server_state, "clusters": {**server_state["clusters"], **clusters}}
        return clusters

    def side(self, delta: State, sides: Mapping[str, Mapping[str, State]]) -> str:
        """Return the part of a split that has the update of largest cosine with a newcomer's, the first of several.

        Args:
            delta: The newcomer's update.
            sides: The members' updates, by part.
        """
        likeness = {part: float(cosines(flat({"": delta, **members}))[0, 1:].max()) for part, members in sides.items()}
        return list(likeness)[int(ties.first_largest(torch.tensor(list(likeness.values()))))]

    def delta(self, server: Server, before: State, update: Update) -> State:
        """Return what training has added to the trainable parameters that travel; 0 for those that were not sent.

        Raises:
            ValueError: If no parameter that trains travels.
        """
        travelling = set(server.returned_names())
        old = select(before, [name for name in server.trainable if name in travelling])
        if not old:
            raise ValueError("CFL splits clusters by how the model moves, and no parameter that trains travels.")
        return subtract({**old, **select(update.state, old)}, old)

    def norms(self, deltas: Mapping[str, State]) -> tuple[float, float]:
        """Return the norm of the mean, and the largest norm of a client's."""
        rows = flat(deltas)
        return float(rows.mean(0).norm()), float(rows.norm(dim=1).max())

    def halves(self, deltas: Mapping[str, State]) -> tuple[list[str], list[str]]:
        """Return the two parts of complete linkage on cosines, that of the first client first.

        Args:
            deltas: Every member's update.
        """
        from sklearn.cluster import AgglomerativeClustering  # slow to import

        linkage = AgglomerativeClustering(2, metric="precomputed", linkage="complete")
        labels = linkage.fit_predict(ties.levelled(1.0 - cosines(flat(deltas))).numpy())
        first = [client for client, label in zip(deltas, labels, strict=True) if label == labels[0]]
        return first, [client for client in deltas if client not in first]

    def separation(self, deltas: Mapping[str, State], first: Sequence[str], second: Sequence[str]) -> float:
        """Return `sqrt((1 - max cos) / 2)` over the pairs that a split takes apart."""
        order, table = list(deltas), cosines(flat(deltas))
        across = table[np.ix_([order.index(c) for c in first], [order.index(c) for c in second])]
        return math.sqrt(max(0.0, 1.0 - float(across.max())) / 2)

    def memberships(self, server: Server) -> dict[str, dict[str, float]]:
        """Return every client's cluster."""
        return {client: {self.cluster_of(server, client): 1.0} for client in server.clients}

    def models_in_use(self, server: Server) -> list[str]:
        """Return the keys of the clusters that were not split; the others' models are only remembered."""
        split = set(server.state.get(self.key, {}).get("parents", {}).values())
        return [key for key in server.models if key not in split]

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the client's own cluster's model."""
        if job.model == GLOBAL:  # else it goes down the tree of splits
            message.state = select(server.models[self.cluster_of(server, job.client)], message.state)

    def on_send(self, client: Client, update: Update) -> None:
        """Answer for the cluster."""
        if update.state:  # else a visit after the last round, whose tag is another method's
            update.model = client.message.tag or client.message.model

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model of a client's cluster; for all, the global one as long as nothing was split."""
        if client is None:
            split = bool(server.state.get(self.key, {}).get("clusters"))
            return cluster_module(server, None if split else GLOBAL)
        return cluster_module(server, self.cluster_of(server, client))


def flat(deltas: Mapping[str, State]) -> Tensor:
    """Return one row of float64 numbers for each client, shape `(clients, parameters)`."""
    return torch.stack([to_row(delta) for delta in deltas.values()])


def cosines(rows: Tensor) -> Tensor:
    """Return the cosine of every pair of rows, `(clients, clients)`; 0 with a row of zeros."""
    unit = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return (unit @ unit.T).clamp(-1, 1)

"""The server's steps in a round of PI-FL: schedule, train, score, settle, pre-train."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from fedlightning.algorithm import POOLED, Job, Server, State, Update, contributors
from fedlightning.callbacks.shared.class_scores import groups_by_class_scores
from fedlightning.callbacks.shared.memberships import Clusters
from fedlightning.callbacks.shared.server_models import (
    combine,
)
from fedlightning.callbacks.shared.shapley import Coalition, Shapley, shapley_values
from fedlightning.callbacks.shared.tokens import Ledger, contribution_ranks, levels, refund_share
from fedlightning.tensors import to_row

UTILITY, CLASSES = "utility", "classes"
TRIAL = "trial"
"""Key of a server model that is there only while it is scored."""

Steps = Generator[list[Job], list[Update], Any]


class PIFLRound(Clusters):
    """The steps of :class:`~fedlightning.callbacks.PIFL` that work on the server's state; see there for the options."""

    num_clusters: int
    performance_slots: int | None
    random_slots: int
    price: float
    eta: float
    gamma: float
    utility: str
    max_evaluations: int
    pretrain_rounds: int
    ledger: bool
    incentive: bool

    @property
    def clusters(self) -> list[str]:
        """Keys of the clusters' models at the server."""
        return [f"cluster {k}" for k in range(1, self.num_clusters + 1)]

    @property
    def _in_one_place(self) -> bool:
        """Whether models are scored on everybody's validation data at once, not by the players on theirs."""
        return self.utility == "pooled"

    def _note(self, server: Server, **entries: Any) -> None:
        """Replace entries of the state."""
        server.state[self.key] = {**server.state[self.key], **entries}

    def _first(self, server: Server) -> bool:
        """Return True in the first round with clusters."""
        return server.round == self.pretrain_rounds

    def memberships(self, server: Server) -> dict[str, dict[str, float]]:
        """Return the shares of Eq. 2 of every client that has been asked for a bid."""
        found = server.state[self.key]["importance"]
        return {client: dict(zip(self.clusters, shares(v), strict=True)) for client, v in found.items()}

    # -- who trains what -----------------------------------------------------------------------------------------------
    def _schedule(
        self, server: Server, ledger: Ledger, available: Sequence[str], bids: Mapping[str, Sequence[str]] | None
    ) -> dict[str, list[str]]:
        """Choose each cluster's clients, and let them pay. Without bids, all are assigned at random."""
        own, chosen = server.state[self.key], {cluster: list[str]() for cluster in self.clusters}
        slots = len(available) if self.performance_slots is None else self.performance_slots
        turn = server.round % self.num_clusters  # nobody is always the last to be paid
        assigned = self._assigned(server, available) if bids is None else {}
        for cluster in [*self.clusters[turn:], *self.clusters[:turn]]:
            if bids is None:
                willing = [client for client in assigned[cluster] if ledger.can_pay(client, self.price)]
                picked = willing[: slots + self.random_slots]
            else:
                worth, before = own["contribution"][cluster], own["taken_part"][cluster]
                willing = [client for client in bids[cluster] if ledger.can_pay(client, self.price)]
                level = levels({client: worth.get(client, (0.0, 0))[0] for client in willing})
                willing.sort(key=lambda client: (-level[client], before.get(client, 0)))
                picked = willing[:slots]
                others = [c for c in available if c not in picked and ledger.can_pay(c, self.price)]
                order = torch.randperm(len(others), generator=server.rng(f"random slots of {cluster}")).tolist()
                picked += [others[place] for place in order[: self.random_slots]]
            for client in picked:
                ledger.pay(client, cluster, self.price)
            chosen[cluster] = [client for client in server.clients if client in set(picked)]
        return chosen

    def _assigned(self, server: Server, available: Sequence[str]) -> dict[str, list[str]]:
        """Deal the clients to the clusters at random; those that the pre-training has grouped go to their group."""
        order = torch.randperm(len(available), generator=server.rng("groups")).tolist()
        groups = server.state[self.key]["groups"] if self._first(server) else {}
        unknown = [available[place] for place in order if available[place] not in groups]
        dealt = {cluster: unknown[k :: self.num_clusters] for k, cluster in enumerate(self.clusters)}
        members = [available[place] for place in order if available[place] in groups]
        return {cluster: [c for c in members if groups[c] == cluster] + dealt[cluster] for cluster in self.clusters}

    def _train(self, server: Server, ledger: Ledger, chosen: Mapping[str, Sequence[str]]) -> Steps:
        """Train and make the new models. Return each cluster's answers; who gave none gets the price back."""
        settles = self.ledger or self.incentive
        jobs = [Job(client, model=cluster, keep=settles) for cluster in self.clusters for client in chosen[cluster]]
        answers: dict[str, list[Update]] = {cluster: [] for cluster in self.clusters}
        for job, update in zip(jobs, (yield jobs) if jobs else (), strict=True):
            if contributors([update]):
                answers[job.model].append(update)
            else:
                ledger.give_back(job.client, job.model)
        yield []
        return answers if settles else {cluster: [] for cluster in self.clusters}

    # -- contributions and tokens --------------------------------------------------------------------------------------
    def _settle(self, server: Server, ledger: Ledger, cluster: str, before: State, answers: Sequence[Update]) -> Steps:
        """Compute contributions, refund and reward of one cluster."""
        own, players = server.state[self.key], [update.client for update in answers]
        new = server.models[cluster]
        accuracy_before, accuracy = yield from self._scores(server, [before, new], players)
        found: Shapley = yield from self._contributions(server, before, new, answers, (accuracy_before, accuracy))
        known = [value for value in (own["best"][cluster], accuracy_before) if value is not None and not isnan(value)]
        best = known[0] if known else None
        if best is not None and not isnan(accuracy):
            ledger.refund(cluster, refund_share(accuracy, best, self.eta, self.gamma))
            best = max(best, accuracy)
        means, counts = dict(own["contribution"][cluster]), dict(own["taken_part"][cluster])
        for client, value in found.values.items():
            mean, rounds = means.get(client, (0.0, 0))
            means[client] = (mean + (value - mean) / (rounds + 1), rounds + 1)
            counts[client] = counts.get(client, 0) + 1
        ledger.reward(cluster, contribution_ranks(found.values, counts))
        for entry in ledger.entries:
            if entry["cluster"] == cluster and entry["client"] in found.values:
                entry |= {"contribution": found.values[str(entry["client"])], "error": found.error}
        self._note(
            server,
            contribution={**own["contribution"], cluster: means},
            taken_part={**own["taken_part"], cluster: counts},
            best={**own["best"], cluster: best},
            evaluations=own["evaluations"] + found.evaluations,
        )

    def _contributions(
        self, server: Server, before: State, new: State, answers: Sequence[Update], known: tuple[float, float]
    ) -> Steps:
        """Return the Shapley values of the answers to this round, or the cosines of their steps.

        All are 0 where nobody has validation data. A coalition that nobody could score is worth as much as none.
        """
        players = [update.client for update in answers]
        if self.utility == "gradient":
            names = [name for name in server.trainable if name in answers[0].state]
            mean = to_row(new, names) - to_row(before, names)
            cosines = [
                torch.cosine_similarity(to_row(u.state, names) - to_row(before, names), mean, 0) for u in answers
            ]
            return Shapley(dict(zip(players, map(float, cosines), strict=True)), 0, exact=False)
        if isnan(known[0]) or isnan(known[1]):
            return Shapley(dict.fromkeys(players, 0.0), 0, exact=False)
        models = {update.client: (server.weight(update), update.state) for update in answers}
        draw = server.rng(f"permutations of {answers[0].model}")
        game = shapley_values(players, max_evaluations=self.max_evaluations, draw=draw)
        next(game)
        wanted: list[Coalition] = []
        worths = list(known)
        while True:
            try:
                wanted = game.send(worths)
            except StopIteration as end:
                return end.value
            states = [combine(before, (models[c] for c in players if c in some)) for some in wanted]
            scores = yield from self._scores(server, states, players)
            worths = [known[0] if isnan(score) else score for score in scores]

    def _scores(self, server: Server, states: Sequence[State], players: Sequence[str]) -> Steps:
        """Return what each state scores on the players' validation data, or on everybody's; NaN if nobody could tell."""
        if self.utility == "gradient" and not self.ledger:
            return [nan] * len(states)
        found = []
        for state in states:
            server.models[TRIAL] = state
            if self._in_one_place:
                jobs = [Job(POOLED, model=TRIAL, data="pooled", work=0, returns=(), tag=UTILITY)]
            else:
                jobs = [Job(client, model=TRIAL, work=0, returns=(), tag=UTILITY) for client in players]
            answers = yield jobs
            del server.models[TRIAL]
            values = [update.extras[self.key]["utility"] for update in answers if update.error is None]
            values = [value for value in values if not isnan(value)]  # clients without validation data cannot tell
            found.append(sum(values) / len(values) if values else nan)
        return found

    # -- pre-training --------------------------------------------------------------------------------------------------
    def _pretrain(self, server: Server, available: Sequence[str]) -> Steps:
        """Carry out a round of FedAvg; after the last one, group the clients and start the clusters."""
        last = server.round + 1 == self.pretrain_rounds
        updates = yield [Job(client, keep=last) for client in available]
        yield []
        if not last:
            return
        scores: dict[str, Tensor] = {}
        for update in contributors(updates):
            server.models[TRIAL] = {**server.model, **update.state}
            (answer,) = yield [Job(POOLED, model=TRIAL, data="pooled", work=0, returns=(), tag=CLASSES)]
            if answer.error is None:
                scores[update.client] = answer.extras[self.key]["f1"]
        server.models.pop(TRIAL, None)
        groups = groups_by_class_scores(scores, self.num_clusters, server.blueprint.settings.seed)
        self._note(server, groups={client: self.clusters[group] for client, group in groups.items()})
        for cluster in self.clusters:
            server.models[cluster] = dict(server.model)


def shares(weights: Tensor) -> list[float]:
    """Return importance weights that sum to 1; equal ones where all are 0."""
    whole = weights.double() if weights.sum() > 0 else torch.ones(len(weights), dtype=torch.float64)
    return (whole / whole.sum()).tolist()

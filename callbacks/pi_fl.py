"""PI-FL. The way of a round, and where each step is:

1. Clients see the clusters' models and bid for those that fit their data (`_bids`; on the client `importance`).
2. The scheduler fills each cluster's slots: bidders by contribution, then random ones. Who is chosen pays (`_schedule`).
3. They train; each cluster's model becomes the mean of theirs (`_train`).
4. Contributions are Shapley values of the round, and accuracy decides how much of the price is refunded and how the
   rest is divided (`_settle`; accounts and values are those of `shared/contributions.py`).
5. A client deploys the mean of the models by its importance weights (`on_receive`). It trains nothing for that.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from math import inf, isnan, nan
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    GLOBAL,
    POOLED,
    Client,
    Extra,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Plan,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    Wire,
    contributors,
    facts,
    requires,
)
from fedlightning.callbacks.shared.contributions import (
    Coalition,
    Ledger,
    Shapley,
    class_scores,
    contribution_ranks,
    groups_by_class_scores,
    levels,
    refund_share,
    shapley_values,
    shares,
    write_ledger,
)
from fedlightning.callbacks.shared.memberships import (
    Clusters,
    best_fitted,
    cluster_module,
    in_client_order,
    ledger_figure,
    save,
)
from fedlightning.callbacks.shared.representations import head_path
from fedlightning.callbacks.shared.server_models import (
    NO_SERVER_STEP,
    DifferentStarts,
    another_start,
    combine,
    one_visit,
)
from fedlightning.ranges import (
    ClientCount,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    Share,
    at_most_one,
    idle_with,
    make_init,
    needs,
)
from fedlightning.tensors import entry_kinds, select, ties, to_row

BID = "bid"
UTILITY, CLASSES = "utility", "classes"
TRIAL = "trial"
"""Key of a server model that is there only while it is scored."""

Steps = Generator[list[Job], list[Update], Any]
OF_ACCOUNTS = ("price", "tokens", "eta", "gamma", "charge_first_round")
"""Options that mean something with a ledger."""


@idle_with(OF_ACCOUNTS, "ledger", False, "there are no accounts. Leave it out, or use ledger=True.")
@idle_with("normalize", "importance", "matching", "its shares sum to 1 anyway. Leave it out.")
@idle_with("gamma", "eta", 0.0, "nothing is refunded. Leave it out, or set eta.")
@idle_with("threshold", "incentive", False, "nobody bids. Leave it out, or use incentive=True.")
@needs("head", "pretrain_rounds", why="only the pre-training looks at classes. Leave it out, or set pretrain_rounds.")
@at_most_one("init", "pretrain_rounds", why="the pre-training gives the clusters' start. Use one of them.")
@make_init
class PIFL(Clusters):
    r"""Clients pay tokens to train with a cluster that fits them, earn by what they contribute, and deploy a mixture.

    Khan et al., "PI-FL: personalized and incentivized federated learning", 2023 (later "IP-FL"). In every round

    * a client gets all cluster models `M_k`, weighs them by `v_k` on its own data, and bids for those with `v_k > Th`;
    * the scheduler gives the first `performance_slots` of a cluster to the bidders that have contributed most (ties: to
      those that took part least), and `random_slots` to others; everyone chosen pays `price` (Eq. 4, 5);
    * `M_k` becomes the mean of its clients' trained models;
    * `theta_k` of the cluster's pool goes back to those who paid, the less the more the accuracy has improved (Eq. 6, 7);
    * what is left is divided by the ranks of the clients' Shapley values in this round (Eq. 8).

    Down: all `M_k`, the one to train, and with `utility="local"` each coalition's model that is to be scored (the bulk of
    the traffic). Up: `v`, the trained models, accuracies. State at the server: `M_k`, the accounts, contributions.
    Deployed: `P = sum_k v_k M_k / sum_j v_j` (Eq. 2, normalised). The ledger is in `ledger.csv`, and drawn in
    `figures/ledger.png`; who trained which cluster, in `figures/clusters.png`.

    One cluster with slots for all is FedAvg. A client without training samples neither bids nor is assigned.

    Ours, since the paper does not give them: slots, price, tokens, `eta`, `gamma`, `Th`; Eq. 7 and 8 read so that tokens are
    conserved; the values by all coalitions, or sampled as in GTG-Shapley where there are too many.

    Args:
        num_clusters: K. Default 2 (paper).
        performance_slots: Slots of a cluster for the best contributors. `None`: for everybody.
        random_slots: Slots of a cluster drawn from the others.
        importance: `"accuracy"`: `v_k` is the share of samples that `M_k` classifies correctly (the paper's words).
            `"matching"`: the share whose loss is least under `M_k` (FedSoft's definition, sums to 1).
        threshold: `Th`. `"mean"`: bid for every model that is at least as good as the mean of them; of two models that is
            one. A number below 1, exclusive; below 0 every client bids for all.
        normalize: Divide by `sum_j v_j` in Eq. 2. False is the equation as printed, which scales the parameters.
        split: Data on which `v` is computed: `"train"` or `"val"`, never test.
        price: Tokens for one cluster and round.
        tokens: What every client has at the start. `None`: `2 K price max_rounds`, so that nobody runs out.
        eta: Largest share of the price that is refunded, in [0, 1].
        gamma: Relative improvement from which nothing is refunded, above 0.
        utility: Worth of a coalition: `"local"`: the mean of the chosen clients' validation scores. `"pooled"`: the score
            on everybody's validation data. `"gradient"`: no scoring, the cosine of a client's step with the mean's.
        monitor: Metric of the validation step; accuracy, so more is better.
        max_evaluations: Coalitions of a cluster that may be scored in a round.
        ledger: Keep accounts. Without them, everything is as if nobody ever ran out of tokens.
        incentive: Let clients bid and contributions decide. Without, clients are assigned at random (Fig. 4).
        charge_first_round: Whether the random groups of round 1 pay too.
        pretrain_rounds: Rounds of FedAvg before there are clusters. Then clients are grouped by which classes their
            models do well on, by per-class F1 scores on the pooled validation data. Fewer than `max_rounds`.
        head: Path of the layer that gives the logits, for the F1 scores. `None`: the last layer.
        init: Start of the other clusters' models without pre-training: the deviation of noise on the module's parameters, or
            `"random"`. Default 0: one start for all, as pre-training gives too. The random groups of round 1 tell them
            apart, and Eq. 2 averages their parameters, which makes sense only for models of one start.
        weighting: `"samples"` (default) or `"uniform"`, within a cluster.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> PIFL(threshold="mean").bids(torch.tensor([0.9, 0.4]))
        [0]
        >>> PIFL(threshold=0.2, importance="matching").bids(torch.tensor([0.7, 0.3]))
        [0, 1]
    """

    rank = -1  # the personal model is made before others work on it

    num_clusters: ClientCount = 2
    performance_slots: PositiveInt | None = 8
    random_slots: NonNegativeInt = 2
    importance: Literal["accuracy", "matching"] = "accuracy"
    threshold: Annotated[float, Range("[-1, 1)")] | Literal["mean"] = "mean"
    normalize: bool = True
    split: Literal["train", "val"] = "train"
    price: NonNegativeFloat = 1.0
    tokens: NonNegativeFloat | None = None
    eta: Share = 0.5
    gamma: Annotated[float, Range("(0, inf]")] = 0.1
    utility: Literal["local", "pooled", "gradient"] = "local"
    monitor: str = "val_accuracy"
    max_evaluations: PositiveInt = 100
    ledger: bool = True
    incentive: bool = True
    charge_first_round: bool = True
    pretrain_rounds: NonNegativeInt = 0
    head: str | None = None
    init: NonNegativeFloat | Literal["random"] = 0.0
    weighting: WeightingName | None = "samples"

    @property
    def _pays(self) -> bool:
        """Whether it needs validation scores for what it pays."""
        return bool(self.ledger) or (self.incentive and self.utility != "gradient") or self.pretrain_rounds > 0

    @property
    def facts(self) -> Facts:
        """Clusters have models of their own, of which a client may train several; who joins gets tokens."""
        needs: list[Need] = [NO_SERVER_STEP, facts.WHOLE_UPDATES]
        pays, way_out = "pays by what validation data say", "Set val_fraction, or use ledger=False and incentive=False."
        scores = "scores models on the union of all clients' validation data"
        required: list[requires.Requirement] = [
            DifferentStarts(when="_starts_apart"),
            requires.Split(pays, way_out, "val", when="_pays"),
            requires.PooledSplit(scores, f"Use {self.elsewhere}.", "val", when="_pays_in_one_place"),
        ]
        if self.importance == "matching":
            required.append(requires.AutomaticOptimization("compares models by the loss that training_step returns"))
        if self.num_clusters > 1:
            several = "lets a client train several clusters' models in one round"
            needs.append(one_visit(several, "use one cluster"))
            required.append(requires.FreshOptimizers(several))
        return Facts(needs=needs, requires=required, newcomers=Newcomers(join=self._join))

    elsewhere: ClassVar[str] = "utility='local' and pretrain_rounds=0"
    """What runs where the clients' data are not in one place, for a message."""

    @property
    def _starts_apart(self) -> bool:
        return not self.pretrain_rounds and self.init != 0

    @property
    def _pays_in_one_place(self) -> bool:
        return self._pays and (self._in_one_place or self.pretrain_rounds > 0)

    def check(self, setup: Setup) -> None:
        """Refuse a metric that validation does not log, and pre-training that never ends."""
        logged = setup.first_step().logged
        if logged is not None and (self._pays or (self.num_clusters > 1 and self.importance == "accuracy")):
            self._score(dict.fromkeys(logged, 0.0))
        if 0 < setup.run.max_rounds <= self.pretrain_rounds:
            raise ValueError(
                f"{self.key} has {self.pretrain_rounds} rounds of pre-training and there are {setup.run.max_rounds} in all: "
                "no cluster would ever train. Use pretrain_rounds below max_rounds."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare all cluster models down; importance weights or an accuracy up."""
        return Wire(
            down={"models": "states"},
            up={
                "importance": Extra((self.num_clusters,), due=(BID,)),
                "utility": Extra("scalar", gaps=True, due=(UTILITY,)),
                "f1": Extra((-1,), gaps=True, due=(CLASSES,)),
            },
        )

    # -- state at the server ---------------------------------------------------------------------------------------------
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
        importance_by_client = server.state[self.key]["importance"]
        return {client: dict(zip(self.clusters, shares(v), strict=True)) for client, v in importance_by_client.items()}

    # -- server: the round ---------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Open the accounts; initialise the clusters' models unless a pre-training will give them."""
        whole, shared = len(server.returned_names()) == len(server.kinds), set(server.shared_names())
        moved = [name for name, kind in server.kinds.items() if kind == "float_buffer" and name not in shared]
        if moved and self.num_clusters > 1:
            raise ValueError(
                f"{self.key} lets a client train several clusters' models in one round, and '{moved[0]}', which stays with "
                "the client, would follow one after the other. Leave float_buffers at 'average', or use one cluster."
            )
        if not whole and (self.utility == "pooled" or self.pretrain_rounds):
            raise ValueError(
                f"{self.key} scores whole models on everybody's data (utility='pooled', pretrain_rounds), and here some "
                "entries stay with the clients. Use utility='local' or 'gradient', and pretrain_rounds=0."
            )
        tokens = float(2 * self.num_clusters * self.price * server.max_rounds if self.tokens is None else self.tokens)
        server.state[self.key] = {
            "tokens": tokens,
            "balances": dict.fromkeys(server.clients, tokens),
            "contribution": {cluster: {} for cluster in self.clusters},  # mean over rounds, by client
            "taken_part": {cluster: {} for cluster in self.clusters},
            "best": dict.fromkeys(self.clusters),
            "importance": {},
            "groups": {},
            "ledger": [],
            "evaluations": 0,
        }
        for number, cluster in enumerate(self.clusters if not self.pretrain_rounds else (), start=1):
            start = another_start(server.module, self.init, server.seed_of("initialisation"), self.key, number)
            server.models[cluster] = dict(server.model) if number == 1 else start

    def _join(self, server: Server, clients: Sequence[str]) -> None:
        """Give new clients the tokens that the others began with."""
        server_state = server.state[self.key]
        self._note(server, balances={**server_state["balances"], **dict.fromkeys(clients, server_state["tokens"])})

    def plan_round(self, server: Server) -> Plan:
        """Bid, pay, train, settle."""
        available = [client for client in server.participants() if server.num_samples[client]]
        if server.round < self.pretrain_rounds:
            yield from self._pretrain(server, available)
            return
        bids = (yield from self._bids(server, available)) if self.incentive and not self._first(server) else None
        server_state = server.state[self.key]
        free = not self.ledger or (self._first(server) and not self.charge_first_round)
        ledger = Ledger(
            dict.fromkeys(server_state["balances"], inf) if free else dict(server_state["balances"]),
            dict.fromkeys(self.clusters, 0.0),
        )
        chosen = self._schedule(server, ledger, available, bids)
        before = {cluster: server.models[cluster] for cluster in self.clusters}
        trained = yield from self._train(ledger, chosen)
        for cluster in self.clusters:
            if trained[cluster]:
                yield from self._settle(server, ledger, cluster, before[cluster], trained[cluster])
        if not free:
            entries = [{"round": server.round + 1, **entry} for entry in ledger.entries]
            self._note(server, balances=ledger.balances, ledger=server_state["ledger"] + entries)

    def _bids(self, server: Server, available: Sequence[str]) -> Steps:
        """Ask for importance weights; return who bids, by cluster."""
        bids: dict[str, list[str]] = {cluster: [] for cluster in self.clusters}
        importance_by_client = dict(server.state[self.key]["importance"])
        for update in (yield [Job(client, work=0, returns=(), tag=BID) for client in available]):
            if update.error is None:
                weights = update.extras[self.key]["importance"]
                importance_by_client[update.client] = weights
                for k in self.bids(weights):
                    bids[self.clusters[k]].append(update.client)
        self._note(server, importance=in_client_order(server, importance_by_client))
        return bids

    def bids(self, weights: Tensor) -> list[int]:
        """Return the indices of the clusters that a client bids for.

        Args:
            weights: Its importance weights `v`, `(num_clusters,)`.
        """
        if self.threshold == "mean":
            return [k for k, v in enumerate(weights.tolist()) if v >= float(weights.double().mean()) - ties.CLOSE]
        return [k for k, v in enumerate(weights.tolist()) if v > self.threshold + ties.CLOSE]

    def on_round_end(self, server: Server) -> None:
        """Write `ledger.csv` and `clusters.csv`."""
        if server.run_dir is not None and self.ledger:
            write_ledger(server.run_dir / "ledger.csv", server.state[self.key]["ledger"])
        super().on_round_end(server)

    def on_federation_end(self, server: Server) -> None:
        """Draw the ledger and who belongs to which cluster."""
        super().on_federation_end(server)
        server_state = server.state.get(self.key, {})
        if server.run_dir is not None and self.ledger and server_state.get("ledger"):
            figure = ledger_figure(server_state["ledger"], dict.fromkeys(server.clients, server_state["tokens"]))
            save(figure, server.run_dir / "figures" / "ledger.png")

    # -- who trains what -----------------------------------------------------------------------------------------------
    def _schedule(
        self, server: Server, ledger: Ledger, available: Sequence[str], bids: Mapping[str, Sequence[str]] | None
    ) -> dict[str, list[str]]:
        """Choose each cluster's clients, and let them pay. Without bids, all are assigned at random."""
        server_state, chosen = server.state[self.key], {cluster: list[str]() for cluster in self.clusters}
        slots = len(available) if self.performance_slots is None else self.performance_slots
        turn = server.round % self.num_clusters  # nobody is always the last to be paid
        assigned = self._assigned(server, available) if bids is None else {}
        for cluster in [*self.clusters[turn:], *self.clusters[:turn]]:
            if bids is None:
                willing = [client for client in assigned[cluster] if ledger.can_pay(client, self.price)]
                picked = willing[: slots + self.random_slots]
            else:
                worth, before = server_state["contribution"][cluster], server_state["taken_part"][cluster]
                willing = [client for client in bids[cluster] if ledger.can_pay(client, self.price)]
                level = levels({client: worth.get(client, (0.0, 0))[0] for client in willing})
                willing.sort(key=lambda client: (-level[client], before.get(client, 0)))
                picked = willing[:slots]
                others = [c for c in available if c not in picked and ledger.can_pay(c, self.price)]
                draws = server.rng(f"random slots of {cluster}", "participation")
                order = torch.randperm(len(others), generator=draws).tolist()
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

    def _train(self, ledger: Ledger, chosen: Mapping[str, Sequence[str]]) -> Steps:
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
        state, players = server.state[self.key], [update.client for update in answers]
        new = server.models[cluster]
        accuracy_before, accuracy = yield from self._scores(server, [before, new], players)
        shapley: Shapley = yield from self._contributions(server, before, new, answers, (accuracy_before, accuracy))
        valid = [value for value in (state["best"][cluster], accuracy_before) if value is not None and not isnan(value)]
        best = valid[0] if valid else None
        if best is not None and not isnan(accuracy):
            ledger.refund(cluster, refund_share(accuracy, best, self.eta, self.gamma))
            best = max(best, accuracy)
        means, counts = dict(state["contribution"][cluster]), dict(state["taken_part"][cluster])
        for client, value in shapley.values.items():
            mean, rounds = means.get(client, (0.0, 0))
            means[client] = (mean + (value - mean) / (rounds + 1), rounds + 1)
            counts[client] = counts.get(client, 0) + 1
        ledger.reward(cluster, contribution_ranks(shapley.values, counts))
        for entry in ledger.entries:
            if entry["cluster"] == cluster and entry["client"] in shapley.values:
                entry |= {"contribution": shapley.values[str(entry["client"])], "error": shapley.error}
        self._note(
            server,
            contribution={**state["contribution"], cluster: means},
            taken_part={**state["taken_part"], cluster: counts},
            best={**state["best"], cluster: best},
            evaluations=state["evaluations"] + shapley.evaluations,
        )

    def _contributions(
        self, server: Server, before: State, new: State, answers: Sequence[Update], accuracies: tuple[float, float]
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
        if isnan(accuracies[0]) or isnan(accuracies[1]):
            return Shapley(dict.fromkeys(players, 0.0), 0, exact=False)
        models = {update.client: (server.weight(update), update.state) for update in answers}
        draw = server.rng(f"permutations of {answers[0].model}")
        game = shapley_values(players, max_evaluations=self.max_evaluations, draw=draw)
        next(game)
        wanted: list[Coalition] = []
        worths = list(accuracies)
        while True:
            try:
                wanted = game.send(worths)
            except StopIteration as end:
                return end.value
            states = [combine(before, (models[c] for c in players if c in some)) for some in wanted]
            scores = yield from self._scores(server, states, players)
            worths = [accuracies[0] if isnan(score) else score for score in scores]

    def _scores(self, server: Server, states: Sequence[State], players: Sequence[str]) -> Steps:
        """Return what each state scores on the players' validation data, or on everybody's; NaN if nobody could tell."""
        if self.utility == "gradient" and not self.ledger:
            return [nan] * len(states)
        scores = []
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
            scores.append(sum(values) / len(values) if values else nan)
        return scores

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

    # -- messages and clients ------------------------------------------------------------------------------------------
    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send all clusters' models instead of a global one, unless the job is about one of them."""
        if job.model == GLOBAL and self.clusters[0] in server.models:
            models = {cluster: select(server.models[cluster], message.state) for cluster in self.clusters}
            message.extras[self.key] = {"models": models}
            message.state = {}

    def on_receive(self, client: Client, message: Message) -> None:
        """Make the personal model `P = sum_k v_k M_k / sum_j v_j` where all models came."""
        models = message.extras.get(self.key, {}).get("models")
        if models is None:
            return
        states = list(models.values())
        weights = self.weights(client, states)
        client.scratch[self.key] = weights
        message.state = combine(states[0], zip(shares(weights), states, strict=True))
        if not self.normalize and weights.sum() > 0:
            kinds, whole = entry_kinds(client.module), float(weights.sum())
            message.state = {
                n: v * whole if kinds[n] in ("trainable", "frozen") else v for n, v in message.state.items()
            }
        client.received = dict(message.state)

    def weights(self, client: Client, states: Sequence[State]) -> Tensor:
        """Return the importance weights `v`, `(num_clusters,)`, of the clusters' models for a client's data.

        They are 0 for a client without data.

        Raises:
            ValueError: If validation does not log the monitored metric.
        """
        loader = client.loader(self.split)
        split = self.split if loader is not None and len(loader) > 0 else "train"
        loader = client.loader(split)
        if loader is None or len(loader) == 0:
            return torch.zeros(len(states))
        if self.importance == "matching":
            return best_fitted(torch.stack([client.losses(state, split) for state in states])).float()
        return torch.tensor([self._score(client.evaluate(state, split)) for state in states])

    def _score(self, metrics: Mapping[str, float]) -> float:
        if self.monitor not in metrics:
            raise ValueError(
                f"{self.key} needs the metric '{self.monitor}', but validation gives {sorted(metrics) or 'none'}. "
                "Set monitor=... to the accuracy among them."
            )
        return metrics[self.monitor]

    def on_send(self, client: Client, update: Update) -> None:
        """Send the importance weights, or how well the model that came does on the validation data."""
        if client.message.tag == BID:
            update.extras[self.key] = {"importance": client.scratch[self.key]}
        elif client.message.tag == UTILITY:
            loader = client.loader("val")
            has_batches = loader is not None and len(loader) > 0
            update.extras[self.key] = {"utility": self._score(client.evaluate(split="val")) if has_batches else nan}
        elif client.message.tag == CLASSES:
            update.extras[self.key] = {"f1": class_scores(client, head_path(client.module, self.head), self.key)}

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model of the cluster that a client's last weights favour; `None` for all, and before it has bid."""
        weights = server.state.get(self.key, {}).get("importance", {}).get(client)
        return cluster_module(server, None if weights is None else self.clusters[int(ties.first_largest(weights))])

"""PI-FL. The way of a round, and where each step is:

1. Clients see the clusters' models and bid for those that fit their data (`_bids`; on the client `importance`).
2. The scheduler fills each cluster's slots: bidders by contribution, then random ones. Who is chosen pays (`_schedule`).
3. They train; each cluster's model becomes the mean of theirs (`_train`).
4. Contributions are Shapley values of the round, and accuracy decides how much of the price is refunded and how the
   rest is divided (`_settle`; the accounts are `shared.tokens`, the values `shared.shapley`).
5. A client deploys the mean of the models by its importance weights (`on_receive`). It trains nothing for that.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    GLOBAL,
    POOLED,
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
    select,
)
from fedlightning.callbacks.shared.class_scores import class_scores, groups_by_class_scores
from fedlightning.callbacks.shared.representations import head_path
from fedlightning.callbacks.shared.server_models import another_start, combine, refuse_global_steps
from fedlightning.callbacks.shared.shapley import Coalition, Shapley, shapley_values
from fedlightning.callbacks.shared.tokens import Ledger, contribution_ranks, refund_share, write_ledger

BID, UTILITY, CLASSES = "bid", "utility", "classes"
TRIAL = "trial"
"""Key of a server model that is there only while it is scored."""

Steps = Generator[list[Job], list[Update], Any]


class PIFL(FederatedCallback):
    r"""Clients pay tokens to train with a cluster that fits them, earn by what they contribute, and deploy a mixture.

    Khan et al., "PI-FL: personalized and incentivized federated learning", 2023 (later "IP-FL"). In every round

    * a client gets all cluster models `M_k`, weighs them by `v_k` on its own data, and bids for those with `v_k > Th`;
    * the scheduler gives the first `performance_slots` of a cluster to the bidders that have contributed most (ties: to
      those that took part least), and `random_slots` to others; everyone chosen pays `price` (Eq. 4, 5);
    * `M_k` becomes the mean of its clients' trained models;
    * `theta_k` of the cluster's pool goes back to those who paid, the less the more the accuracy has improved (Eq. 6, 7);
    * what is left is divided by the ranks of the clients' Shapley values in this round (Eq. 8).

    Down: all `M_k`, and the one to train. Up: `v`, the trained models, accuracies. State at the server: `M_k`, the
    accounts, contributions. Deployed: `P = sum_k v_k M_k / sum_j v_j` (Eq. 2, normalised). The ledger is in
    `ledger.csv`.

    Not given by the paper, hence ours: slots, price, tokens, `eta`, `gamma`, `Th`. Equations 7 and 8 are read so that
    tokens are conserved. The paper's Shapley approximation is in an appendix that is not public; here all coalitions are
    tried, or sampled as GTG-Shapley does where there are too many.

    Args:
        num_clusters: K. Default 2 (paper).
        performance_slots: Slots of a cluster for the best contributors. `None`: for everybody.
        random_slots: Slots of a cluster drawn from the others.
        importance: `"accuracy"`: `v_k` is the share of samples that `M_k` classifies correctly (the paper's words).
            `"matching"`: the share whose loss is least under `M_k` (FedSoft's definition, sums to 1).
        threshold: `Th`. `"mean"`: bid for every model that is at least as good as the mean of them. A number in [0, 1).
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
            models do well on, by per-class F1 scores on the pooled validation data.
        head: Path of the layer that gives the logits, for the F1 scores. `None`: the last layer.
        init: Start of the clusters' models without pre-training: `"random"` (default), or the deviation of noise.
        weighting: `"samples"` (default) or `"uniform"`, within a cluster.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> PIFL(threshold="mean").bids(torch.tensor([0.9, 0.4]))
        [0]
        >>> PIFL(threshold=0.2, importance="matching").bids(torch.tensor([0.7, 0.3]))
        [0, 1]
    """

    def __init__(
        self,
        num_clusters: int = 2,
        performance_slots: int | None = 8,
        random_slots: int = 2,
        importance: Literal["accuracy", "matching"] = "accuracy",
        threshold: float | Literal["mean"] = "mean",
        normalize: bool = True,
        split: Literal["train", "val"] = "train",
        price: float = 1.0,
        tokens: float | None = None,
        eta: float = 0.5,
        gamma: float = 0.1,
        utility: Literal["local", "pooled", "gradient"] = "local",
        monitor: str = "val_accuracy",
        max_evaluations: int = 100,
        ledger: bool = True,
        incentive: bool = True,
        charge_first_round: bool = True,
        pretrain_rounds: int = 0,
        head: str | None = None,
        init: float | Literal["random"] = "random",
        weighting: WeightingName = "samples",
    ) -> None:
        rules = {
            "num_clusters": num_clusters >= 1,
            "performance_slots": performance_slots is None or performance_slots >= 1,
            "random_slots": random_slots >= 0,
            "importance": importance in ("accuracy", "matching"),
            "threshold": threshold == "mean" or (isinstance(threshold, int | float) and -1 <= threshold < 1),
            "split": split in ("train", "val"),
            "price": 0 <= price < math.inf,
            "tokens": tokens is None or 0 <= tokens < math.inf,
            "eta": 0 <= eta <= 1,
            "gamma": gamma > 0,
            "utility": utility in ("local", "pooled", "gradient"),
            "max_evaluations": max_evaluations >= 1,
            "pretrain_rounds": pretrain_rounds >= 0,
            "init": init == "random" or (isinstance(init, int | float) and 0 <= init < math.inf),
        }
        given = locals()
        for name, fits in rules.items():
            if not fits:
                raise ValueError(f"{self.key} got {name}={given[name]!r}, which is outside its range; see its Args.")
            setattr(self, name, given[name])
        self.normalize, self.ledger, self.incentive = normalize, ledger, incentive
        self.monitor, self.charge_first_round, self.head = monitor, charge_first_round, head
        self.weighting = weighting

    # The types of what the loop above sets.
    num_clusters: int
    performance_slots: int | None
    random_slots: int
    importance: str
    threshold: float | Literal["mean"]
    split: str
    price: float
    tokens: float | None
    eta: float
    gamma: float
    utility: str
    max_evaluations: int
    pretrain_rounds: int
    init: float | Literal["random"]

    @property
    def clusters(self) -> list[str]:
        """Keys of the clusters' models at the server."""
        return [f"cluster {k}" for k in range(1, self.num_clusters + 1)]

    def check(self, setup: Setup) -> None:
        """Refuse callbacks that work on one global model, and accuracies without validation data.

        Raises:
            ValueError: With a sentence.
        """
        refuse_global_steps(self, setup)
        if (self.ledger or self.incentive or self.pretrain_rounds) and not setup.has_pooled("val"):
            raise ValueError(
                f"{self.key} pays by what validation data say, and there are none. Give the data module a val_fraction, "
                "or use ledger=False and incentive=False."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare all cluster models down; importance weights or an accuracy up."""
        return Wire(
            down={"models": "states"}, up={"importance": (self.num_clusters,), "utility": "scalar", "f1": (-1,)}
        )

    # -- server: the round ---------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Open the accounts; initialise the clusters' models unless a pre-training will give them."""
        tokens = 2 * self.num_clusters * self.price * server.max_rounds if self.tokens is None else self.tokens
        server.state[self.key] = {
            "balances": dict.fromkeys(server.clients, float(tokens)),
            "contribution": {cluster: {} for cluster in self.clusters},  # mean over rounds, by client
            "taken_part": {cluster: {} for cluster in self.clusters},
            "best": dict.fromkeys(self.clusters),
            "importance": {},
            "groups": {},
            "ledger": [],
            "evaluations": 0,
        }
        for number, cluster in enumerate(self.clusters if not self.pretrain_rounds else (), start=1):
            start = another_start(server.module, self.init, server.blueprint.settings.seed, self.key, number)
            server.models[cluster] = start

    def plan_round(self, server: Server) -> Plan:
        """Bid, pay, train, settle."""
        available = server.participants()
        if server.round < self.pretrain_rounds:
            yield from self._pretrain(server, available)
            return
        bids = (yield from self._bids(server, available)) if self.incentive and not self._first(server) else None
        own = server.state[self.key]
        free = not self.ledger or (self._first(server) and not self.charge_first_round)
        ledger = Ledger(
            dict.fromkeys(own["balances"], math.inf) if free else dict(own["balances"]),
            dict.fromkeys(self.clusters, 0.0),
        )
        chosen = self._schedule(server, ledger, available, bids)
        before = {cluster: server.models[cluster] for cluster in self.clusters}
        trained = yield from self._train(server, ledger, chosen)
        for cluster in self.clusters:
            if trained[cluster]:
                yield from self._settle(server, ledger, cluster, before[cluster], trained[cluster])
        if not free:
            entries = [{"round": server.round + 1, **entry} for entry in ledger.entries]
            server.state[self.key] |= {"balances": ledger.balances, "ledger": own["ledger"] + entries}

    def _first(self, server: Server) -> bool:
        """Return True in the first round with clusters."""
        return server.round == self.pretrain_rounds

    def _bids(self, server: Server, available: Sequence[str]) -> Steps:
        """Ask for importance weights; return who bids, by cluster."""
        bids: dict[str, list[str]] = {cluster: [] for cluster in self.clusters}
        found = dict(server.state[self.key]["importance"])
        for update in (yield [Job(client, work=0, returns=(), tag=BID) for client in available]):
            if update.error is None:
                weights = update.extras[self.key]["importance"]
                found[update.client] = weights
                for k in self.bids(weights):
                    bids[self.clusters[k]].append(update.client)
        server.state[self.key] |= {"importance": {c: found[c] for c in server.clients if c in found}}
        return bids

    def bids(self, weights: Tensor) -> list[int]:
        """Return the indices of the clusters that a client bids for.

        Args:
            weights: Its importance weights `v`, `(num_clusters,)`.
        """
        if self.threshold == "mean":
            return [k for k, v in enumerate(weights.tolist()) if v >= float(weights.mean()) - 1e-12]
        return [k for k, v in enumerate(weights.tolist()) if v > self.threshold]

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
                willing.sort(key=lambda client: (-worth.get(client, (0.0, 0))[0], before.get(client, 0)))
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
            if update.error is None and update.steps:
                answers[job.model].append(update)
            else:
                ledger.give_back(job.client, job.model)
        yield []
        return answers if settles else {cluster: [] for cluster in self.clusters}

    # -- server: contributions and tokens ------------------------------------------------------------------------------
    def _settle(self, server: Server, ledger: Ledger, cluster: str, before: State, answers: Sequence[Update]) -> Steps:
        """Compute contributions, refund and reward of one cluster."""
        own, players = server.state[self.key], [update.client for update in answers]
        new = server.models[cluster]
        accuracy_before, accuracy = yield from self._scores(server, [before, new], players)
        found: Shapley = yield from self._contributions(server, before, new, answers, (accuracy_before, accuracy))
        best = own["best"][cluster]
        best = accuracy_before if best is None else best
        if not math.isnan(accuracy) and not math.isnan(best):
            ledger.refund(cluster, refund_share(accuracy, best, self.eta, self.gamma))
        means, counts = dict(own["contribution"][cluster]), dict(own["taken_part"][cluster])
        for client, value in found.values.items():
            mean, rounds = means.get(client, (0.0, 0))
            means[client] = (mean + (value - mean) / (rounds + 1), rounds + 1)
            counts[client] = counts.get(client, 0) + 1
        ledger.reward(cluster, contribution_ranks(found.values, counts))
        for entry in ledger.entries:
            if entry["cluster"] == cluster and entry["client"] in found.values:
                entry |= {"contribution": found.values[str(entry["client"])], "error": found.error}
        server.state[self.key] |= {
            "contribution": {**own["contribution"], cluster: means},
            "taken_part": {**own["taken_part"], cluster: counts},
            "best": {**own["best"], cluster: max(best, accuracy) if not math.isnan(accuracy) else best},
            "evaluations": own["evaluations"] + found.evaluations,
        }

    def _contributions(
        self, server: Server, before: State, new: State, answers: Sequence[Update], known: tuple[float, float]
    ) -> Steps:
        """Return the Shapley values of the answers to this round, or the cosines of their steps."""
        players = [update.client for update in answers]
        if self.utility == "gradient":
            names = [name for name in server.trainable if name in answers[0].state]
            mean = _flat(new, names) - _flat(before, names)
            cosines = [torch.cosine_similarity(_flat(u.state, names) - _flat(before, names), mean, 0) for u in answers]
            return Shapley(dict(zip(players, map(float, cosines), strict=True)), 0, exact=False)
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
            worths = yield from self._scores(
                server, [combine(before, (models[c] for c in players if c in some)) for some in wanted], players
            )

    def _scores(self, server: Server, states: Sequence[State], players: Sequence[str]) -> Steps:
        """Return what each state scores on the players' validation data, or on everybody's; NaN if nobody could tell."""
        if self.utility == "gradient" and not self.ledger:
            return [math.nan] * len(states)
        found = []
        for state in states:
            server.models[TRIAL] = state
            if self.utility == "pooled":
                jobs = [Job(POOLED, model=TRIAL, data="pooled", work=0, returns=(), tag=UTILITY)]
            else:
                jobs = [Job(client, model=TRIAL, work=0, returns=(), tag=UTILITY) for client in players]
            answers = yield jobs
            del server.models[TRIAL]
            values = [update.extras[self.key]["utility"] for update in answers if update.error is None]
            found.append(sum(values) / len(values) if values else math.nan)
        return found

    def on_round_end(self, server: Server) -> None:
        """Write `ledger.csv`."""
        if server.run_dir is not None and self.ledger:
            write_ledger(server.run_dir / "ledger.csv", server.state[self.key]["ledger"])

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
        shares = (weights if weights.sum() > 0 else torch.ones_like(weights)).tolist()
        message.state = combine(states[0], zip(shares, states, strict=True))
        if not self.normalize:
            trained = {name for name, _ in client.module.named_parameters()}
            message.state = {n: v * sum(shares) if n in trained else v for n, v in message.state.items()}
        client.received = dict(message.state)

    def weights(self, client: Client, states: Sequence[State]) -> Tensor:
        """Return the importance weights `v`, `(num_clusters,)`, of the clusters' models for a client's data.

        Raises:
            ValueError: If validation does not log the monitored metric.
        """
        loader = client.loader(self.split)
        split = self.split if loader is not None and len(loader) > 0 else "train"
        if self.importance == "matching":
            losses = torch.stack([client.losses(state, split) for state in states])
            return torch.bincount(losses.argmin(0), minlength=len(states)) / max(losses.shape[1], 1)
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
            update.extras[self.key] = {"utility": self._score(client.evaluate(split="val"))}
        elif client.message.tag == CLASSES:
            update.extras[self.key] = {"f1": class_scores(client, head_path(client.module, self.head), self.key)}

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model of the cluster that a client's last weights favour; `None` for all, and before it has bid."""
        weights = server.state.get(self.key, {}).get("importance", {}).get(client)
        if weights is None or len(server.shared_names()) < len(server.kinds):
            return None
        return server.module_with(server.models[self.clusters[int(weights.argmax())]])

    # -- pre-training --------------------------------------------------------------------------------------------------
    def _pretrain(self, server: Server, available: Sequence[str]) -> Steps:
        """Carry out a round of FedAvg; after the last one, group the clients and start the clusters."""
        last = server.round + 1 == self.pretrain_rounds
        updates = yield [Job(client, keep=last) for client in available]
        yield []
        if not last:
            return
        scores: dict[str, Tensor] = {}
        for update in updates:
            if update.error is None and update.steps:
                server.models[TRIAL] = {**server.model, **update.state}
                (answer,) = yield [Job(POOLED, model=TRIAL, data="pooled", work=0, returns=(), tag=CLASSES)]
                if answer.error is None:
                    scores[update.client] = answer.extras[self.key]["f1"]
        server.models.pop(TRIAL, None)
        groups = groups_by_class_scores(scores, self.num_clusters, server.blueprint.settings.seed)
        server.state[self.key] |= {"groups": {client: self.clusters[group] for client, group in groups.items()}}
        for cluster in self.clusters:
            server.models[cluster] = dict(server.model)


def _flat(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([state[name].double().flatten() for name in names])

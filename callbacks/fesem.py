"""FeSEM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    GLOBAL,
    Facts,
    GradientContext,
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
    Wire,
    address,
    contributors,
)
from fedlightning.callbacks.shared.memberships import Clusters, cluster_module, first_groups, in_client_order
from fedlightning.callbacks.shared.server_models import NO_SERVER_STEP, combine
from fedlightning.layers import expand
from fedlightning.ranges import Counts, NonNegativeFloat, PositiveInt, Range, make_init
from fedlightning.tensors import has_mean, select, ties, to_row

MIDDLE = "mean of the centres"
"""Key of the model from which clients train that are onboarded."""
LATE = "late"
"""Tag of the first visit of a client that comes when there are centres."""


@make_init
class FeSEM(Clusters):
    r"""Multi-centre federated learning: clients' models are clustered by k-means; each trains its cluster's centre.

    Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, "Multi-center federated learning", 2020; journal version in World Wide
    Web, 2022.

    * E-step at the server: `r_i = argmin_k ||W_i - C_k||^2`; a tie goes to the lowest k.
    * M-step: `C_k` is the mean of its members' `W_i`. A centre without members stays.
    * Client: starts from `C_{r_i}`, trains, and sends `W_i`. With `pull`, its loss has `pull/m ||W - C||^2` more, m the
      number of clients.

    No client sees more than one model, which makes it cheaper than IFCA. In round 1 all train from one model, and the
    centres are those of k-means on what they send, since equal models have no clusters. A client whose first visit is
    later, or that is onboarded, trains from the mean of all centres and belongs to the centre that this brings it nearer to
    most (the papers say nothing of newcomers). Its model of that visit is in no centre: it would spoil the mean. With
    `late_start="first"` a late client trains from the first model and belongs to the nearest centre. That is the one that has
    moved least, whoever comes: in two groups of six with four clients a round it took 12 of 80 late clients to the wrong
    centre, where they stayed; from the mean of the centres none went wrong.

    Down and up: one model. State at the server: K centres, who is where; with `stale`, every client's last `W_i`
    (O(N * model)). Deployed: the centre, and the first model before the first visit.

    Distances between models that were initialised alike make sense; there is no matching of neurons.

    Args:
        num_clusters: K. Default 2 (paper: 2 to 4).
        pull: `lambda`. Default 0: the start is the centre already.
        layers: Names or prefixes of the parameters that distances are taken on. `None`: all (paper). The authors' code
            takes the last hidden layer only.
        stale: Absent clients count in both steps with their last models. Default False: participants only.
        steps: Pairs of E- and M-steps in a round. Default 1 (stochastic EM).
        weighting: `"uniform"` (paper) or `"samples"`, within a cluster.
        late_start: What a client trains from whose first visit comes when there are centres: `"centres"` (their mean,
            default) or `"first"` (the first model).

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> rows = torch.tensor([[0.0], [0.2], [5.0]])
        >>> nearest(rows, torch.tensor([[0.1], [4.0]])).tolist()
        [0, 0, 1]
    """

    @property
    def facts(self) -> Facts:
        """Clusters have models of their own; a client is placed by the model that it has trained."""
        why = "finds a client's cluster by the model that it has trained, and has none for one that never trained"
        return Facts(needs=[NO_SERVER_STEP], newcomers=Newcomers(no_model=why, join=True, place=self._place))

    num_clusters: Annotated[int, Range("[1, inf)", "1 is FedAvg."), Counts("clients")] = 2
    pull: NonNegativeFloat = 0.0
    layers: list[str] | None = None
    stale: bool = False
    steps: PositiveInt = 1
    weighting: WeightingName | None = "uniform"
    late_start: Literal["centres", "first"] = "centres"

    def claims(self, role: str) -> bool:
        """Decline the gradient where there is no pull."""
        return super().claims(role) and not (role == "correct_gradient" and self.pull == 0)

    def check(self, setup: Setup) -> None:
        """Refuse callbacks that change one global model, and layers that are not there."""
        trainable = [name for name, kind in setup.kinds.items() if kind == "trainable"]
        if self.layers is not None and not set(expand(self.layers, setup.kinds)) & set(trainable):
            raise ValueError(f"FeSEM got layers={self.layers}, none of which trains. Name some of {trainable}.")

    def wire(self, module: nn.Module) -> Wire:
        """Declare the number of clients down."""
        return Wire(down={"clients": "scalar"})

    # -- server --------------------------------------------------------------------------------------------------------
    def cluster_of(self, server: Server, client: str) -> str:
        """Return the key of the centre that a client trains next; the global model before its first visit."""
        alone = centre(1) if self.num_clusters == 1 and centre(1) in server.models else GLOBAL
        cluster: str = server.state.get(self.key, {}).get("clusters", {}).get(client, alone)
        return cluster

    def plan_round(self, server: Server) -> Plan:
        """Train the centres, then take E- and M-steps on what came back."""
        late = self._late(server)
        jobs = [Job(client, keep=True, tag=LATE if client in late else "") for client in server.participants()]
        answers = {update.client: update for update in contributors((yield jobs))}
        if answers:
            self._cluster(server, answers)

    def _late(self, server: Server) -> set[str]:
        """Return the clients that have no cluster although there are centres, if they start from the centres."""
        if self.late_start == "first" or self.num_clusters == 1 or centre(1) not in server.models:
            return set()
        return {client for client in server.clients if self.cluster_of(server, client) == GLOBAL}

    def _place(self, server: Server, clients: Sequence[str]) -> Placing:
        """Let clients that are onboarded train from the mean of all centres; theirs is the one that they come nearer to most.

        From the first model, one visit would say little in later rounds: the centre that has moved least is the nearest.
        """
        if centre(1) not in server.models:
            raise ValueError(f"{self.key} has no centres yet: no client has trained. Train first.")
        server.models[MIDDLE] = self._middle(server)
        updates = yield [Job(client, model=MIDDLE, keep=True) for client in clients]
        cluster_by_client = self._approached(server, {update.client: update.state for update in updates})
        server_state = server.state[self.key]
        server.state[self.key] = {**server_state, "clusters": {**server_state["clusters"], **cluster_by_client}}
        return cluster_by_client

    def _middle(self, server: Server) -> State:
        """Return the mean of all centres."""
        centres = [server.models[key] for key in self._keys]
        return combine(centres[0], [(1.0, state) for state in centres])

    @property
    def _keys(self) -> list[str]:
        return [centre(k) for k in range(1, self.num_clusters + 1)]

    def _approached(self, server: Server, trained: Mapping[str, State]) -> dict[str, str]:
        """Return the centre that training from the mean of all has brought each client nearer to most."""
        start = self._middle(server)
        before = {key: self._square(server, start, server.models[key]) for key in self._keys}
        cluster_by_client = {}
        for client, state in trained.items():
            whole = {**start, **state}
            nearer = {key: square - self._square(server, whole, server.models[key]) for key, square in before.items()}
            cluster_by_client[client] = list(nearer)[int(ties.first_largest(torch.tensor(list(nearer.values()))))]
        return cluster_by_client

    def _square(self, server: Server, state: State, centre: State) -> float:
        """Return the squared distance of a model from a centre."""
        row = self._row(server, self.aligned(server, state, centre))
        return float((row - self._row(server, centre)).square().sum())

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Average nothing: the M-step does."""
        return {}

    def _cluster(self, server: Server, answers: Mapping[str, Update]) -> None:
        server_state = server.state.get(self.key, {"clusters": {}, "models": {}})
        fresh = {client: (server.weight(update), update.state) for client, update in answers.items()}
        models = {**server_state["models"], **fresh}
        taking_part = models if self.stale else fresh
        order = [client for client in server.clients if client in taking_part]
        states = [{**server.models[self.cluster_of(server, client)], **taking_part[client][1]} for client in order]
        keys = self._keys
        late = self._late(server)
        came = {client: state for client, (_, state) in fresh.items() if client in late}
        approached = self._approached(server, came) if came else {}
        clusters = dict(server_state["clusters"])
        old = set(order) if keys[0] not in server.models or self.num_clusters == 1 else set(clusters)
        if keys[0] not in server.models:
            rows = torch.stack([self._row(server, self.aligned(server, state, server.model)) for state in states])
            groups = first_groups(rows, self.num_clusters, address(server.blueprint.settings.seed, self.key))
            for key, places in zip(keys, groups, strict=True):
                members = [taking_part[order[place]] for place in places]
                server.models[key] = self.mean(server, server.model, members)
        for _ in range(self.steps):
            indices = self.places(server, states, [server.models[key] for key in keys])
            for k, key in enumerate(keys):
                members = [taking_part[c] for c, place in zip(order, indices, strict=True) if place == k and c in old]
                if members:
                    server.models[key] = self.mean(server, server.models[key], members)
            clusters |= {client: keys[k] for client, k in zip(order, indices, strict=True)} | approached
        kept = {client: models[client] for client in server.clients if client in models and client in old}
        ordered = in_client_order(server, clusters)
        server.state[self.key] = {"clusters": ordered, "models": kept if self.stale else {}}

    def places(self, server: Server, states: Sequence[State], centres: Sequence[State]) -> list[int]:
        """Return for each model the index of the nearest centre, the lowest of several (E-step).

        Args:
            server: The server.
            states: The clients' models.
            centres: The centres.
        """
        rows = torch.stack([self._row(server, state) for state in states])
        nearest_places: list[int] = nearest(rows, torch.stack([self._row(server, state) for state in centres])).tolist()
        return nearest_places

    def mean(self, server: Server, old: State, members: Sequence[tuple[float, State]]) -> State:
        """Return a centre: the mean of its members' models, by their weights (M-step).

        Args:
            server: The server.
            old: The centre before; entries that do not travel stay as they are there.
            members: Weight and model of each member; integers are the first one's.
        """
        travelling = {name: value for name, value in old.items() if any(name in state for _, state in members)}
        integers = {name: value for name, value in members[0][1].items() if not has_mean(value)}
        mean = combine(travelling, [(n, self.aligned(server, state, old)) for n, state in members])
        return {**old, **mean, **integers}

    def aligned(self, server: Server, state: State, centre: State) -> State:
        """Return a client's model as it is compared with a centre and averaged into it: as it is."""
        return state

    def _row(self, server: Server, state: State) -> Tensor:
        """Return the parameters that distances are taken on, as float64 numbers."""
        chosen = set(server.trainable) if self.layers is None else set(expand(self.layers, server.kinds))
        names = [name for name in server.trainable if name in chosen and name in set(server.returned_names())]
        if not names:
            raise ValueError(
                f"FeSEM compares clients by layers={self.layers}, none of which travels. Name layers that are not kept "
                "by the clients."
            )
        return to_row(state, names)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the client's own centre."""
        if job.tag == LATE:
            message.state = select(self._middle(server), message.state)
        elif job.model == GLOBAL:  # else its centre is looked for
            message.state = select(server.models[self.cluster_of(server, job.client)], message.state)
        if self.pull:
            message.extras[self.key] = {"clients": len(server.clients)}

    # -- client --------------------------------------------------------------------------------------------------------
    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Add the gradient of `pull/m ||W - C||^2`."""
        if name not in ctx.anchor:
            return gradient
        number = ctx.payload["clients"]
        return gradient + 2.0 * self.pull / number * (parameter - ctx.anchor[name]).to(gradient.dtype)

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the centre of a client's cluster; `None` for all, and before its first visit."""
        cluster = GLOBAL if client is None else self.cluster_of(server, client)
        return cluster_module(server, None if cluster == GLOBAL else cluster)


def centre(k: int) -> str:
    """Return the server's name of centre k, from 1."""
    return f"centre {k}"


def nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """Return for each row the index of the nearest centre, the lowest of several; shape `(rows,)`."""
    squares = torch.stack([(rows - centre).square().sum(1) for centre in centres], dim=1)
    return ties.first_least(squares, 1, floor=float(ties.CLOSE * centres.norm(dim=1).max()) ** 2)

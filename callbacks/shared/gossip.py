"""Base of methods in which clients talk to their neighbours and there is no server."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedlightning.algorithm import (
    Change,
    Decentralised,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Server,
    Setup,
    State,
    Update,
)
from fedlightning.ranges import Init, needs
from fedlightning.tensors import WeightedMean, narrow, select, widen
from fedlightning.topology import MixingWeights, Topology, contraction, make_graph, mixing_weights, remove_nodes

NO_SERVER = Need(
    "has no server: clients talk to their neighbours",
    (*("plan_round", "denominator", "server_step", "on_reduced", "reduce", "model_of", "place"), "wire"),
)
"""Nothing else may do the work of a server: plan, combine, keep several models, or tell clients something."""
WHOLE_MODELS = Need("mixes whole models of neighbours, of which each client's own is one", (Change.START, Change.PARTS))


def of_a_random_graph(init: Init) -> Init:
    """Declare above an `__init__` that the options of a random graph need one."""
    for name in ("edge_probability", "graph_seed"):
        why = "other graphs are not drawn. Set topology='erdos_renyi', or leave it out."
        init = needs(name, "topology", value="erdos_renyi", why=why)(init)
    return init


_MATRICES: WeakKeyDictionary[Gossip, tuple[Any, Any, Tensor]] = WeakKeyDictionary()
"""The weights that each callback has made, for which clients and out of which options: every message asks for them."""


class Gossip(Decentralised):
    """Base of methods in which every client is a node with a model of its own, and mixes it with its neighbours' models.

    The simulation keeps the nodes' models in ``server.state[key]["models"]``, in client order (O(N * model) memory),
    and sends each node its own; what counts as traffic is what would go over the links: each node's model to each
    neighbour, once a mixing, as bytes up (nothing comes down). The server's model is the consensus average ``(1/n)
    sum_i x_i``: it is scored at stage G and takes no part in training.

    A node that is away or fails keeps its model; its links are down, and each end keeps their weight for itself
    (:func:`~fedlightning.topology.remove_nodes`), so that the mean over all nodes stays as it is.

    Entries that travel are mixed in float64: trainable parameters and float buffers. Integers are the node's own.
    """

    weighting = "uniform"
    topology: Topology
    weights: MixingWeights
    edge_probability: float
    graph_seed: int
    mixings: int = 1
    loop = "Synchronous"
    """The loop that it runs in."""

    @property
    def facts(self) -> Facts:
        """There is no server, and models are mixed whole; clients that join begin at the consensus average."""
        return Facts(needs=[NO_SERVER, WHOLE_MODELS], newcomers=Newcomers(join=self._join))

    def check(self, setup: Setup) -> None:
        """Make the graph and its weights once, warn of one that falls apart, and refuse what needs a server."""
        name = self.key
        if setup.run.loop != self.loop:
            raise ValueError(
                f"{name} runs in rounds by the loop {self.loop}, and trainer.loop is {setup.run.loop}. Set it to "
                f"{self.loop} (docs/explanation/no_server.md)."
            )
        final = [other for other in setup.callbacks if other.claims("final_jobs") and other.claims("on_broadcast")]
        if final and any(Change.GLOBAL_SELECTION in other.facts.changes for other in setup.callbacks):
            raise ValueError(
                f"{final[0].key} adapts the model that GlobalCheckpoint selects, and with {name} that is the consensus "
                "average, which no client holds. Remove GlobalCheckpoint: then each client adapts its own model."
            )
        graph = make_graph(
            self.topology, setup.run.clients, edge_probability=self.edge_probability, seed=self.graph_seed
        )
        matrix = mixing_weights(self.weights, graph)
        factor = contraction(matrix)
        if len(matrix) > 1 and factor > 1.0 - 1e-9:
            parts = "is not connected" if _parts(matrix) > 1 else "only swaps models"
            setup.warn(
                f"{name}: this topology with these weights {parts}, so the clients' models never come together (the "
                f"second-largest absolute eigenvalue is 1). Connect all clients, or accept that parts train alone."
            )

    # -- the graph -----------------------------------------------------------------------------------------------------
    def matrix(self, server: Server) -> Tensor:
        """Return the weights of one mixing, nodes in client order."""
        graph_key = (tuple(server.clients), self.edge_probability, self.graph_seed)
        options = (self.topology, self.weights)
        cached = _MATRICES.get(self)
        if cached is None or cached[0] != graph_key or any(a is not b for a, b in zip(cached[1], options, strict=True)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # check() has given them
                graph = make_graph(
                    self.topology, server.clients, edge_probability=self.edge_probability, seed=self.graph_seed
                )
                cached = _MATRICES[self] = (graph_key, options, mixing_weights(self.weights, graph))
        return cached[2]

    def neighbours(self, server: Server, client: str) -> list[str]:
        """Return the clients with which a client exchanges models: those with a weight."""
        row = self.matrix(server)[server.clients.index(client)].tolist()
        return [other for other, weight in zip(server.clients, row, strict=True) if weight and other != client]

    # -- the models ----------------------------------------------------------------------------------------------------
    def models(self, server: Server) -> dict[str, State]:
        """Return each node's model ``x_i``, in client order; ``w^0`` before the first mixing."""
        stored: dict[str, State] = server.state.get(self.key, {}).get("models", {})
        return {client: stored.get(client, server.model) for client in server.clients}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Give a node its own model, and say over how many links its answer goes. Others get the consensus average."""
        if job.client in server.num_samples:
            node_model = self.models(server)[job.client]
            message.state = {name: node_model.get(name, value) for name, value in message.state.items()}
            message.links = self.mixings * len(self.neighbours(server, job.client))

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Mix the models of those who came; return the consensus average."""
        before = self.models(server)
        sent = {update.client: update.state for update in updates if update.state}
        after = {client: {**before[client], **sent.get(client, {})} for client in server.clients}
        absent: dict[tuple[int, ...], list[str]] = {}  # who did not send which entries: a link of such an entry is down
        for name in {name: None for state in sent.values() for name in state}:
            away = [place for place, client in enumerate(server.clients) if name not in sent.get(client, {})]
            absent.setdefault(tuple(away), []).append(name)
        models = {client: dict(state) for client, state in after.items()}
        for gone, names in absent.items():
            matrix = torch.linalg.matrix_power(remove_nodes(self.matrix(server), gone), self.mixings)
            moving = [name for name in names if server.kinds[name] in ("trainable", "float_buffer")]
            mixed_entries = self.mix(server, matrix, moving, list(before.values()), list(after.values()))
            for client, node_entries in zip(server.clients, mixed_entries, strict=True):
                models[client] |= node_entries
        mean = WeightedMean()
        for state in models.values():
            mean.add({name: state[name] for names in absent.values() for name in names}, 1.0)
        server.state[self.key] = {**server.state.get(self.key, {}), "models": models}
        return mean.result()

    def mix(
        self, server: Server, matrix: Tensor, names: Sequence[str], before: Sequence[State], after: Sequence[State]
    ) -> list[State]:
        """Return every node's new entries: ``x_i = sum_j W_ij y_j``, train first, then mix."""
        return mixed(matrix, after, names)

    def _join(self, server: Server, clients: Sequence[str]) -> None:
        """Let clients that join begin at the consensus average, with the links that the topology gives them."""
        self.matrix(server)
        stored = server.state.get(self.key, {}).get("models")
        if stored:
            stored_model = next(iter(stored.values()))
            joined = {client: select(server.model, stored_model) for client in clients}
            server.state[self.key] = {**server.state[self.key], "models": {**stored, **joined}}


def mixed(
    matrix: Tensor,
    models: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    added: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = (),
) -> list[State]:
    """Return ``sum_j W_ij y_j`` for every i, summed in float64, each entry in its own dtype.

    Example:
        >>> half = torch.full((2, 2), 0.5, dtype=torch.float64)
        >>> mixed(half, [{"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}], ["w"])
        [{'w': tensor([3.])}, {'w': tensor([3.])}]
    """
    mixed_states: list[State] = [{} for _ in matrix]
    dense = int(matrix.count_nonzero()) > 0.25 * matrix.numel()
    for name in names:
        stacked = torch.stack([widen(state[name].detach()).flatten() for state in models])
        weights = matrix.to(stacked.dtype)
        rows = weights @ stacked if dense else torch.stack([row[row != 0] @ stacked[row != 0] for row in weights])
        if added:
            rows = rows + torch.stack([(widen(end[name]) - widen(start[name])).flatten() for end, start in added])
        for node_state, row in zip(mixed_states, rows, strict=True):
            node_state[name] = narrow(row, models[0][name])
    return mixed_states


def _parts(matrix: Tensor) -> int:
    """Return into how many parts the weights' links fall."""
    reach = (matrix != 0).to(torch.float64)
    for _ in range(len(matrix).bit_length()):
        reach = ((reach @ reach) != 0).to(torch.float64)
    return len({tuple(row) for row in reach.tolist()})

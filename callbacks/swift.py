"""SWIFT."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedlightning.algorithm import Facts, Need, Server, State, Update, requires
from fedlightning.callbacks.shared.gossip import Gossip, mixed, of_a_random_graph
from fedlightning.ranges import NonNegativeInt, make_init
from fedlightning.tensors import has_mean, narrow, widen
from fedlightning.topology import MixingWeights, Topology

OWN_PACE = Need(
    "lets every client take step after step at its own pace",
    ("on_job", "participants"),
    "say by the clock of the loop when clients are there",
)


@of_a_random_graph
@make_init
class SWIFT(Gossip):
    """Wait-free decentralised SGD: every client at its own pace, with the latest models that it has of its neighbours.

    Bornstein, Rabbani, Wang, Bedi, Huang, "SWIFT: rapid decentralized federated learning via wait-free model
    communication", ICLR 2023.

    Client i, in its c-th optimizer step (c from 1):

    1. sends ``x_i`` to its neighbours, and does not wait;
    2. takes the gradient ``g_i`` of a batch at ``x_i``;
    3. if c is in C_s: ``x_i <- w_ii x_i + sum_j w_ij x_j`` with the latest ``x_j`` that has come from each neighbour;
    4. ``x_i <- x_i - eta g_i``.

    C_s is every (s+1)-th step: C_0 all of them, C_1 every second. Models are sent in every step.

    Set ``local_steps=1`` and ``loop: WaitFree`` (its clock has the clients' speeds). The step is that of the module's
    optimizer, all of it taken at ``x_i`` (weight decay too): what it adds to ``x_i`` is added to the mixture. Momentum
    is kept by ``optimizer_state="keep"``; without it an optimizer that has a memory is refused. Running statistics are
    the mixture of the client's own after the step and its neighbours' as they were sent. With equal speeds, links
    without delay and ``s=0`` this is D-SGD with the same weights.

    * Over every link, both ways: ``x_i``, once a step.
    * State: ``x_i`` and the latest models of its neighbours at each node.
    * Deployed: ``x_i`` (stages L1 and L2). Stage G is the consensus average ``(1/n) sum_i x_i``, which no node holds; its
      running statistics are the means of the nodes'.

    Args:
        topology: Who is whose neighbour; see :class:`DFedAvg`.
        weights: ``"swift"`` (default, paper): the weights of :func:`~fedlightning.topology.swift_weights`, for clients
            of equal influence; or as for :class:`DFedAvg`.
        edge_probability: For ``"erdos_renyi"``.
        graph_seed: For ``"erdos_renyi"``: the graph does not change with the run's seed.
        s: Steps without an average between two with one. Default 0 (paper: 0 and 1).
        fresh_only: The memory-saving form: only models that have come since the client's last average count, and the
            weight of the others goes to its own. Default False: the last model of each neighbour, however old.

    Raises:
        ValueError: If ``s`` is negative.

    Example:
        >>> from fedlightning.callbacks import SWIFT
        >>> [SWIFT(s=1).averages(step) for step in (1, 2, 3, 4)]
        [False, True, False, True]
    """

    loop = "WaitFree"

    topology: Topology = "ring"
    weights: MixingWeights = "swift"
    edge_probability: float = 0.5
    graph_seed: int = 0
    s: NonNegativeInt = 0
    fresh_only: bool = False

    @property
    def facts(self) -> Facts:
        """Every client takes step after step at its own pace."""
        steps = requires.LocalSteps("exchanges models in every optimizer step", "Set local_steps=1.", 1)
        memory = requires.LastingMemory("visits a client for one step at a time")
        return super().facts.extend(needs=[OWN_PACE], requires=[steps, memory])

    def averages(self, step: int) -> bool:
        """Return whether a client averages in its c-th step, c from 1."""
        return step % (self.s + 1) == 0

    def steps(self, server: Server) -> Mapping[str, int]:
        """Return how many steps each client has taken."""
        taken: dict[str, int] = server.state.get(self.key, {}).get("steps", {})
        return {client: taken.get(client, 0) for client in server.clients}

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Take in the steps that end at one time: each client averages what it has heard; return the consensus average."""
        models, steps, matrix = self.models(server), dict(self.steps(server)), self.matrix(server)
        after, seen = dict(models), dict(server.state.get(self.key, {}).get("seen", {}))
        for update in updates:
            client, place = update.client, server.clients.index(update.client)
            x, y = models[client], {**models[client], **update.state}
            steps[client] += 1
            after[client] = y
            if self.averages(steps[client]):
                heard = server.clock.neighbour_models.get(client, {})
                if self.fresh_only:
                    old = seen.get(client, {})
                    heard = {other: sent for other, sent in heard.items() if sent[0] > old.get(other, -1)}
                    seen[client] = {**old, **{other: step for other, (step, _) in heard.items()}}
                row = dict(zip(server.clients, matrix[place].tolist(), strict=True))
                others = [(row[other], heard[other][1]) for other in server.clients if other in heard and row[other]]
                after[client] = {**y, **_averaged(server, others, x, y, list(update.state))}
        kept = {"seen": seen} if self.fresh_only else {}
        total = _total(
            server.state.get(self.key, {}).get("total"), models, after, [update.client for update in updates]
        )
        server.state[self.key] = {"models": after, "steps": steps, "total": total} | kept
        sent = {name for update in updates for name in update.state}
        first = after[server.clients[0]]
        return {
            name: narrow(total[name] / len(after), first[name]) if name in total else first[name].clone()
            for name in first
            if name in sent
        }

    def on_round_end(self, server: Server) -> None:
        """Forget the sum of the models: each round adds it up anew, so that no rounding stays."""
        server.state.get(self.key, {}).pop("total", None)


def _total(total: State | None, before: Mapping[str, State], after: Mapping[str, State], moved: list[str]) -> State:
    """Return the sum of all clients' models in float64, integers left out: the last sum, and what has moved since."""
    floats = [name for name, value in next(iter(after.values())).items() if has_mean(value)]
    if total is None:
        return {name: torch.stack([widen(state[name]) for state in after.values()]).sum(0) for name in floats}
    return {
        name: total[name] + sum(widen(after[client][name]) - widen(before[client][name]) for client in moved)
        for name in floats
    }


def _averaged(server: Server, others: list[tuple[float, State]], x: State, y: State, names: list[str]) -> State:
    """Return ``w_ii x_i + sum_j w_ij x_j + (y_i - x_i)`` of parameters, and the same mixture of statistics after the step."""
    theirs = [weight for weight, _ in others]
    states = [state for _, state in others]
    weights = torch.tensor([[1.0 - sum(theirs), *theirs]], dtype=torch.float64)
    parameters = [name for name in names if server.kinds[name] == "trainable"]
    statistics = [name for name in names if server.kinds[name] == "float_buffer"]
    mixed_parameters = mixed(weights, [x, *states], parameters, added=[(y, x)])[0]
    return mixed_parameters | mixed(weights, [y, *states], statistics)[0]

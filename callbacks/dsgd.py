"""D-SGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlightning.algorithm import Facts, Server, State, requires
from fedlightning.callbacks.shared.gossip import Gossip, mixed, of_a_random_graph
from fedlightning.ranges import make_init
from fedlightning.topology import MixingWeights, Topology


@of_a_random_graph
@make_init
class DSGD(Gossip):
    """Decentralised SGD: in every round each client takes one step and averages its model with its neighbours'. No server.

    Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform centralized algorithms? A case study for
    decentralized parallel stochastic gradient descent", NeurIPS 2017.

    ``x_i^{t+1} = sum_j W_ij x_j^t - eta g_i(x_i^t)``: the gradient is taken at the node's own model before it is mixed, so
    that both can be done at once. With ``adapt_then_combine`` neighbours average what they have after the step:
    ``x_i^{t+1} = sum_j W_ij (x_j^t - eta g_j(x_j^t))``.

    * Over every link, both ways: ``x_i`` (or ``x_i - eta g_i``).
    * State: ``x_i`` at each node.
    * Deployed: ``x_i`` (stages L1 and L2). Stage G is the consensus average ``(1/n) sum_i x_i``, which no node holds; its
      running statistics are the means of the nodes'.

    Set ``local_steps=1``. The step is that of the module's optimizer, all of it taken at ``x_i^t`` (weight decay too):
    what it adds to ``x_i^t`` is added to the mixture. Running statistics are never extrapolated: they are the mixture of a
    node's own after the step and its neighbours' as they were sent. For momentum set ``optimizer_state="keep"``, else
    it begins anew in every round. A node that is away keeps its model, and each end of a link that is down keeps the
    link's weight for itself.

    Args:
        topology: Who is whose neighbour; see :class:`DFedAvg`.
        weights: With which weights they mix; see :class:`DFedAvg`.
        edge_probability: For ``"erdos_renyi"``.
        graph_seed: For ``"erdos_renyi"``: the graph does not change with the run's seed.
        adapt_then_combine: Average after the step, not beside it.

    Example:
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import DSGD
        >>> DSGD().neighbours(SimpleNamespace(clients=["a", "b", "c", "d"]), "a")
        ['b', 'd']
    """

    topology: Topology = "ring"
    weights: MixingWeights = "metropolis"
    edge_probability: float = 0.5
    graph_seed: int = 0
    adapt_then_combine: bool = False

    @property
    def facts(self) -> Facts:
        """A round is one step."""
        steps = requires.LocalSteps("takes one step per round", "Set local_steps=1, or use DFedAvg or LDSGD.", 1)
        memory = requires.LastingMemory("visits a client for one step at a time", warns=True)
        return super().facts.extend(requires=[steps, memory])

    def mix(
        self, server: Server, matrix: Tensor, names: Sequence[str], before: Sequence[State], after: Sequence[State]
    ) -> list[State]:
        """Return ``sum_j W_ij x_j + (y_i - x_i)`` (of statistics ``W_ii y_i + sum_j W_ij x_j``), or ``sum_j W_ij y_j``.

        Args:
            server: The server.
            matrix: W.
            names: Entries to mix.
            before: The nodes' models ``x_j`` before they trained.
            after: Their models ``y_j``.
        """
        if self.adapt_then_combine:
            return mixed(matrix, after, names)
        parameters = [name for name in names if server.kinds[name] == "trainable"]
        statistics = [name for name in names if name not in parameters]
        states = mixed(matrix, before, parameters, added=[(y, x) for y, x in zip(after, before, strict=True)])
        own_share = torch.diag(matrix.diagonal())  # of its own statistics a node knows those after the step
        both = torch.cat([matrix - own_share, own_share], 1)
        return [state | more for state, more in zip(states, mixed(both, [*before, *after], statistics), strict=True)]

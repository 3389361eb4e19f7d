"""DFedAvg."""

from __future__ import annotations

from typing import Annotated

from fedlightning.callbacks.shared.gossip import Gossip, of_a_random_graph
from fedlightning.ranges import Range, make_init
from fedlightning.topology import MixingWeights, Topology


@of_a_random_graph
@make_init
class DFedAvg(Gossip):
    """Decentralised federated averaging: clients train, then each averages its model with its neighbours'. No server.

    Sun, Li, Wang, "Decentralized federated averaging", IEEE TPAMI 2022.

    In a round every node i

    * trains its own ``x_i`` by E local epochs (or K steps) to ``y_i``;
    * sends ``y_i`` to its neighbours and takes ``x_i = sum_j W_ij y_j``, `mixings` times.

    W is symmetric and doubly stochastic, so the mean of all ``x_i`` is what it would be after one average of all; their
    distance to it shrinks at every mixing by the second-largest absolute eigenvalue of W at least
    (:func:`~fedlightning.topology.contraction`). On a complete graph with weights 1/n this is uniform FedAvg.

    * Over every link, both ways: ``y_i``, once a mixing.
    * State: ``x_i`` at each node.
    * Deployed: ``x_i`` (stages L1 and L2). Stage G is the consensus average ``(1/n) sum_i x_i``, which no node holds; its
      running statistics are the means of the nodes'.

    A node that is away keeps its model, and each end of a link that is down keeps the link's weight for itself. With
    the module's optimizer and momentum this is the paper's DFedAvgM (without quantisation). PD-SGD is DFedAvg with
    ``local_steps``.

    Args:
        topology: Who is whose neighbour: ``"ring"`` (default), ``"torus"``, ``"complete"``, ``"star"`` (around the first
            client), ``"erdos_renyi"``, a ``.csv`` file of edges or a ``.graphml`` file, a list of edges, neighbours by
            client, or an adjacency matrix.
        weights: ``"metropolis"`` (default: ``1 / (1 + max(d_i, d_j))`` on an edge; on a ring all are 1/3),
            ``"uniform"`` (1/n, for a complete graph), ``"swift"``, or a matrix in client order, or a ``.csv`` file of one.
        edge_probability: For ``"erdos_renyi"``.
        graph_seed: For ``"erdos_renyi"``: the graph does not change with the run's seed.
        mixings: How often neighbours average after training. Default 1 (paper).

    Raises:
        ValueError: If ``mixings`` is below 1.

    Example:
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import DFedAvg
        >>> DFedAvg(topology="star").matrix(SimpleNamespace(clients=["hub", "a", "b"]))[1]
        tensor([0.3333, 0.6667, 0.0000], dtype=torch.float64)
    """

    topology: Topology = "ring"
    weights: MixingWeights = "metropolis"
    edge_probability: float = 0.5
    graph_seed: int = 0
    mixings: Annotated[int, Range("[1, inf)", "Use Local for none.")] = 1

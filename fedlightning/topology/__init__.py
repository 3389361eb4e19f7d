"""Who is a neighbour of whom where there is no server, and how much each node listens to each: graphs and mixing weights."""

from fedlightning.topology.graphs import (
    GRAPHS,
    WEIGHTS,
    MixingWeights,
    Topology,
    contraction,
    make_graph,
    metropolis_weights,
    mixing_weights,
    remove_nodes,
    swift_weights,
)

__all__ = [
    "GRAPHS",
    "MixingWeights",
    "Topology",
    "WEIGHTS",
    "contraction",
    "make_graph",
    "metropolis_weights",
    "mixing_weights",
    "swift_weights",
    "remove_nodes",
]

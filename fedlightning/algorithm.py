"""Everything that an algorithm is written with, in one import.

>>> from fedlightning.algorithm import Client, FederatedCallback, Message, Server, State, Update

The contract and its words (:mod:`fedlightning.hooks`), the two roles, what travels, arithmetic over named tensors, a
module as layers, addressed randomness, and losses and gradients that leave no trace. `docs/write-an-algorithm.md` takes one
method from its pseudocode to a checked callback. Wrapped modules are in :mod:`fedlightning.wrappers`.
"""

from fedlightning.blueprint.optimizers import optimizers_in
from fedlightning.compat.attached import detached_copy
from fedlightning.datamodules.public import PairedBatch
from fedlightning.errors import warn
from fedlightning.federation.server import Server
from fedlightning.hooks import (
    NEWCOMER,
    POOLED,
    WEIGHTINGS,
    Arrivals,
    FederatedCallback,
    GradientContext,
    Job,
    Phase,
    Placing,
    Plan,
    Setup,
    Stage,
    Weighting,
    WeightingName,
)
from fedlightning.layers import (
    ForwardOrder,
    Layer,
    as_names,
    expand,
    head_names,
    ordered_layers,
    partition,
    pieces,
    state_names,
)
from fedlightning.messages import GLOBAL, Extra, Message, Update, Wire
from fedlightning.run.round_table import add_round
from fedlightning.seeding import address, generator, isolated
from fedlightning.tensors import (
    State,
    WeightedMean,
    add,
    clone,
    distance,
    entry_kinds,
    equal,
    first_nonfinite,
    interpolate,
    load_state,
    module_state,
    select,
    subtract,
    ties,
    zeros_like,
)
from fedlightning.topology import (
    MixingWeights,
    Topology,
    contraction,
    make_graph,
    mixing_weights,
    without,
)
from fedlightning.visit import probes
from fedlightning.visit.client import Client
from fedlightning.visit.probes import NoLossError, move_batch, training_loss

__all__ = [
    # the contract
    "Extra",
    "FederatedCallback",
    "Arrivals",
    "Setup",
    "Job",
    "Placing",
    "Plan",
    "Phase",
    "GradientContext",
    "Stage",
    "GLOBAL",
    "NEWCOMER",
    "POOLED",
    "WEIGHTINGS",
    "Weighting",
    "WeightingName",
    # the two roles, and what travels between them
    "Server",
    "Client",
    "Message",
    "Update",
    "Wire",
    # named tensors
    "State",
    "WeightedMean",
    "add",
    "add_round",
    "clone",
    "distance",
    "entry_kinds",
    "equal",
    "first_nonfinite",
    "interpolate",
    "load_state",
    "module_state",
    "select",
    "subtract",
    "ties",
    "zeros_like",
    # a module as layers
    "ForwardOrder",
    "Layer",
    "as_names",
    "expand",
    "head_names",
    "ordered_layers",
    "partition",
    "pieces",
    "state_names",
    # randomness
    "address",
    "generator",
    "isolated",
    # looks at a module that leave no trace
    "NoLossError",
    "PairedBatch",
    "move_batch",
    "probes",
    "training_loss",
    # neighbours, where there is no server
    "MixingWeights",
    "Topology",
    "contraction",
    "make_graph",
    "mixing_weights",
    "without",
    # small things
    "detached_copy",
    "optimizers_in",
    "warn",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)

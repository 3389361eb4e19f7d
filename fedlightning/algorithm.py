"""The contract that an algorithm is written to, in one import.

>>> from fedlightning.algorithm import Client, FederatedCallback, Message, Server, State, Update

The contract and its words (:mod:`fedlightning.contract`), the two roles, what travels, addressed randomness, and losses and
gradients that leave no trace. `docs/how-to/write_an_algorithm.md` takes one method from its pseudocode to a checked callback.

Beside it there are ranges of arguments (:mod:`fedlightning.ranges`), arithmetic over named tensors
(:mod:`fedlightning.tensors`), a module as layers (:mod:`fedlightning.layers`), graphs of neighbours
(:mod:`fedlightning.topology`) and wrapped modules (:mod:`fedlightning.wrappers`).
"""

from fedlightning.client import probes
from fedlightning.client.client import Client
from fedlightning.compat import sheets
from fedlightning.compat.lightning_runs import detached_copy
from fedlightning.compat.system import file_name_of
from fedlightning.contract import (
    NEWCOMER,
    POOLED,
    WEIGHTINGS,
    Arrivals,
    AsynchronousMethod,
    Change,
    ClientSelection,
    Cover,
    Decentralised,
    Facts,
    FederatedCallback,
    FirstStep,
    GradientContext,
    Job,
    ModelSelection,
    Need,
    Newcomers,
    OutgoingItem,
    Phase,
    Placing,
    Plan,
    Promise,
    Protection,
    ServerModels,
    Setup,
    Stackable,
    Stage,
    SubModels,
    SumCodec,
    TrainingData,
    UpdateCodec,
    UpdateInterception,
    WeightingName,
)
from fedlightning.contract import capabilities as facts
from fedlightning.contract import requirements as requires
from fedlightning.contract.messages import GLOBAL, Extra, Message, Update, Wire, contributors
from fedlightning.errors import missing_package, warn
from fedlightning.seeding import address, generator, isolated
from fedlightning.server.server import Server
from fedlightning.storage.files import add_round, write_secret, write_text_atomically
from fedlightning.tensors import State

__all__ = [
    # the contract
    "Extra",
    "FederatedCallback",
    "FirstStep",
    "Facts",
    "Change",
    "Need",
    "Newcomers",
    "facts",
    "requires",
    # kinds of callbacks
    "AsynchronousMethod",
    "ClientSelection",
    "Decentralised",
    "ModelSelection",
    "Protection",
    "ServerModels",
    "Stackable",
    "SubModels",
    "SumCodec",
    "TrainingData",
    "UpdateCodec",
    "UpdateInterception",
    # words of the contract
    "Arrivals",
    "Setup",
    "Job",
    "Placing",
    "Plan",
    "Phase",
    "GradientContext",
    "Stage",
    "Cover",
    "OutgoingItem",
    "Promise",
    "GLOBAL",
    "NEWCOMER",
    "POOLED",
    "WEIGHTINGS",
    "WeightingName",
    # the two roles, and what travels between them
    "Server",
    "Client",
    "Message",
    "Update",
    "Wire",
    "contributors",
    # named tensors, with `fedlightning.tensors`
    "State",
    # randomness
    "address",
    "generator",
    "isolated",
    # looks at a module that leave no trace
    "probes",
    # small things
    "add_round",
    "detached_copy",
    "file_name_of",
    "missing_package",
    "sheets",
    "warn",
    "write_secret",
    "write_text_atomically",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)

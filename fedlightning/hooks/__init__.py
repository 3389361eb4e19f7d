"""The contract between the core and every algorithm.

`callback.py` is the contract itself, :class:`FederatedCallback`, and `families.py` its kinds with methods of their own;
`facts.py` is what a callback says of itself, and `composition.py` which ones cannot work together; `words.py` holds what
methods are given and give back; `callback_list.py` runs events and finds who answers a role.
"""

from fedlightning.hooks import facts
from fedlightning.hooks.callback import FederatedCallback
from fedlightning.hooks.callback_list import ROLES, CallbackList
from fedlightning.hooks.facts import Change, Facts, Need, Newcomers
from fedlightning.hooks.families import (
    AsynchronousMethod,
    ClientSelection,
    Decentralised,
    ModelSelection,
    Protection,
    ServerModels,
    Stackable,
    SubModels,
    SumCodec,
    TrainingData,
    UpdateCodec,
    UpdateInterception,
)
from fedlightning.hooks.outgoing import Cover, Kind, Outgoing
from fedlightning.hooks.words import (
    NEWCOMER,
    POOLED,
    WEIGHTINGS,
    Arrivals,
    FirstStep,
    GradientContext,
    Job,
    Owner,
    Phase,
    Placing,
    Plan,
    Setup,
    Stage,
    WeightingName,
)

__all__ = [
    "facts",
    "NEWCOMER",
    "POOLED",
    "ROLES",
    "WEIGHTINGS",
    "Arrivals",
    "AsynchronousMethod",
    "Change",
    "ClientSelection",
    "Cover",
    "Decentralised",
    "Facts",
    "ModelSelection",
    "Need",
    "Newcomers",
    "Kind",
    "Outgoing",
    "Protection",
    "ServerModels",
    "Stackable",
    "SubModels",
    "TrainingData",
    "SumCodec",
    "UpdateCodec",
    "UpdateInterception",
    "CallbackList",
    "FederatedCallback",
    "FirstStep",
    "GradientContext",
    "Job",
    "Owner",
    "Phase",
    "Placing",
    "Plan",
    "Setup",
    "Stage",
    "WeightingName",
]

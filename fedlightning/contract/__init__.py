"""The contract between the core and every algorithm.

`callback.py` is the contract itself, :class:`FederatedCallback`, and `families.py` its kinds with methods of their own;
`capabilities.py` is what a callback says of itself, `requirements.py` what it requires of the federation, which `setup.py`
describes; `jobs.py` holds what methods are given and give back; `callback_list.py` runs events and finds who answers a role.
"""

from fedlightning.contract import capabilities as facts
from fedlightning.contract import requirements as requires
from fedlightning.contract.callback import FederatedCallback
from fedlightning.contract.callback_list import ROLES, CallbackList
from fedlightning.contract.capabilities import ALTERING, Change, Facts, Need, Newcomers
from fedlightning.contract.families import (
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
from fedlightning.contract.jobs import (
    NEWCOMER,
    POOLED,
    WEIGHTINGS,
    Arrivals,
    GradientContext,
    Job,
    Owner,
    Phase,
    Placing,
    Plan,
    Stage,
    WeightingName,
)
from fedlightning.contract.outgoing_items import Cover, Kind, OutgoingItem, Promise
from fedlightning.contract.requirements import Requirement
from fedlightning.contract.setup import DataView, FirstStep, PublicDataView, RunTerms, Setup

__all__ = [
    "facts",
    "ALTERING",
    "requires",
    "NEWCOMER",
    "POOLED",
    "ROLES",
    "WEIGHTINGS",
    "Arrivals",
    "AsynchronousMethod",
    "Change",
    "ClientSelection",
    "Cover",
    "DataView",
    "Decentralised",
    "Facts",
    "ModelSelection",
    "Need",
    "Newcomers",
    "Kind",
    "OutgoingItem",
    "Promise",
    "Protection",
    "PublicDataView",
    "Requirement",
    "RunTerms",
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

"""Arithmetic on model states: dictionaries from `state_dict` names to tensors.

A *state* is what clients and the server exchange. The functions here never use the code of a module. All they need to
know about one is the kind of each entry (`entry_kinds`).
"""

from fedlightning.tensors import ties
from fedlightning.tensors.arithmetic import (
    WeightedMean,
    add,
    add_row,
    as_reals,
    clone,
    dense,
    distance,
    equal,
    first_nonfinite,
    has_mean,
    interpolate,
    is_same,
    momentum_step,
    narrow,
    select,
    subtract,
    to_row,
    widen,
    zeros_like,
)
from fedlightning.tensors.entries import (
    EntryKind,
    State,
    entry_kinds,
    load_state,
    module_state,
    state_digest,
    tied_names,
)
from fedlightning.tensors.memory import pack, side_by_side

__all__ = [
    "EntryKind",
    "State",
    "WeightedMean",
    "add",
    "add_row",
    "as_reals",
    "clone",
    "dense",
    "distance",
    "entry_kinds",
    "equal",
    "first_nonfinite",
    "has_mean",
    "interpolate",
    "is_same",
    "load_state",
    "module_state",
    "momentum_step",
    "narrow",
    "pack",
    "select",
    "side_by_side",
    "state_digest",
    "subtract",
    "tied_names",
    "ties",
    "to_row",
    "widen",
    "zeros_like",
]

"""Arithmetic on states, name by name: copies, sums, differences, mixtures, distances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedlightning.tensors.memory import side_by_side
from fedlightning.tensors.modules import State
from fedlightning.tensors.reals import as_reals, has_mean, widen


def select(state: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """Return the entries of `state` that are in `names`, in the state's order.

    Args:
        state: Any state.
        names: Entries to keep. Names that the state does not have are ignored.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import select
        >>> list(select({"a": torch.ones(1), "b": torch.ones(1)}, ["b", "c"]))
        ['b']
    """
    chosen = set(names)
    return {name: value for name, value in state.items() if name in chosen}


def clone(state: Mapping[str, Tensor], device: torch.device | str | None = None) -> State:
    """Return a copy of every tensor, detached.

    Args:
        state: Any state.
        device: Device of the copies. `None` keeps each tensor on its own.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import clone
        >>> state = {"w": torch.zeros(2)}
        >>> copy = clone(state)
        >>> _ = copy["w"].add_(1)
        >>> state["w"], copy["w"]
        (tensor([0., 0.]), tensor([1., 1.]))
    """
    return {name: value.detach().to(device=device or value.device, copy=True) for name, value in state.items()}


def zeros_like(state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> State:
    """Return zeros in the shape of each entry, in float32 or wider.

    Accumulators and control variates are kept in that precision even if the model is not.

    Args:
        state: Any state.
        names: Entries to keep. `None` keeps all.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import zeros_like
        >>> zeros_like({"w": torch.ones(2, dtype=torch.bfloat16)})
        {'w': tensor([0., 0.])}
    """
    chosen = set(state if names is None else names)
    return {
        name: torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
        for name, value in state.items()
        if name in chosen
    }


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> State:
    """Return `a - b` for every name of `b`.

    Args:
        a: A state with at least the names of `b`.
        b: The state to subtract.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import subtract
        >>> subtract({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
        {'w': tensor([2.])}
    """
    return {name: a[name] - value for name, value in b.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> State:
    """Return `a + alpha * b` for every name of `b`; entries only in `a` are passed through.

    Args:
        a: Any state. The result has its names.
        b: The state to add.
        alpha: Factor of `b`.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import add
        >>> add({"w": torch.tensor([1.0]), "n": torch.tensor(7)}, {"w": torch.tensor([2.0])}, alpha=0.5)
        {'w': tensor([2.]), 'n': tensor(7)}
    """
    return {name: torch.add(value, b[name], alpha=alpha) if name in b else value for name, value in a.items()}


def interpolate(a: Mapping[str, Tensor], b: Mapping[str, Tensor], weight: float) -> State:
    """Return `weight * a + (1 - weight) * b` for every name of `b`: exactly `b` at 0 and exactly `a` at 1.

    Integer entries cannot be mixed and are taken from `b`.

    Args:
        a: A state with at least the names of `b`.
        b: The other state. The result is on its devices and in its dtypes.
        weight: Share of `a`.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import interpolate
        >>> interpolate({"w": torch.tensor([4.0])}, {"w": torch.tensor([0.0])}, weight=0.25)
        {'w': tensor([1.])}
    """
    mixed: State = {}
    for name, value in b.items():
        if not has_mean(value) or weight == 0.0:
            mixed[name] = value
        elif weight == 1.0:
            mixed[name] = a[name]
        else:
            mixed[name] = (weight * a[name].to(value.device) + (1.0 - weight) * value).to(value.dtype)
    return mixed


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance of two states over the names of `b`, accumulated in float64.

    Args:
        a: A state with at least the names of `b`.
        b: The other state.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import distance
        >>> distance({"v": torch.tensor([3.0]), "w": torch.tensor([4.0])}, {"v": torch.zeros(1), "w": torch.zeros(1)})
        5.0
    """
    return sum(float((widen(a[name]) - widen(value)).square().sum()) for name, value in b.items()) ** 0.5


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return True if both states hold the same names with the same values, bit for bit.

    Args:
        a: Any state.
        b: The other state. The order of names does not matter.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import equal
        >>> equal({"w": torch.ones(2)}, {"w": torch.ones(2)}), equal({"w": torch.ones(2)}, {})
        (True, False)
    """
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def first_nonfinite(state: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity, or `None`.

    Args:
        state: Any state. Integer entries are not checked.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import first_nonfinite
        >>> first_nonfinite({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
        'b'
    """
    floats = {name: as_reals(value) for name, value in state.items() if has_mean(value)}
    whole = side_by_side(list(floats.values())) if len(floats) > 1 else None
    if whole is not None and math.isfinite(whole.sum()):
        return None
    for name, value in floats.items():
        if math.isfinite(value.sum()):  # a NaN or infinity would make the sum non-finite
            continue
        if not bool(torch.isfinite(value).all()):  # a sum of finite values can overflow
            return name
    return None

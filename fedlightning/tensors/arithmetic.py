"""Arithmetic on states, name by name: copies, sums, differences, mixtures, distances, weighted means.

It is done on the real numbers of an entry.

A complex entry is as many pairs of real numbers, as torch's optimizers see it: lengths and products, an element's sign or
rank, its second moment and its noise are those of the real and of the imaginary parts. Sums are accumulated in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlightning.tensors.entries import State
from fedlightning.tensors.memory import side_by_side

NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes narrower than float64, the dtype of the sums."""
WIDE = (torch.float64, torch.complex128)
"""Dtypes of the sums."""


class WeightedMean:
    r"""Streaming weighted mean of states: :math:`\sum_i n_i w_i / \sum_i n_i` per name.

    Terms are added in float64 in the order of the calls, and the sum is divided once. The mean of a single state and
    the mean of identical states are therefore exact. A name that only some states hold is averaged over those. Integer
    entries are never averaged: the value of the first state is taken. Memory: one accumulator for any number of states.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import WeightedMean
        >>> mean = WeightedMean()
        >>> mean.add({"w": torch.tensor([0.0])}, weight=30)
        >>> mean.add({"w": torch.tensor([4.0])}, weight=10)
        >>> mean.result()
        {'w': tensor([1.])}
    """

    def __init__(self) -> None:
        self._sums: State = {}
        self._totals: dict[str, float] = {}
        self._like: State = {}
        self._identical: dict[str, bool] = {}
        self._whole: Tensor | None = None  # all sums as one tensor, if they are adjacent in memory
        self._shapes: dict[str, torch.Size] = {}  # of those sums

    def add(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Add a state to the mean.

        Args:
            state: Any state.
            weight: Its weight. A weight of zero adds nothing.

        Raises:
            ValueError: If the weight is negative or not finite, or the shape of an entry differs from earlier states.
        """
        if not 0.0 <= weight < float("inf"):
            raise ValueError(f"A weight of {weight} cannot be averaged. Weights must be finite and not negative.")
        if weight == 0.0:
            return
        done = self._added_at_once(state, weight)
        for name, value in state.items():
            if name in done:
                continue
            value = value.detach()
            if name not in self._like:
                self._like[name] = _first(value)
                self._totals[name] = weight
                self._identical[name] = True
                if value.is_floating_point():
                    self._sums[name] = value.to(torch.float64, copy=True).mul_(weight)
                elif value.is_complex():
                    self._sums[name] = value.to(torch.complex128, copy=True).mul_(weight)
                continue
            first = self._like[name]
            if first.shape != value.shape:
                raise ValueError(
                    f"Entry '{name}' has shape {tuple(value.shape)} in one update and {tuple(first.shape)} in another. "
                    "Clients of one model must send the same shapes."
                )
            self._totals[name] += weight
            if name in self._sums:
                value = value.to(self._sums[name].device)
                if self._identical[name] and first.dtype in WIDE:
                    self._identical[name] = value.dtype == first.dtype and torch.equal(first, value)
                self._sums[name].add_(value, alpha=weight)

    def _added_at_once(self, state: Mapping[str, Tensor], weight: float) -> Mapping[str, Tensor]:
        """Add the entries that are adjacent in memory, as their sums are, in one operation. Return those entries."""
        dtype = next((value.dtype for value in state.values() if value.dtype in NARROW), None)
        part = {name: value for name, value in state.items() if value.dtype == dtype}
        values = list(part.values())
        whole = side_by_side(values) if values else None
        if whole is None:
            return {}
        if not self._like:
            self._whole = whole.to(torch.float64, copy=True).mul_(weight)
            sums = self._whole.split([value.numel() for value in values])
            self._sums = {name: total.view(part[name].shape) for name, total in zip(part, sums, strict=True)}
            self._like = {name: _first(value) for name, value in part.items()}
            self._shapes = {name: value.shape for name, value in part.items()}
            self._totals, self._identical = dict.fromkeys(part, weight), dict.fromkeys(part, True)
            return part
        if self._whole is None or self._whole.device != whole.device or dtype != next(iter(self._like.values())).dtype:
            return {}
        if list(self._shapes.items()) != [(name, value.shape) for name, value in part.items()]:
            return {}
        self._whole.add_(whole, alpha=weight)
        for name in part:
            self._totals[name] += weight
        return part

    def weight(self, name: str) -> float:
        """Return the sum of the weights of the states that held an entry; 0 if none did."""
        return self._totals.get(name, 0.0)

    def result(self) -> State:
        """Return the mean, each entry in its own dtype; an empty state if nothing was added."""
        mean: State = {}
        for name, first in self._like.items():
            if name not in self._sums or (first.dtype in WIDE and self._identical[name]):
                mean[name] = first.clone()  # n * w / n can round in float64: identical values stay as they are
            else:
                mean[name] = (self._sums[name] / self._totals[name]).to(first.dtype)
        return mean


def _first(value: Tensor) -> Tensor:
    """Return what a mean keeps of the first of its values: the value where it may be the mean, else its shape and dtype."""
    return value.to("meta") if value.dtype in NARROW else value


def has_mean(entry: Tensor) -> bool:
    """Return True if an entry holds floating-point numbers, real or complex; integers and booleans are never averaged.

    Example:
        >>> has_mean(torch.zeros(1, dtype=torch.complex64)), has_mean(torch.zeros(1, dtype=torch.int64))
        (True, False)
    """
    return entry.is_floating_point() or entry.is_complex()


def as_reals(entry: Tensor) -> Tensor:
    """Return an entry, a complex one as a view of shape `(*shape, 2)`: its real and its imaginary parts.

    Example:
        >>> as_reals(torch.tensor([1 + 2j]))
        tensor([[1., 2.]])
        >>> as_reals(torch.tensor([3.0]))
        tensor([3.])
    """
    return torch.view_as_real(entry) if entry.is_complex() else entry


GradientT = TypeVar("GradientT", Tensor, Tensor | None)


def dense(gradient: GradientT) -> GradientT:
    """Return a gradient, a sparse one (`nn.Embedding(sparse=True)`) dense: little of torch's arithmetic takes others.

    Example:
        >>> dense(torch.tensor([0.0, 2.0]).to_sparse())
        tensor([0., 2.])
    """
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()


def widen(entry: Tensor) -> Tensor:
    """Return the real numbers of an entry in float64, or in float32 on Apple's GPUs, which have no float64.

    Those of a complex entry are a copy: torch saves no two views of one memory that have different types.

    Example:
        >>> widen(torch.tensor([1 + 2j]))
        tensor([[1., 2.]], dtype=torch.float64)
    """
    dtype = torch.float32 if entry.device.type == "mps" else torch.float64
    return as_reals(entry).to(dtype, copy=entry.is_complex())


def narrow(numbers: Tensor, like: Tensor) -> Tensor:
    """Return real numbers as an entry: what `widen` made of one, also in another shape, in the shape and dtype of `like`.

    Example:
        >>> narrow(torch.tensor([1.0, 2.0], dtype=torch.float64), torch.zeros(1, dtype=torch.complex64))
        tensor([1.+2.j])
    """
    if like.is_complex():
        numbers = torch.view_as_complex(numbers.reshape(*like.shape, 2).contiguous())
    return numbers.reshape(like.shape).to(like.dtype)


def momentum_step(buffer: Any, gradient: Any, momentum: Any, dampening: Any, nesterov: bool) -> tuple[Any, Any]:
    """Return the step of SGD with momentum, over its learning rate, and the buffer after it.

    The operations are those of torch's SGD in its order, so that the bits of tensors are the same.

    Args:
        buffer: The buffer before the step, which a tensor is changed in place; `None` before the first.
        gradient: A tensor, or numbers in its place.
        momentum: The share of the buffer that stays.
        dampening: The share of the gradient that the buffer does not take, but in the first step.
        nesterov: Whether the step looks ahead.

    Example:
        >>> step, buffer = momentum_step(None, 1.0, 0.5, 0.0, False)
        >>> step, momentum_step(buffer, 1.0, 0.5, 0.0, False)
        (1.0, (1.5, 1.5))
    """
    if isinstance(gradient, Tensor):  # fused operations, whose roundings are others than those of two
        share = 1 - dampening
        buffer = gradient.detach().clone() if buffer is None else buffer.mul_(momentum).add_(gradient, alpha=share)
        return gradient.add(buffer, alpha=momentum) if nesterov else buffer, buffer
    buffer = gradient if buffer is None else momentum * buffer + (1 - dampening) * gradient
    return gradient + momentum * buffer if nesterov else buffer, buffer


def to_row(state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Tensor:
    """Return the real numbers of entries one after another, in float64.

    Args:
        state: Any state.
        names: Entries to take, in this order. `None`: all.

    Example:
        >>> to_row({"a": torch.tensor([1 + 2j]), "b": torch.tensor([[3.0]])})
        tensor([1., 2., 3.], dtype=torch.float64)
    """
    rows = [widen(state[name]).flatten() for name in (state if names is None else names)]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def add_row(state: Mapping[str, Tensor], row: Tensor) -> State:
    """Return entries with the numbers of a row added, as `to_row` has them.

    Example:
        >>> add_row({"a": torch.tensor([1.0]), "b": torch.tensor([0j])}, torch.tensor([1.0, 2.0, 3.0]))
        {'a': tensor([2.]), 'b': tensor([2.+3.j])}
    """
    parts = row.split([as_reals(entry).numel() for entry in state.values()])
    return {
        name: narrow(widen(entry).flatten() + part, entry)
        for (name, entry), part in zip(state.items(), parts, strict=True)
    }


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


def is_same(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type and bits, on whatever device.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import is_same
        >>> is_same(torch.ones(2), torch.ones(2)), is_same(torch.ones(2), torch.ones(2).half())
        (True, False)
    """
    return value.dtype == other.dtype and torch.equal(value.detach().to(other.device), other)


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

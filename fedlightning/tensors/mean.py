"""The weighted mean of states that come one after another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlightning.tensors.memory import side_by_side
from fedlightning.tensors.modules import State

NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes narrower than float64, the dtype of the sums."""


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
                self._like[name] = value
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
                if self._identical[name] and value.dtype in (torch.float64, torch.complex128):
                    self._identical[name] = torch.equal(first, value)
                self._sums[name].add_(value if value.device == first.device else value.to(first.device), alpha=weight)

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
            self._sums = {name: own.view(part[name].shape) for name, own in zip(part, sums, strict=True)}
            self._like, self._shapes = dict(part), {name: value.shape for name, value in part.items()}
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
            if name not in self._sums or (first.dtype in (torch.float64, torch.complex128) and self._identical[name]):
                mean[name] = first.clone()  # n * w / n can round in float64: identical values stay as they are
            else:
                mean[name] = (self._sums[name] / self._totals[name]).to(first.dtype)
        return mean

"""Values that a module logs, and their reduction over an epoch in Lightning's order and precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedlightning.fast.log_rules import STARTS

Value: TypeAlias = Tensor | np.floating[Any]
"""What is kept of a call: a tensor without dimensions, or a number that was logged at the end of an evaluation."""


NUMBERS: dict[torch.dtype, Callable[[float], np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}
"""Type of a number, by the type in which values are added up."""


def reduce(reduction: str, given: list[Value], sizes: list[Any], start: torch.dtype) -> Value:
    """Return Lightning's running reduction of scalars."""
    if len(given) == 1 and not isinstance(given[0], Tensor):
        return _number_alone(reduction, given[0], sizes[0])
    device = next((value.device for value in given if isinstance(value, Tensor)), None)
    values = [as_tensor(value, device) for value in given]
    kinds = {value.dtype for value in values}
    if kinds == {start} and (reduction != "mean" or all(type(size) is int for size in sizes)):
        if len(values) == 1:  # what is logged at the end of an epoch
            return _reduced_alone(reduction, values[0], sizes[0])
        rows = torch.stack(values).cpu().numpy()
        if reduction in ("min", "max"):
            result = (np.minimum if reduction == "min" else np.maximum).reduce(rows)
        else:
            terms = rows * np.array(sizes, dtype=rows.dtype) if reduction == "mean" else rows
            result = np.add.accumulate(terms, dtype=rows.dtype)[-1] + rows.dtype.type(0)  # never -0.0
            if reduction == "mean":
                result = result / rows.dtype.type(sum(sizes))
        return torch.tensor(result, device=values[0].device)
    total, count = torch.tensor(STARTS[reduction], dtype=start, device=values[0].device), torch.tensor(0)
    for value, size in zip(values, sizes, strict=True):
        if reduction == "mean":
            total, count = total + value * size, count + size
        elif reduction == "sum":
            total = total + value
        else:
            total = (torch.min if reduction == "min" else torch.max)(total, value)
    return total / count.to(total.device) if reduction == "mean" else total


def _reduced_alone(reduction: str, value: Tensor, size: Any) -> Tensor:
    """Return the reduction of one value: as many roundings as of many, on a number instead of arrays."""
    if reduction in ("min", "max"):
        return value.clone()
    if reduction == "sum" or size == 1:
        return value + 0  # never -0.0
    return torch.tensor(_number_alone(reduction, value.cpu().numpy()[()], size), device=value.device)


def _number_alone(reduction: str, number: Any, size: Any) -> Any:
    if reduction in ("min", "max"):
        return number
    weight = type(number)(1 if reduction == "sum" else size)
    return (number * weight + type(number)(0)) / weight


def as_tensor(value: Value, device: torch.device | None = None) -> Tensor:
    """Return a kept value as a tensor."""
    return value if isinstance(value, Tensor) else torch.tensor(value, device=device)

"""The map over clients: what :func:`torch.func.vmap` does, without its cost for a small step.

A stacked step of a small model is mostly the calls around it. `torch.func.vmap` takes its arguments apart as trees,
which is a third of them; the public way for a function to leave a running `vmap` (`torch.autograd.Function.vmap`) takes
another third. The two functions here use the few private parts of torch that both are made of, and nothing else in the
package does. Where torch no longer has these parts, the first falls back on `torch.func.vmap` and the second declines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

_PARTS: Any = getattr(torch._C, "_functorch", None)
_NAMES = (
    *("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim", "_unwrap_batched"),
    *("peek_interpreter_stack", "pop_dynamic_layer_stack", "push_dynamic_layer_stack", "is_batchedtensor"),
    "TransformType",
)
complete = all(hasattr(_PARTS, name) for name in _NAMES)
"""Whether torch has these parts."""


def over_clients(
    function: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor], mapped: Sequence[bool] = ()
) -> list[Tensor]:
    """Apply a function to every client at once; tensors that are not mapped are common to all clients."""
    mapped = mapped or [True] * len(tensors)
    if not complete:
        axes = tuple(0 if along else None for along in mapped)
        return list(vmap(lambda *each: tuple(function(list(each))), in_dims=axes, randomness="error")(*tensors))
    _load()
    size = len(tensors[mapped.index(True)])
    level = _PARTS._vmap_increment_nesting(size, "error")
    try:
        pairs = zip(tensors, mapped, strict=True)
        results = function([_PARTS._add_batch_dim(tensor, 0, level) if along else tensor for tensor, along in pairs])
        return [_PARTS._remove_batch_dim(tensor, level, size, 0) for tensor in results]
    finally:
        _PARTS._vmap_decrement_nesting()


def on_stack(
    function: Callable[..., Tensor | None], mapped: Sequence[Tensor], shared: Sequence[Tensor] = ()
) -> Tensor | None:
    """Step out of the running map, call `function` with stacked tensors, and step back in with its result."""
    layer = _PARTS.peek_interpreter_stack() if complete else None
    if layer is None or layer.level() != 1 or layer.key() != _PARTS.TransformType.Vmap:
        return None
    pairs = [_PARTS._unwrap_batched(tensor, 1) for tensor in mapped]
    if any(axis is None for _, axis in pairs) or any(_PARTS.is_batchedtensor(tensor) for tensor in shared):
        return None
    layer = _PARTS.pop_dynamic_layer_stack()
    try:
        result = function(*(tensor.movedim(axis, 0) if axis else tensor for tensor, axis in pairs), *shared)
    finally:
        _PARTS.push_dynamic_layer_stack(layer)
    return None if result is None else _PARTS._add_batch_dim(result, 0, 1)


@cache
def _load() -> None:
    """Load the decompositions of operations, as `torch.func.vmap` does when it is first used."""
    vmap(torch.neg)(torch.zeros(1))

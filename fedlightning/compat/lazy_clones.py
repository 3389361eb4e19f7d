"""Copies that take no memory until somebody writes: what is frozen is in memory once, however many modules hold it."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

LEAST_SHARED = 2**16
"""Bytes from which a copy shares its memory until it is written to; smaller ones are not worth it."""
Module = TypeVar("Module", bound=nn.Module)


def lazy_clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor whose memory is the tensor's until somebody writes to one of the two.

    Torch makes the second memory then, whoever writes: an operation, numpy, DLPack, a pointer. It cannot see who writes to an
    array or a file that the memory was made of, or to a numpy view that was taken before: such a write is in both. Torch has
    lazy clones since 2.1, without a public name; where it has them no more, or the tensor is a part of a memory, is small or
    on a GPU, the copy is made at once.

    Example:
        >>> weight = torch.zeros(2**15)
        >>> copied = lazy_clone(weight)
        >>> _ = copied.add_(1)
        >>> weight[0].item(), copied[0].item()
        (0.0, 1.0)
    """
    tensor = tensor.detach()
    if not _is_whole(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    try:
        copied: Tensor = torch._lazy_clone(tensor)
    except RuntimeError:  # memory that torch has not made, as a worker's of its messages
        return tensor.clone()
    return copied


def _is_whole(tensor: Tensor) -> bool:
    """Return whether torch can make a lazy clone, and it is of nothing else than the tensor."""
    plain = hasattr(torch, "_lazy_clone") and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and tensor.is_contiguous() and LEAST_SHARED <= tensor.nbytes == tensor.untyped_storage().nbytes()


def to_read(tensor: Tensor) -> Tensor:
    """Return a tensor whose bytes may be read by numpy, which asks for memory to write to: a lazy clone would become real.

    Example:
        >>> to_read(torch.arange(3)).numpy().tolist()
        [0, 1, 2]
    """
    return tensor.clone() if _is_whole(tensor) else tensor


def copy_module(module: Module) -> Module:
    """Return `copy.deepcopy(module)`, whose large parameters are lazy clones (:func:`lazy_clone`).

    What a step has left in an attribute together with its graph (generated images, hidden states) is copied without it.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2)
        >>> layer.seen = layer(torch.ones(1, 2))
        >>> copied = copy_module(layer)
        >>> bool((copied.weight == layer.weight).all()), bool((copied.seen == layer.seen).all()), copied.seen.requires_grad
        (True, True, False)
    """
    memo = {
        id(entry): nn.Parameter(lazy_clone(entry), entry.requires_grad)
        for entry in module.parameters()
        if type(entry) is nn.Parameter and _is_whole(entry)
    }
    try:
        copied = copy.deepcopy(module, dict(memo))
    except RuntimeError:  # deepcopy takes no tensor with a graph
        results = {id(value): value.detach().clone() for value in _results(module)}
        if not results:
            raise
        copied = copy.deepcopy(module, memo | results)
    for entry in copied.parameters():
        if (
            not entry.is_leaf
        ):  # torch copies a scripted part together with the graph of copying it, and none could train it
            entry.detach_().requires_grad_()
    return copied


def _results(module: nn.Module) -> list[Tensor]:
    """Return the tensors with a graph that a module and its parts have as attributes, or in containers there."""
    waiting: list[Any] = [value for part in module.modules() for value in vars(part).values()]
    seen, tensors = set[int](), list[Tensor]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors += [] if value.is_leaf else [value]
        elif isinstance(value, (dict, list, tuple, set, deque)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return tensors

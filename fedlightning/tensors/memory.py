"""Many tensors in one block of memory, so that one operation or one transfer serves all of them.

Copies that take no memory until somebody writes: what is frozen is in memory once, however many modules hold it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedlightning.tensors.modules import State

PIECE = 2**15
"""Numbers worked on at a time on a CPU, where new memory for long float64 tensors takes longer than their arithmetic."""
LEAST_SHARED = 2**16
"""Bytes from which a copy shares its memory until it is written to; smaller ones are not worth it."""
Module = TypeVar("Module", bound=nn.Module)
FEW = 8
"""Up to this many tensors that already are on the CPU are copied one by one, which is cheaper than packing them."""


def pack(state: Mapping[str, Tensor]) -> State:
    """Return copies of all tensors on the CPU, those of one dtype next to each other in one block of memory.

    Operations on all of them can then run as one operation (see `side_by_side`), and a GPU sends them in one transfer.
    Up to `FEW` tensors that already are on the CPU are copied one by one instead.

    Args:
        state: Any state.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import pack, side_by_side
        >>> packed = pack({f"w{i}": torch.ones(2) for i in range(9)})
        >>> side_by_side(list(packed.values())).shape
        torch.Size([18])
    """
    if len(state) <= FEW and all(value.device.type == "cpu" for value in state.values()):
        return {name: value.detach().clone() for name, value in state.items()}
    packed: State = {}
    for dtype in {value.dtype for value in state.values()}:
        part = {name: value.detach() for name, value in state.items() if value.dtype == dtype}
        flat = torch.cat([value.reshape(-1) for value in part.values()]).cpu()
        pieces = flat.split([value.numel() for value in part.values()])
        packed |= {name: piece.view(part[name].shape) for name, piece in zip(part, pieces, strict=True)}
    return {name: packed[name] for name in state}


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one tensor that shares their memory, or `None` if they are not adjacent in it.

    Args:
        tensors: At least one tensor. They are adjacent if each one is contiguous, starts where the one before it ends,
            and has the same dtype and storage.

    Returns:
        A view of shape `(numbers,)`, where `numbers` is the total number of elements.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import side_by_side
        >>> side_by_side(torch.arange(5).split([2, 3]))
        tensor([0, 1, 2, 3, 4])
        >>> side_by_side([torch.ones(2), torch.ones(2)]) is None
        True
    """
    first = tensors[0]
    start = first.data_ptr()
    end, dtype, width = start, first.dtype, first.element_size()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype != dtype or not tensor.is_contiguous():
            return None
        end += tensor.numel() * width
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # adjacent by chance
        return None
    return first.as_strided(((end - start) // width,), (1,), first.storage_offset())


def lazy_clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor whose memory is the tensor's until somebody writes to one of the two, in whatever way.

    Torch makes the second memory then. It has this since 2.1, without a public name; where it has it no more, or the tensor
    is a part of a memory, is small or on a GPU, the copy is made at once.

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
        copied: Tensor = torch._lazy_clone(tensor)  # type: ignore[attr-defined]
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

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2)
        >>> bool((copy_module(layer).weight == layer.weight).all())
        True
    """
    memo = {
        id(entry): nn.Parameter(lazy_clone(entry), entry.requires_grad)
        for entry in module.parameters()
        if type(entry) is nn.Parameter and _is_whole(entry)
    }
    return copy.deepcopy(module, memo)

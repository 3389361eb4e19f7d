"""Many tensors in one block of memory, so that one operation or one transfer serves all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedlightning.tensors.entries import State

PIECE = 2**15
"""Numbers worked on at a time on a CPU, where new memory for long float64 tensors takes longer than their arithmetic."""
FEW_TENSORS = 8
"""Up to this many tensors that already are on the CPU are copied one by one, which is cheaper than packing them."""


def pack(state: Mapping[str, Tensor]) -> State:
    """Return copies of all tensors on the CPU, those of one dtype next to each other in one block of memory.

    Operations on all of them can then run as one operation (see `side_by_side`), and a GPU sends them in one transfer.
    Up to `FEW_TENSORS` tensors that already are on the CPU are copied one by one instead.

    Args:
        state: Any state.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import pack, side_by_side
        >>> packed = pack({f"w{i}": torch.ones(2) for i in range(9)})
        >>> side_by_side(list(packed.values())).shape
        torch.Size([18])
    """
    if len(state) <= FEW_TENSORS and all(value.device.type == "cpu" for value in state.values()):
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

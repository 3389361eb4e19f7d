"""Deep copies of one module, again and again: what ``copy.deepcopy`` gives, several times faster for small modules."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

ATOMIC = (
    type, FunctionType, BuiltinFunctionType, CodeType, MethodDescriptorType, WrapperDescriptorType, property,
    weakref.ref, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""What ``copy.deepcopy`` does not copy: it is the same object in the copy."""


class CannotRecord(Exception):
    """The object graph holds something that pickling and deep copying treat differently."""


class Copier:
    """Makes deep copies of a module.

    The first copy walks over the objects and records how to build them, as pickling does; what must not be pickled
    (functions, classes, devices) is kept as it is, and tensors are deep-copied by torch. Where an object has a
    ``__deepcopy__`` of its own or cannot be recorded, every copy is an ordinary ``copy.deepcopy``.

    Args:
        module: only the values of its tensors may change afterwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept: list[Any] = []
        self._recipe: bytes | None = None
        self._tensors: dict[int, bool] = {}
        try:
            recipe = self._record()
            tensors = {place: kept for place, kept in enumerate(self._kept) if isinstance(kept, torch.Tensor)}
            shared = _sharing(tensors)
            self._tensors = {place: _is_plain(kept) and place not in shared for place, kept in tensors.items()}
            self._recipe = recipe
        except Exception:
            self._kept = []

    def copy(self) -> Any:
        """A new deep copy."""
        if self._recipe is None:
            return copy.deepcopy(self.module)
        kept = self._kept.copy()
        memo: dict[int, Any] = {}  # one for all: views of one storage stay views of one storage
        for place, is_plain in self._tensors.items():
            kept[place] = _clone(kept[place]) if is_plain else copy.deepcopy(kept[place], memo)
        builder = pickle.Unpickler(io.BytesIO(self._recipe))
        builder.persistent_load = kept.__getitem__  # type: ignore[method-assign]  # a C call for every kept object
        return builder.load()

    def _record(self) -> bytes:
        file = io.BytesIO()
        _Recorder(file, self._kept).dump(self.module)
        return file.getvalue()


class _Recorder(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file, protocol=4)  # deepcopy asks objects for this protocol too
        self._kept = kept
        self._known: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, MethodType | ModuleType | weakref.ProxyType):
            raise CannotRecord
        if not isinstance(obj, (torch.Tensor, *ATOMIC)):
            if hasattr(type(obj), "__deepcopy__"):
                raise CannotRecord
            return None
        if id(obj) not in self._known:
            self._known[id(obj)] = len(self._kept)
            self._kept.append(obj)
        return self._known[id(obj)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a deep copy holds a clone of the values, and nothing else."""
    if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.grad is not None or vars(tensor):
        return False
    whole = (
        tensor.layout == torch.strided and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
    return whole and tensor.is_contiguous() and (type(tensor) is nn.Parameter or not tensor.requires_grad)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().clone()
    return nn.Parameter(values, tensor.requires_grad) if type(tensor) is nn.Parameter else values


def _sharing(tensors: dict[int, torch.Tensor]) -> set[int]:
    """The places of the tensors that share their memory with another one."""
    owners: dict[int, list[int]] = {}
    for place, tensor in tensors.items():
        owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(place)
    return {place for group in owners.values() if len(group) > 1 for place in group}

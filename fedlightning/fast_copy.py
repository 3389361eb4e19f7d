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
        try:
            self._recipe = self._record()
        except Exception:
            self._kept = []

    def copy(self) -> Any:
        """A new deep copy."""
        if self._recipe is None:
            return copy.deepcopy(self.module)
        return _Builder(self._recipe, self._kept).load()

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


class _Builder(pickle.Unpickler):
    def __init__(self, recipe: bytes, kept: list[Any]) -> None:
        super().__init__(io.BytesIO(recipe))
        self._kept = kept
        self._memo: dict[int, Any] = {}  # one for all tensors: views of one storage stay views of one storage

    def persistent_load(self, pid: Any) -> Any:
        kept = self._kept[pid]
        return copy.deepcopy(kept, self._memo) if isinstance(kept, torch.Tensor) else kept

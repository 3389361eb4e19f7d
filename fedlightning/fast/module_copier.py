"""Deep copies of one module, many times: the result of `copy.deepcopy`, several times faster for small modules."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import pickletools
import weakref
from collections.abc import Mapping
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

from fedlightning.client.blueprint import deep_copy
from fedlightning.compat.lazy_clones import lazy_clone

ATOMIC = (
    type, FunctionType, BuiltinFunctionType, CodeType, MethodDescriptorType, WrapperDescriptorType, property,
    weakref.ref, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types that `copy.deepcopy` does not copy: the copy holds the same object."""


class _Builder(pickle.Unpickler):
    """An unpickler whose `persistent_load` can be set: from Python 3.13 on that of the class itself is read-only."""


class CannotRecord(Exception):
    """The object graph holds something that pickling and deep copying treat differently."""


class Copier:
    """Makes deep copies of a module.

    The first copy walks over the objects and records how to build them, as pickling does. Objects that must not be
    pickled (functions, classes, devices) are kept as they are, and tensors are deep-copied by torch. Where an object
    has a `__deepcopy__` of its own or cannot be recorded, every copy is an ordinary `copy.deepcopy`.

    Args:
        module: The module. Only the values of its tensors may change afterwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._objects: list[Any] = []
        self._recipe: bytes | None = None
        self._tensors: dict[int, bool] = {}
        self._places: dict[str, int] = {}
        try:
            recipe = self._record()
            tensors = {place: value for place, value in enumerate(self._objects) if isinstance(value, torch.Tensor)}
            shared = _sharing(tensors)
            self._tensors = {place: _is_plain(value) and place not in shared for place, value in tensors.items()}
            self._places = self._named()
            self._recipe = recipe
        except Exception:
            self._objects = []

    def holds(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Return True if :meth:`copy` can replace the module's own entries by `state`."""
        for name, value in state.items():
            tensor = self._objects[self._places[name]] if self._recipe is not None and name in self._places else None
            if tensor is None or (tensor.shape, tensor.dtype, tensor.device) != (
                value.shape,
                value.dtype,
                value.device,
            ):
                return False
        return True

    @property
    def is_complete(self) -> bool:
        """Whether :meth:`copy` can replace every tensor of the module by name."""
        return self._recipe is not None and len(self._places) == len(self._tensors)

    def copy(self, state: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Return a new deep copy."""
        if self._recipe is None:
            return deep_copy(self.module)
        objects = self._objects.copy()
        for name, value in (state or {}).items():
            place = self._places[name]
            objects[place] = _clone(objects[place], value)
        memo: dict[int, Any] = {}  # one for all: views of one storage stay views of one storage
        for place, is_plain in self._tensors.items():
            if objects[place] is self._objects[place]:
                objects[place] = _clone(objects[place]) if is_plain else copy.deepcopy(objects[place], memo)
        builder = _Builder(io.BytesIO(self._recipe))
        builder.persistent_load = objects.__getitem__  # type: ignore[method-assign]  # a C call for every kept object
        return builder.load()

    def _named(self) -> dict[str, int]:
        """Return the places of the entries of the module's state that have one name and a memory of their own."""
        places = {id(value): place for place, value in enumerate(self._objects)}
        state = self.module.state_dict(keep_vars=True)
        named = {name: places[id(value)] for name, value in state.items() if id(value) in places}
        places_named = list(named.values())
        return {
            name: place for name, place in named.items() if self._tensors.get(place) and places_named.count(place) == 1
        }

    def _record(self) -> bytes:
        file = io.BytesIO()
        _Recorder(file, self._objects).dump(self.module)
        return pickletools.optimize(file.getvalue())  # what no copy looks up again is not noted in each


class _Recorder(pickle.Pickler):
    def __init__(self, file: io.BytesIO, objects: list[Any]) -> None:
        super().__init__(file, protocol=4)  # deepcopy asks objects for this protocol too
        self._objects = objects
        self._place_by_id: dict[int, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Put a module's attributes straight into the copy; `nn.Module.__setstate__` is for old files only."""
        kind: Any = type(obj)
        plain = isinstance(obj, nn.Module) and kind.__setstate__ is nn.Module.__setstate__
        base: Any = object
        if not plain or kind.__reduce_ex__ is not base.__reduce_ex__ or kind.__getstate__ is not base.__getstate__:
            return NotImplemented
        return copyreg.__newobj__, (kind,), vars(obj), None, None, _set_attributes  # type: ignore[attr-defined]

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, MethodType | ModuleType | weakref.ProxyType):
            raise CannotRecord
        if not isinstance(obj, (torch.Tensor, *ATOMIC)):
            if hasattr(type(obj), "__deepcopy__"):
                raise CannotRecord
            return None
        if id(obj) not in self._place_by_id:
            self._place_by_id[id(obj)] = len(self._objects)
            self._objects.append(obj)
        return self._place_by_id[id(obj)]


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a deep copy holds a clone of the values, and nothing else."""
    if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.grad is not None or vars(tensor):
        return False
    whole = (
        tensor.layout == torch.strided and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
    return whole and tensor.is_contiguous() and (type(tensor) is nn.Parameter or not tensor.requires_grad)


def _clone(tensor: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    values = lazy_clone(tensor if values is None else values)
    return nn.Parameter(values, tensor.requires_grad) if type(tensor) is nn.Parameter else values


def _sharing(tensors: dict[int, torch.Tensor]) -> set[int]:
    """Return the places of the tensors that share their memory with another one."""
    owners: dict[int, list[int]] = {}
    for place, tensor in tensors.items():
        owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(place)
    return {place for group in owners.values() if len(group) > 1 for place in group}

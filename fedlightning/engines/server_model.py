"""A model of the server as tasks carry it to where it is scored: its entries, and how the module around them is built."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.client.blueprint import Blueprint
from fedlightning.tensors import State, load_state, module_state

PLAIN = (bool, int, float, str)
NOT_COMPARED = ("training", "_parameters", "_buffers", "_modules")
"""Attributes of a module that are its mode, or are compared elsewhere."""


class ServerModel:
    """A model of the server.

    In the process that made it the module is there, and is scored as it is. Into another process go its state and its owner:
    the architecture whose module the server builds, wrapped by the callbacks, and the path in that where the model is only a
    part of it. A module that no architecture gives (another class, other shapes, attributes of its own) travels whole.

    Args:
        module: The model.
        blueprint: Builds the server's modules.

    Example:
        >>> import pickle
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fedlightning.client.blueprint import Blueprint
        >>> from fedlightning.client.settings import LocalSettings
        >>> from fedlightning.contract import CallbackList
        >>> blueprint = Blueprint(BoringModel(), CallbackList([]), LocalSettings(seed=0, max_rounds=1))
        >>> model = ServerModel(BoringModel(), blueprint)
        >>> model.owner, sorted(model.state)
        (('', ''), ['layer.bias', 'layer.weight'])
        >>> there = pickle.loads(pickle.dumps(model))
        >>> bool((there.built(blueprint).layer.weight == model.built(blueprint).layer.weight).all())
        True
    """

    def __init__(self, module: LightningModule, blueprint: Blueprint) -> None:
        self._module: LightningModule | None = module
        self._blueprint = blueprint

    @cached_property
    def state(self) -> State:
        """The model's entries."""
        assert self._module is not None
        return module_state(self._module)

    @cached_property
    def owner(self) -> tuple[str, str] | None:
        """Name of the architecture, and path of the model in its module (empty: all of it); `None`: it travels whole."""
        assert self._module is not None
        for name in self._blueprint.architectures:
            for path, part in _parts(self._blueprint.reference(name)):
                if _alike(part, self._module):
                    return name, path
        return None

    @classmethod
    def of(cls, state: State, owner: tuple[str, str]) -> ServerModel:
        """Return the model as it arrives in another process."""
        made = cls.__new__(cls)
        made._module = None
        made.__dict__.update(state=state, owner=owner)
        return made

    def kind(self, blueprint: Blueprint) -> type:
        """Return the class of the module."""
        if self._module is not None:
            return type(self._module)
        assert self.owner is not None
        return type(blueprint.reference(self.owner[0]).get_submodule(self.owner[1]))

    def built(self, blueprint: Blueprint) -> LightningModule:
        """Return the module; where it is not there yet, build it around the state."""
        if self._module is not None:
            return self._module
        assert self.owner is not None
        architecture, path = self.owner
        module = blueprint.build("server", architecture).get_submodule(path)
        assert isinstance(module, LightningModule)
        load_state(module, self.state)
        return module

    def __reduce__(self) -> Any:
        if self.owner is None:
            return _whole, (self._module,)
        return ServerModel.of, (self.state, self.owner)


def _whole(module: LightningModule) -> ServerModel:
    made = ServerModel.__new__(ServerModel)
    made._module = module
    made.__dict__["owner"] = None
    return made


def _parts(module: LightningModule) -> Iterator[tuple[str, LightningModule]]:
    for path, part in module.named_modules():
        if isinstance(part, LightningModule):
            yield path, part


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules differ in the values of their entries only."""
    if type(one) is not type(other):
        return False
    mine, theirs = dict(one.named_modules()), dict(other.named_modules())
    if {path: type(part) for path, part in mine.items()} != {path: type(part) for path, part in theirs.items()}:
        return False
    first, second = module_state(one), module_state(other)
    if first.keys() != second.keys() or any(
        (value.shape, value.dtype) != (second[name].shape, second[name].dtype) for name, value in first.items()
    ):
        return False
    known: dict[tuple[int, int], Any] = {
        (id(part), id(theirs[path])): None for path, part in mine.items()
    }  # these are compared here, one by one
    return all(_same(_attributes(part), _attributes(theirs[path]), known) for path, part in mine.items())


def _attributes(part: nn.Module) -> dict[str, Any]:
    kept = {
        name: value for name, value in part.named_buffers(recurse=False) if name in part._non_persistent_buffers_set
    }
    own = {name: value for name, value in vars(part).items() if name not in NOT_COMPARED and "hooks" not in name}
    return own | {f"buffer {name}": value for name, value in kept.items()}


def _same(one: Any, other: Any, known: dict[tuple[int, int], Any]) -> bool:
    """Whether two values are equal: tensors and plain values by themselves, other objects as they would be pickled."""
    if one is other or (id(one), id(other)) in known:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other) or repr(one) == repr(other)
    known[id(one), id(other)] = one, other
    if type(one) is dict:
        return one.keys() == other.keys() and all(_same(value, other[key], known) for key, value in one.items())
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(_same(*pair, known) for pair in zip(one, other, strict=True))
    if isinstance(one, FunctionType):  # those that a module makes for itself, as metrics do
        return one.__code__ == other.__code__ and _same(_around(one), _around(other), known)
    try:
        return one == other or _same(_inside(one), _inside(other), known)
    except Exception:  # it cannot be compared: the module travels whole
        return False


def _around(function: FunctionType) -> list[Any]:
    """Return what a function has besides its code."""
    cells = function.__closure__ or ()
    return [function.__defaults__, function.__kwdefaults__, [cell.cell_contents for cell in cells]]


def _inside(value: Any) -> Any:
    """Return what an object is made of."""
    found = value.__reduce_ex__(4)
    if isinstance(found, str):
        raise TypeError(f"{value!r} is known by its name")
    return [list(part) if place > 2 and part is not None else part for place, part in enumerate(found)]

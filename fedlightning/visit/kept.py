"""What a module keeps in its attributes while it is scored, put back for the next client: :class:`Kept`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fedlightning.datamodules.own_generators import KINDS, set_state, state_of
from fedlightning.errors import INSIDE, warn


class _Empty(LightningModule):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()


OWN = frozenset(vars(_Empty()))
"""Attributes of torch's and of Lightning's, which look after them."""
ATOMIC = frozenset(
    (bool, int, float, complex, str, bytes, range, slice, type, NoneType, FunctionType, BuiltinFunctionType, MethodType,
     torch.dtype, torch.device, torch.Size, nn.Parameter)
)  # fmt: skip
"""Types of what is not looked into: a value of them cannot change, or is an entry of the module."""
CONTAINERS = (dict, list, set, deque)
NOT_USERS = INSIDE | {"numpy", "pytorch_lightning"}
"""Packages whose objects are not looked into."""
_named: WeakSet[type] = WeakSet()  # classes whose attributes that cannot be copied have been named


class Kept:
    """Attributes and buffers of a module and of its parts, with what is in them, as they are now.

    Containers, tensors, arrays, random generators and objects of the user's own classes are looked into. Parameters are the
    model, and what a class holds for all its objects is nobody's.

    Args:
        module: The module.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> module.seen = [1]
        >>> kept = Kept(module)
        >>> module.seen.append(2)
        >>> module.count = 5
        >>> kept.put_back()
        ['an attribute of Linear', 'Linear.seen']
        >>> module.seen, hasattr(module, "count")
        ([1], False)
    """

    def __init__(self, module: nn.Module) -> None:
        self._records: list[tuple[PutBack, Any, Any, str]] = []
        self._seen: dict[int, Any] = {}  # the objects too, so that no other one gets the id of one that is gone
        self._uncopied: list[str] = []
        self._waiting: list[tuple[Any, str]] = [(module, "")]
        while self._waiting:
            self._look_into(*self._waiting.pop())
        if self._uncopied and type(module) not in _named:
            _named.add(type(module))
            warn(
                f"{type(module).__name__} keeps {', '.join(sorted(set(self._uncopied)))}, which cannot be copied. It goes on "
                "from one client's score to the next, so scores may depend on the engine. Make it anew in "
                "on_validation_start and on_test_start."
            )

    def put_back(self) -> list[str]:
        """Let everything be as it was, in the same objects; return the places where it was not."""
        return [place for put_back, value, before, place in self._records if put_back(value, before)]

    def _look_into(self, value: Any, place: str) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            for part in value.modules():
                self._seen[id(part)] = part
                self._note(part, type(part).__name__, OWN)
                for name, buffer in vars(part)["_buffers"].items():  # `named_buffers` takes as long as all the rest
                    if buffer is not None:
                        self._records.append((_buffer, (part, name), buffer, f"{type(part).__name__}.{name}"))
                        self._waiting.append((buffer, f"{type(part).__name__}.{name}"))
        elif isinstance(value, Tensor):
            if value.layout == torch.strided and not value.is_meta:
                self._records.append((_tensor, value, value.detach().clone(), place))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._records.append((_array, value, value.copy(), place))
        elif isinstance(value, KINDS):
            self._records.append((_generator, value, state_of(value), place))
        elif isinstance(value, (*CONTAINERS, tuple)):
            kind = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
            if kind is not None:
                self._records.append((_contents, value, kind(value), place))
            inside = value.values() if isinstance(value, dict) else value
            self._waiting += [(item, place) for item in inside if type(item) not in ATOMIC]
        elif _is_users(value):
            self._note(value, place, frozenset())
        elif isinstance(value, Iterator):
            self._uncopied.append(place)

    def _note(self, owner: Any, place: str, own: frozenset[str]) -> None:
        attributes = vars(owner)
        before = {name: attributes[name] for name in attributes.keys() - own}
        self._records.append((_attributes, owner, before, f"an attribute of {place}"))
        for name, value in before.items():  # what a metric's names begin with an underscore never changes in place
            if type(value) not in ATOMIC and not (name[0] == "_" and isinstance(owner, Metric)):
                self._waiting.append((value, f"{place}.{name}"))


# -- by kind: let a value be as it was before, and return whether it was not ------------------------------------------
PutBack = Callable[[Any, Any], bool]


def _attributes(owner: Any, before: dict[str, Any]) -> bool:
    attributes = vars(owner)
    new = attributes.keys() - before.keys() - (OWN if isinstance(owner, nn.Module) else frozenset())
    if not new and _are_same(list(map(attributes.get, before)), before.values()):
        return False
    for name in new:
        del attributes[name]
    attributes.update(before)
    return True


def _buffer(place: tuple[nn.Module, str], before: Tensor) -> bool:
    is_other = getattr(*place, None) is not before
    if is_other:
        setattr(*place, before)
    return is_other


def _tensor(tensor: Tensor, before: Tensor) -> bool:
    if torch.equal(tensor, before):
        return False
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape == before.shape:
            tensor.copy_(before)
        else:
            tensor.data = before.clone()
    return True


def _array(array: Any, before: Any) -> bool:
    is_other = array.tobytes() != before.tobytes()
    array[...] = before
    return is_other


def _generator(generator: Any, before: Any) -> bool:
    set_state(generator, before)
    return False


def _contents(value: Any, before: Any) -> bool:
    if _are_same(value, before) and not (isinstance(value, dict) and not _are_same(value.values(), before.values())):
        return False
    value.clear()
    (value.extend if hasattr(value, "extend") else value.update)(before)
    return True


def _are_same(values: Any, before: Any) -> bool:
    return len(values) == len(before) and all(map(is_, values, before))


def _is_users(value: Any) -> bool:
    """Whether an object is of a class that neither Python nor the packages beneath bring along."""
    kind = type(value)
    users = kind is SimpleNamespace or kind.__module__.partition(".")[0] not in NOT_USERS
    return users and hasattr(value, "__dict__") and not isinstance(value, type)

"""What a module keeps in its attributes while it is scored, put back for the next client: :class:`Kept`."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from io import IOBase
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, NoneType, SimpleNamespace
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


OWN = frozenset(vars(_Empty())) - {"_hparams"}
"""Attributes of torch's and of Lightning's, which look after them."""
ATOMIC = frozenset(
    (bool, int, float, complex, str, bytes, range, slice, type, NoneType, torch.dtype, torch.device, torch.Size)
)
"""Types of what is not looked into: a value of them cannot change."""
CONTAINERS = (dict, list, set, deque)
HELD = (*CONTAINERS, Tensor)
CANNOT_BE_COPIED = (Iterator, IOBase, type(lru_cache(len)))
NOT_USERS = INSIDE | {"numpy", "pytorch_lightning"}
"""Packages whose objects are not looked into."""
UNCOPIED = "which cannot be copied"
_named: WeakSet[type] = WeakSet()  # classes whose attributes that cannot be copied have been named


class Kept:
    """Attributes and buffers of a module and of its parts, with what is in them, as they are now.

    Containers, tensors, arrays, random generators and objects of the user's own classes are looked into, and containers that
    a class holds for all its objects. Parameters of the module are the model; those of a part hidden in a list are not.

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
        self._seen |= {id(parameter): parameter for parameter in module.parameters()}
        self._uncopied: list[str] = []
        self._waiting: list[tuple[Any, str]] = [(module, "")]
        while self._waiting:
            self._look_into(*self._waiting.pop())
        if self._uncopied and type(module) not in _named:
            _named.add(type(module))
            warn(
                f"{type(module).__name__} keeps {', '.join(sorted(set(self._uncopied)))}, {UNCOPIED}. It goes on "
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
                kind, attributes = type(part).__name__, vars(part)
                self._seen[id(part)] = part
                self._note(part, kind, OWN)
                for of, what in (("_modules", "part"), ("_buffers", "buffer"), ("_parameters", "parameter")):
                    self._records.append((_contents, attributes[of], dict(attributes[of]), f"a {what} of {kind}"))
                for name, entry in (attributes["_buffers"] | attributes["_parameters"]).items():  # faster than torch's
                    self._waiting.append((entry, f"{kind}.{name}"))
        elif isinstance(value, Tensor):
            if value.layout == torch.strided and not value.is_meta:
                self._records.append((_tensor, value, value.detach().clone(), place))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._records.append((_array, value, value.copy(), place))
            self._waiting += [(item, place) for item in value.flat] if value.dtype.hasobject else []
        elif isinstance(value, (bytearray, array)):
            self._records.append((_items, value, value[:], place))
        elif isinstance(value, KINDS):
            self._records.append((_generator, value, state_of(value), place))
        elif isinstance(value, partial):
            self._waiting += [(value.func, place), (value.args, place), (value.keywords, place)]
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            self._waiting.append((value.__self__, place))
        elif isinstance(value, FunctionType) and _is_users(value):
            self._waiting += [(cell.cell_contents, place) for cell in value.__closure__ or () if cell != CellType()]
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            copy = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
            if copy is not None:
                self._records.append((_contents, value, copy(value), place))
            inside = value.values() if isinstance(value, dict) else value
            self._waiting += [(item, place) for item in inside if type(item) not in ATOMIC]
            if hasattr(value, "__dict__"):  # of a class made from a container
                self._note(value, place, frozenset())
        elif _is_users(value):
            self._note(value, place, frozenset())
        elif isinstance(value, CANNOT_BE_COPIED):
            self._uncopied.append(place)

    def _note(self, owner: Any, place: str, own: frozenset[str]) -> None:
        attributes = getattr(owner, "__dict__", {})
        before = {name: attributes[name] for name in attributes.keys() - own}
        self._records.append((_attributes, owner, before, f"an attribute of {place}"))
        classes = [kind for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] not in NOT_USERS]
        slots = {name: getattr(owner, name) for kind in classes for name in _slots(kind) if hasattr(owner, name)}
        if slots:
            self._records.append((_slotted, owner, slots, place))
        held = {name: value for kind in classes for name, value in vars(kind).items() if isinstance(value, HELD)}
        for name, value in (held | slots | before).items():  # a metric's names that begin with _ never change in place
            if type(value) not in ATOMIC and not (name[0] == "_" and isinstance(owner, Metric)):
                self._waiting.append((value, f"{place}.{name}"))


# -- by kind: let a value be as it was before, and return whether it was not ------------------------------------------
PutBack = Callable[[Any, Any], bool]


def _attributes(owner: Any, before: dict[str, Any]) -> bool:
    attributes = getattr(owner, "__dict__", {})
    new = attributes.keys() - before.keys() - (OWN if isinstance(owner, nn.Module) else frozenset())
    if not new and _are_same(list(map(attributes.get, before)), before.values()):
        return False
    for name in new:
        del attributes[name]
    attributes.update(before)
    return True


def _slotted(owner: Any, before: dict[str, Any]) -> bool:
    other = [name for name, value in before.items() if getattr(owner, name, None) is not value]
    for name in other:
        object.__setattr__(owner, name, before[name])
    return bool(other)


def _tensor(tensor: Tensor, before: Tensor) -> bool:
    if torch.equal(tensor, before):
        return False
    if tensor.is_floating_point() and tensor.shape == before.shape and tensor.allclose(before, 0, 0, equal_nan=True):
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


def _items(value: Any, before: Any) -> bool:
    is_other = bool(value != before)
    value[:] = before
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
    package = (value if isinstance(value, FunctionType) else type(value)).__module__ or ""
    users = type(value) is SimpleNamespace or package.partition(".")[0] not in NOT_USERS or package == "collections"
    return users and not isinstance(value, type)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

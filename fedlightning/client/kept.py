"""Attributes that a module keeps while it is scored, put back for the next client."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, NoneType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fedlightning.compat.lazy_clones import LEAST_SHARED, lazy_clone
from fedlightning.datamodules.sampling import KINDS, set_state, state_of
from fedlightning.errors import INSIDE, warn


class _Empty(LightningModule):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()


OWN = frozenset(vars(_Empty()))
"""Attributes of torch's and of Lightning's, which look after them."""
ATOMIC = frozenset(
    (bool, int, float, complex, str, bytes, range, slice, type, NoneType, torch.dtype, torch.device, torch.Size)
)
"""Types of what is not looked into: a value of them cannot change."""
CONTAINERS = (dict, list, set, deque)
PARTS_OF_MODULES = ("_modules", "_parameters", "_buffers")
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
NOT_USERS = (INSIDE | {"numpy", "pytorch_lightning"}) - {"argparse", "collections", "types"}
"""Packages whose objects are not looked into. `Namespace`, `UserDict` and `SimpleNamespace` hold what a user puts in."""
MISSING = object()
UNCOPIED = "which cannot be copied"
_named: WeakSet[type] = WeakSet()  # classes whose attributes that cannot be copied have been named


class Kept:
    """Attributes and buffers of a module and of its parts, with what is in them, as they are now.

    Containers, tensors, arrays, random generators and objects of the user's own classes are looked into, and containers that
    a class holds for all its objects. Parameters of the module are the model; those of a part hidden in a list are not.

    Args:
        module: The module.
        of_step: Only what a step changes, at the price of a step: objects of the user's classes and functions are not looked
            into, and frozen parameters that a step may move (:func:`moved_by_steps`) are kept too.
        buffers: Keep buffers.

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

    def __init__(self, module: nn.Module, of_step: bool = False, buffers: bool = True) -> None:
        self._of_step = of_step
        moved = moved_by_steps(module) if of_step else []
        self._records: list[tuple[PutBack, Any, Any, str]] = [
            (_parameter, entry, lazy_clone(entry), "a frozen parameter") for entry in moved
        ]
        # the objects too, so that no other one gets the id of one that is gone; faster than `module.parameters()`
        left_out = ("_parameters",) if buffers else ("_parameters", "_buffers")
        self._entries_by_id = {
            id(entry): entry for part in module.modules() for kind in left_out for entry in vars(part)[kind].values()
        }
        self._uncopied: list[str] = []
        self._waiting: list[tuple[Any, str]] = [(module, "")]
        while self._waiting:
            self._look_into(*self._waiting.pop())
        if self._uncopied and not of_step and type(module) not in _named:
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
        if id(value) in self._entries_by_id:
            return
        self._entries_by_id[id(value)] = value
        if isinstance(value, nn.Module):
            kind, attributes = type(value).__name__, vars(value)
            self._note(value, kind, OWN)
            for name in PARTS_OF_MODULES:
                entries = attributes[name]
                self._waiting += [(entry, f"{kind}.{key}") for key, entry in entries.items()]
                if isinstance(entries, dict):  # not a scripted module's
                    self._records.append((_contents, entries, dict(entries), f"an entry of {kind}"))
            if isinstance(value, LightningModule):
                self._wait((value.hparams,), f"{kind}.hparams")
            for name in () if self._of_step else HOOKS:
                if attributes[name]:
                    self._wait(attributes[name].values(), f"a hook of {kind}")
        elif isinstance(value, Tensor):
            if value.layout == torch.strided and not value.is_meta:
                self._records.append((_tensor, value, value.detach().clone(), place))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._records.append((_array, value, value.copy(), place))
            if value.dtype.hasobject:
                self._wait(value.flat, place)
        elif isinstance(value, (bytearray, array)):
            self._records.append((_items, value, value[:], place))
        elif isinstance(value, KINDS):
            self._records.append((_generator, value, state_of(value), place))
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            container = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
            if container is not None:
                self._records.append((_contents, value, container(value), place))
            self._wait(value.values() if isinstance(value, dict) else value, place)
            if hasattr(value, "__dict__"):  # of a class made from a container
                self._note(value, place)
        elif self._of_step:
            return
        elif isinstance(value, partial):
            self._wait((value.func, value.args, value.keywords), place)
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            self._wait((value.__self__,), place)
        elif isinstance(value, FunctionType):
            if _is_users(value):
                self._wait((vars(value), *(value.__defaults__ or ()), *(value.__closure__ or ())), place)
        elif isinstance(value, CellType):
            if value != CellType():  # not empty
                self._records.append((_cell, value, value.cell_contents, place))
                self._wait((value.cell_contents,), place)
        elif _is_users(type(value)):
            self._note(value, place)
        elif isinstance(value, (Iterator, type(lru_cache(len)))):
            self._uncopied.append(place)

    def _wait(self, values: Iterable[Any], place: str) -> None:
        self._waiting += [(value, place) for value in values if type(value) not in ATOMIC]

    def _note(self, owner: Any, place: str, left_out: frozenset[str] = frozenset()) -> None:
        attributes = getattr(owner, "__dict__", {})
        before = {name: attributes[name] for name in attributes.keys() - left_out}
        self._records.append((_attributes, owner, before, f"an attribute of {place}"))
        for name, value in before.items():  # what a metric's names begin with an underscore never changes in place
            if type(value) not in ATOMIC and not (name[0] == "_" and isinstance(owner, Metric)):
                self._waiting.append((value, f"{place}.{name}"))
        for kind in _users_classes(type(owner)):  # type: ignore[arg-type]
            for name, value in vars(kind).items():
                if isinstance(value, MemberDescriptorType):  # of a slot
                    content = _read(value, owner)
                    self._records.append((_slot, (value, owner), content, f"{place}.{name}"))
                    self._wait((content,), f"{place}.{name}")
                elif isinstance(value, (*CONTAINERS, Tensor)) and not name.startswith("__"):
                    self._wait((value,), f"{kind.__name__}.{name}")


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


def _slot(place: tuple[Any, Any], before: Any) -> bool:
    slot, owner = place
    content = _read(slot, owner)
    if content is before:
        return False
    if before is MISSING:
        slot.__delete__(owner)
    else:
        slot.__set__(owner, before)
    return True


def _read(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return MISSING


def _cell(cell: CellType, before: Any) -> bool:
    is_other = cell.cell_contents is not before
    cell.cell_contents = before
    return is_other


def _tensor(tensor: Tensor, before: Tensor) -> bool:
    if torch.equal(tensor, before) or (
        torch.equal(tensor.isnan(), before.isnan()) and torch.equal(tensor.nan_to_num(), before.nan_to_num())
    ):
        return False
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape == before.shape:
            tensor.copy_(before)
        else:
            tensor.data = before.clone()
    return True


def _parameter(parameter: Tensor, before: Tensor) -> bool:
    if torch.equal(parameter, before):
        return False
    parameter.data.copy_(before)  # a graph that is alive may have saved it
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


def _is_users(kind: Any) -> bool:
    """Whether a class or function comes neither with Python nor with the packages beneath."""
    return (kind.__module__ or "").partition(".")[0] not in NOT_USERS


@lru_cache(maxsize=1024)
def _users_classes(kind: type) -> tuple[type, ...]:
    return tuple(filter(_is_users, kind.__mro__))


def moved_by_steps(module: nn.Module) -> list[nn.Parameter]:
    """Return the frozen parameters that a step may move by itself: those that follow a trained one, and small ones.

    A momentum encoder and a mean teacher have the shapes of what they follow. A frozen network below adapters or a head has
    not, as a rule, and may be too large to be copied in every step.

    Example:
        >>> followed, follower, frozen = nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 700)
        >>> _ = follower.requires_grad_(False), frozen.requires_grad_(False)
        >>> [tuple(entry.shape) for entry in moved_by_steps(nn.Sequential(followed, follower, frozen))]
        [(300, 300), (300,), (700,)]
    """
    parameters = [entry for entry in module.parameters() if entry.layout == torch.strided and not entry.is_meta]
    trained = {entry.shape for entry in parameters if entry.requires_grad}
    frozen = (entry for entry in parameters if not entry.requires_grad)
    return [entry for entry in frozen if entry.shape in trained or entry.nbytes < LEAST_SHARED]


# -- numbers and tensors -----------------------------------------------------------------------------------------------
Values = dict[str, Tensor | int | float]


def values_of(module: nn.Module) -> Values:
    """Return copies of the numbers and tensors that a module and its parts have as plain attributes, by dotted names.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 1))
        >>> module[0].count = 3
        >>> {name: value for name, value in values_of(module).items() if name == "0.count"}
        {'0.count': 3}
    """
    values: Values = {}
    for path, part in module.named_modules():
        for name, value in () if isinstance(part, Metric) else vars(part).items():
            if name not in OWN and (type(value) in (int, float) or type(value) is Tensor):
                values[f"{path}.{name}".lstrip(".")] = value.detach().clone() if isinstance(value, Tensor) else value
    return values


def is_same(value: Tensor | float, before: Tensor | float | None) -> bool:
    """Return True if two values are equal; NaN is equal to NaN."""
    if not (isinstance(value, Tensor) and isinstance(before, Tensor)):
        return type(value) is type(before) and repr(value) == repr(before)
    return value.shape == before.shape and torch.equal(value.nan_to_num(), before.nan_to_num())

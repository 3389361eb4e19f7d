"""Plain values as JSON beside a list of tensors, and back. What is no plain value is an object with a list of fields.

The objects that messages may hold, each by the list of its fields; what a field must be, its annotation says.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from fedlightning.client.data_summary import Description
from fedlightning.client.requests import Evaluate
from fedlightning.codec.values import Collisions
from fedlightning.contract.messages import ClientLog, Message, Update
from fedlightning.deployment.export import Deploy, Deployed
from fedlightning.engines.base import Visit
from fedlightning.engines.score_tasks import Lost, ScoreClient, ScoredModel, ScoreModel, ServerModel
from fedlightning.guards.preflight_task import PreflightTask, StepFinding
from fedlightning.guards.step_trials import StepTrial
from fedlightning.scores.rows import Gap, Row
from fedlightning.tensors import State
from fedlightning.wire.container import NAMES, Check, Limits, Whole, WireError, check_of

EXTRAS = {"extras": dict[str, dict[str, Any]]}


@dataclass(frozen=True)
class Kind:
    """A class whose objects may travel.

    Attributes:
        type: The class.
        left: Fields that stay where they are: the other side has their defaults.
        narrower: Annotations of fields that must be less than the class says, or that it says nothing of.
        make: Makes an object from its fields; `None`: the class does.
    """

    type: type
    left: frozenset[str] = frozenset()
    narrower: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., Any] | None = None

    @cached_property
    def fields(self) -> dict[str, Check]:
        """By name, what tells whether a value is what the field must be."""
        hints = {**get_type_hints(self.type), **self.narrower}
        return {name: check_of(hint) for name, hint in hints.items() if name not in self.left}


KINDS: dict[str, Kind] = {
    kind.type.__name__: kind
    for kind in (
        Kind(Message, narrower=EXTRAS),
        Kind(Update, frozenset({"cause", "staleness", "left_out", "code_bytes"}), EXTRAS),  # an exception is code
        Kind(ClientLog),
        Kind(Evaluate),
        Kind(Visit),
        Kind(ScoredModel),
        Kind(ScoreClient),
        Kind(ScoreModel, frozenset({"client"})),
        Kind(Deploy),
        Kind(PreflightTask),
        Kind(StepTrial, narrower={"split": Literal["train", "val", "test"]}),
        Kind(StepFinding, frozenset({"cause"})),
        Kind(Deployed, frozenset({"module"})),
        Kind(Description, narrower={"seed": Whole, "planted_groups": dict[str, Whole] | None}),
        Kind(Row),
        Kind(Gap),
        Kind(Lost, narrower={"rows": list[Row | Gap]}, make=lambda rows: Lost(rows)),
        Kind(ServerModel, narrower={"state": State, "owner": tuple[str, str]}, make=ServerModel.of),
    )
}
"""By the name that messages use."""
_BY_TYPE = {kind.type: (name, kind) for name, kind in KINDS.items()}


class Objects:
    """The objects of :data:`KINDS`, for :class:`~fedlightning.wire.tree.TreeWriter` and its reader."""

    def apart(self, value: Any) -> tuple[str, dict[str, Any]] | None:
        if type(value) not in _BY_TYPE:
            return None
        name, kind = _BY_TYPE[type(value)]
        if type(value) is Lost:
            return name, {"rows": list(value)}
        if type(value) is ServerModel and value.owner is None:
            raise WireError(
                "A message cannot hold a model of the server that no architecture of the run gives: a method that scores "
                "such a model does not run at sites."
            )
        fields = {field: getattr(value, field) for field in kind.fields}
        if type(value) is Evaluate and value.clients is not None:
            fields["clients"] = tuple(value.clients)  # any collection of names
        return name, fields

    def whole(self, kind: str, fields: dict[str, Any]) -> Any:
        if kind not in KINDS:
            raise WireError(f"A message was refused: it holds an object of the unknown kind {kind!r:.40}.")
        known = KINDS[kind]
        if set(fields) != set(known.fields):
            raise WireError(
                f"A message was refused: its {kind} has the fields {sorted(fields)!r:.200}, not {sorted(known.fields)}. "
                "Install the same version of FedLightning on both sides."
            )
        for name, check in known.fields.items():
            if not check(fields[name]) or (known.type is Gap and name == "value" and not math.isnan(fields[name])):
                raise WireError(f"A message was refused: {name} of its {kind} is a {_short(fields[name])}.")
        return (known.make or known.type)(**fields)


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if isinstance(value, int | float | str) else type(value).__name__


class Fields(Protocol):
    """Takes objects apart and puts them together."""

    def apart(self, value: Any) -> tuple[str, dict[str, Any]] | None:
        """Return the name of an object's kind and its fields, or `None` if no message can hold it."""

    def whole(self, kind: str, fields: dict[str, Any]) -> Any:
        """Return the object."""


class TreeWriter:
    """Turns one value into JSON and tensors. A tensor that occurs twice is written once.

    Args:
        objects: Knows the objects that may occur.

    Attributes:
        tensors: The tensors, in the order of their numbers.
    """

    def __init__(self, objects: Fields) -> None:
        self.tensors: list[Tensor] = []
        self._objects = objects
        self._known: dict[int, tuple[Tensor, Any]] = {}  # the tensor is kept, so that its id stays taken

    def text(self, value: Any) -> str:
        """Return the value as JSON."""
        try:
            return json.dumps(self._tree(value, ""), allow_nan=False, separators=(",", ":"))
        except RecursionError:
            raise WireError("A message cannot be written: its values are nested too deeply.") from None
        except (ValueError, UnicodeError) as error:
            if isinstance(error, WireError):
                raise
            raise WireError(f"A message cannot be written: {error}.") from None

    def _tree(self, value: Any, place: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return [self._tree(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self._tree(entry, f"{place}[{index}]") for index, entry in enumerate(value)]}
        if kind in (dict, OrderedDict):
            pairs = [
                [self._tree(key, f"{place}{{{key!r:.60}}}"), self._tree(entry, f"{place}[{key!r:.60}]")]
                for key, entry in value.items()
            ]
            return {kind.__name__: pairs}
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if kind in (bytes, bytearray):
            return {"bytes": self._number(_as_tensor(value))}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, place)
        apart = self._objects.apart(value)
        if apart is None:
            raise WireError(
                f"A message cannot hold a {kind.__module__}.{kind.__qualname__}{f' (at {place})' if place else ''}: it is "
                "tensors and plain values. Send the fields of an object, and the name of a function."
            )
        name, fields = apart
        return {"object": [name, [[field, self._tree(entry, f"{place}.{field}")] for field, entry in fields.items()]]}

    def _tensor(self, value: Tensor, place: str) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        dense = value.layout is torch.strided and not (value.is_nested or value.is_meta or value.is_quantized)
        if type(value) not in (Tensor, nn.Parameter) or not dense:
            raise WireError(f"A message cannot hold a {type(value).__name__} that is not dense (at {place}).")
        plain = value.detach().resolve_conj().resolve_neg()
        if plain.dtype is torch.complex128:
            tree: Any = {"complex128": self._number(torch.view_as_real(plain))}
        elif plain.dtype not in NAMES:
            raise WireError(f"A message cannot hold a tensor of dtype {plain.dtype} (at {place}).")
        else:
            order = _order(plain)
            tree = (
                {"tensor": self._number(plain)}
                if order is None
                else {"ordered": [self._number(plain.permute(order)), list(order)]}
            )
        self._known[id(value)] = (value, tree)
        return tree

    def _array(self, value: np.ndarray | np.generic, place: str) -> Any:
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))
        except TypeError:
            raise WireError(f"A message cannot hold an array of dtype {value.dtype} (at {place}).") from None
        return {"array" if isinstance(value, np.ndarray) else "scalar": self._tensor(tensor, place)}

    def _number(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _as_tensor(value: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in memory, where it is not the usual one.

    It is kept, because kernels take another path on another order, and round otherwise.
    """
    if tensor.is_contiguous():
        return None
    strides: tuple[int, ...] = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dimension: -strides[dimension]))
    return order if tensor.permute(order).is_contiguous() else None


class TreeReader:
    """Puts the value together that a :class:`TreeWriter` took apart.

    Args:
        objects: Knows the objects that may occur.
        tensors: The tensors of the message.
        limits: What is accepted.
    """

    def __init__(self, objects: Fields, tensors: list[Tensor], limits: Limits) -> None:
        self._objects = objects
        self._tensors = tensors
        self._limits = limits
        self._values = 0
        self._made: dict[int, bytes] = {}  # a message that names its bytes a million times is not a million copies
        self._readers: dict[str, Callable[[Any, int], Any]] = {
            "float": self._float,
            "tuple": self._tuple,
            "dict": self._dict,
            "OrderedDict": lambda content, depth: OrderedDict(self._dict(content, depth)),
            "tensor": lambda content, depth: self._tensor(content),
            "ordered": self._ordered,
            "complex128": self._complex,
            "bytes": self._bytes,
            "array": lambda content, depth: self._array(content, depth),
            "scalar": self._scalar,
            "object": self._object,
        }

    def value(self, text: str) -> Any:
        """Return the value of a JSON text."""
        try:
            tree = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_one_key)
            return self._value(tree, 0)
        except WireError:
            raise
        except RecursionError:
            raise self._refusal("its values are nested too deeply") from None
        except (ValueError, TypeError, RuntimeError, OverflowError, IndexError, KeyError) as error:
            raise self._refusal(" ".join(str(error).split())[:200]) from None

    def _refusal(self, reason: str) -> WireError:
        return WireError(f"A message was refused: {reason.rstrip('.')}.")

    def _value(self, tree: Any, depth: int) -> Any:
        self._values += 1
        if depth > self._limits.depth or self._values > self._limits.values:
            raise self._refusal("it has too many values, or they are nested too deeply")
        if isinstance(tree, list):
            return [self._value(entry, depth + 1) for entry in tree]
        if type(tree) is str and not tree.isascii():
            tree.encode()  # half of a surrogate pair can be in no file: a UnicodeError
        if not isinstance(tree, tuple):
            return tree  # None, a truth value, a number, a text
        kind, content = tree
        if kind not in self._readers:
            raise self._refusal(f"it holds a value of the unknown kind {kind!r:.40}")
        return self._readers[kind](content, depth + 1)

    def _list(self, content: Any) -> list[Any]:
        if not isinstance(content, list):
            raise self._refusal("a list is missing")
        return content

    def _tuple(self, content: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self._value(entry, depth) for entry in self._list(content))

    def _dict(self, content: Any, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        collisions = Collisions()
        for pair in self._list(content):
            key, entry = self._list(pair)
            made = self._value(key, depth)
            if not _is_key(made):
                raise self._refusal(f"{made!r:.60} can be no key of a dict")
            collisions.add(made)
            if made in found:
                raise self._refusal(f"a dict has the key {made!r:.60} twice")
            found[made] = self._value(entry, depth)
        return found

    def _float(self, content: Any, depth: int) -> float:
        if content not in ("nan", "inf", "-inf"):
            raise self._refusal(f"{content!r:.40} is no number")
        return float(content)

    def _tensor(self, content: Any) -> Tensor:
        if type(content) is not int or not 0 <= content < len(self._tensors):
            raise self._refusal(f"it has no tensor {content!r:.40}")
        return self._tensors[content]

    def _ordered(self, content: Any, depth: int) -> Tensor:
        number, order = self._list(content)
        tensor = self._tensor(number)
        if any(type(place) is not int for place in self._list(order)) or sorted(order) != list(range(tensor.ndim)):
            raise self._refusal(f"{order!r:.40} is no order of {tensor.ndim} dimensions")
        return tensor.permute([order.index(place) for place in range(tensor.ndim)])

    def _complex(self, content: Any, depth: int) -> Tensor:
        tensor = self._tensor(content)
        if tensor.dtype is not torch.float64 or not tensor.shape or tensor.shape[-1] != 2:
            raise self._refusal(f"tensor {content} holds no complex numbers")
        return torch.view_as_complex(tensor)

    def _bytes(self, content: Any, depth: int) -> bytes:
        tensor = self._tensor(content)
        if tensor.dtype is not torch.uint8 or tensor.ndim != 1:
            raise self._refusal(f"tensor {content} holds no bytes")
        if content not in self._made:
            self._made[content] = tensor.numpy().tobytes()
        return self._made[content]

    def _array(self, content: Any, depth: int) -> np.ndarray:
        tensor = self._value(content, depth)
        if not isinstance(tensor, Tensor):
            raise self._refusal("an array is no tensor")
        return tensor.numpy()  # of a dtype that numpy lacks: TypeError

    def _scalar(self, content: Any, depth: int) -> np.generic:
        array = self._array(content, depth)
        if array.ndim:
            raise self._refusal("a number has several values")
        found: np.generic = array[()]  # type: ignore[assignment]
        return found

    def _object(self, content: Any, depth: int) -> Any:
        kind, fields = self._list(content)
        if type(kind) is not str or not isinstance(fields, list):
            raise self._refusal("an object has no name or no fields")
        found = {}
        for pair in fields:
            name, entry = self._list(pair)
            if type(name) is not str or name in found:
                raise self._refusal(f"an object has the field {name!r:.40} twice, or it is no name")
            found[name] = self._value(entry, depth)
        return self._objects.whole(kind, found)


def _one_key(pairs: list[tuple[str, Any]]) -> tuple[str, Any]:
    """Take a JSON object for what it is here: a value's kind and its content."""
    if len(pairs) != 1:
        raise ValueError(f"an entry has {len(pairs)} kinds")
    return pairs[0]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _is_key(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_key(part) for part in value)
    return value is None or type(value) in (str, int, float, bool, bytes)

"""The objects that messages may hold, each by the list of its fields; what a field must be, its annotation says.

What a field that is read must be: what its annotation says, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from fedlightning.client.data_summary import DataSummary
from fedlightning.client.requests import Evaluate
from fedlightning.codec.tree import NotPlainError, Reader, Refusal, Writer, is_dense, is_strided
from fedlightning.contract.messages import ClientLog, Message, Update
from fedlightning.deployment.export import Deploy, Deployed
from fedlightning.engines.contract import Visit
from fedlightning.engines.score_tasks import Lost, ScoreClient, ScoredModel, ScoreModel, ServerModel
from fedlightning.guards.preflight_task import PreflightTask, StepFinding
from fedlightning.guards.step_trials import StepTrial
from fedlightning.scores.rows import Gap, Row
from fedlightning.tensors import State

Check = Callable[[Any], bool]
Whole = Annotated[int, "from -2**63"]
"""An integer that may be below 0; any other `int` of a field is a count."""
LISTS: dict[Any, tuple[type, ...]] = {list: (list,), tuple: (tuple,), Collection: (tuple,), Sequence: (list, tuple)}
"""By the origin of an annotation, the classes of what it stands for."""


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) is float or _whole(value)  # longer integers are not floats, and end whoever adds them up


def check_of(hint: Any) -> Check:
    """Return what tells whether a value is what an annotation says: no subclass, and no number that a file cannot hold.

    Example:
        >>> check_of(dict[str, int | None])({"a": 1, "b": None}), check_of(tuple[int, ...])((1, -1))
        (True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint == Whole:
        return _whole
    if hint is Any:
        return lambda value: True
    if hint in (None, NoneType):
        return lambda value: value is None
    if hint is int:
        return lambda value: _whole(value) and value >= 0
    if hint is float:
        return _number
    if hint is Tensor:
        return lambda value: isinstance(value, Tensor)
    if origin is Literal:
        return lambda value: type(value) is str and value in inner
    if origin is None:
        return lambda value: type(value) is hint
    if origin in (dict, Mapping):
        name, entry = map(check_of, inner)
        return lambda value: (
            isinstance(value, dict) and all(name(key) and entry(content) for key, content in value.items())
        )
    checks = [check_of(part) for part in inner if part is not ...]
    if origin is UnionType:
        return lambda value: any(check(value) for check in checks)
    if origin is tuple and len(checks) == len(inner):
        return lambda value: (
            type(value) is tuple
            and len(value) == len(checks)
            and all(check(entry) for check, entry in zip(checks, value, strict=True))
        )
    return lambda value: type(value) in LISTS[origin] and all(map(checks[0], value))


class WireError(ValueError):
    """Bytes that are not a message, or a value that none can hold. The text is a sentence."""


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
        Kind(DataSummary, narrower={"seed": Whole, "planted_groups": dict[str, Whole] | None}),
        Kind(Row),
        Kind(Gap),
        Kind(Lost, narrower={"rows": list[Row | Gap]}, make=lambda rows: Lost(rows)),
        Kind(ServerModel, narrower={"state": State, "owner": tuple[str, str]}, make=ServerModel.of),
    )
}
"""By the name that messages use."""
_BY_TYPE = {kind.type: (name, kind) for name, kind in KINDS.items()}
VALUES = frozenset(
    [
        "float",
        "complex",
        "tuple",
        "dict",
        "OrderedDict",
        "set",
        "bytes",
        "tensor",
        "view",
        "array",
        "scalar",
        "dtype",
        "device",
        "Size",
        "object",
    ]
)
"""The kinds of values that messages hold: none names code, and none is more in memory than in the message."""


class MessageWriter(Writer):
    """Writes values without parts that are one thing in two places, and tensors without the memory around them."""

    kinds = VALUES

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, tuple[Tensor, Any]] = {}  # the tensor is kept, so that its id stays taken

    def _sentence(self, place: str, reason: str) -> str:
        return (
            f"A message cannot hold {reason.removeprefix('is ')}{f' (at {place})' if place else ''}: it is tensors and plain "
            "values. Send the fields of an object, and the name of a function."
        )

    def _new(self, value: Any, kind: type) -> Any:
        return super()._new(bytes(value), bytes) if kind is bytearray else super()._new(value, kind)

    def _tensor(self, value: Tensor) -> Any:
        """Write a tensor that occurs twice once, and of a view that is not dense what is seen of it."""
        if id(value) not in self._nodes:
            plain = value.detach().resolve_conj().resolve_neg()
            if not is_strided(plain):
                raise Refusal("is a tensor that is not dense")
            plain = plain if is_dense(plain) else plain.contiguous()
            self._nodes[id(value)] = value, self._remember(plain, 0)
        return self._nodes[id(value)][1]

    def _other(self, value: Any) -> Any:
        if type(value) not in _BY_TYPE:
            return super()._other(value)
        name, kind = _BY_TYPE[type(value)]
        if type(value) is Lost:
            fields: dict[str, Any] = {"rows": list(value)}
        else:
            fields = {field: getattr(value, field) for field in kind.fields}
        if type(value) is ServerModel and value.owner is None:
            raise WireError(
                "A message cannot hold a model of the server that no architecture of the run gives: a method that scores "
                "such a model does not run at sites."
            )
        if type(value) is Evaluate and value.clients is not None:
            fields["clients"] = tuple(value.clients)  # any collection of names
        return {"object": [name, [[field, self._at(f".{field}", entry)] for field, entry in fields.items()]]}


class MessageReader(Reader):
    """Reads what a :class:`MessageWriter` has written."""

    kinds = VALUES

    def _new(self, kind: str, content: Any) -> Any:
        return self._object(*content) if kind == "object" else super()._new(kind, content)

    def _object(self, kind: Any, pairs: Any) -> Any:
        if type(kind) is not str or kind not in KINDS:
            raise NotPlainError(f"it holds an object of the unknown kind {kind!r:.40}")
        schema = KINDS[kind]
        names = [name for name, _ in pairs]
        if sorted(names) != sorted(schema.fields):
            raise NotPlainError(
                f"its {kind} has the fields {sorted(names)!r:.200}, not {sorted(schema.fields)}. "
                "Install the same version of FedLightning on both sides"
            )
        fields = {name: self._value(entry) for name, entry in pairs}
        for name, check in schema.fields.items():
            if not check(fields[name]) or (schema.type is Gap and name == "value" and not math.isnan(fields[name])):
                raise NotPlainError(f"{name} of its {kind} is a {_short(fields[name])}")
        return (schema.make or schema.type)(**fields)


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if isinstance(value, int | float | str) else type(value).__name__

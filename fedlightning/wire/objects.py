"""The objects that messages may hold, each by the list of its fields and what every field must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlightning.federation.checks import CheckThere
from fedlightning.federation.deploy import Deploy, Deployed
from fedlightning.federation.engine import Visit
from fedlightning.federation.sanity import Tried, TryStep
from fedlightning.messages import ClientLog, Message, Update
from fedlightning.scoring.rows import Gap, Row
from fedlightning.scoring.server_model import ServerModel
from fedlightning.scoring.tasks import Lost, ScoreClient, ScoredModel, ScoreModel
from fedlightning.visit.description import Description
from fedlightning.visit.requests import Evaluate
from fedlightning.wire.container import WireError

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return type(value) is str


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) is float or _whole(value)  # longer integers are no floats, and end whoever adds them up


def _anything(value: Any) -> bool:
    return True


def _either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def _nothing(value: Any) -> bool:
    return value is None


def _a(kind: type) -> Check:
    return lambda value: type(value) is kind


def _one_of(*words: str) -> Check:
    return lambda value: type(value) is str and value in words


def _sequence(check: Check, *kinds: type) -> Check:
    return lambda value: type(value) in kinds and all(check(entry) for entry in value)


def _by(key: Check, entry: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(key(name) and entry(one) for name, one in value.items())


def _fixed(*checks: Check) -> Check:
    return lambda value: (
        type(value) is tuple
        and len(value) == len(checks)
        and all(check(entry) for check, entry in zip(checks, value, strict=True))
    )


_STATE = _by(_text, lambda value: isinstance(value, Tensor))
_TEXTS = _sequence(_text, tuple)
_EXTRAS = _by(_text, _by(_text, _anything))
_SCORES = _by(_text, _number)
_ROW: dict[str, Check] = {
    "round": _count,
    "stage": _text,
    "model": _text,
    "checkpoint": _text,
    "data": _text,
    "split": _text,
    "client": _text,
    "metric": _text,
    "value": _number,
    "num_samples": _count,
}


@dataclass(frozen=True)
class Kind:
    """A class whose objects may travel.

    Attributes:
        type: The class.
        fields: By name, what a field must be. These are the arguments that make the object.
        left: Fields that stay where they are: the other side has their defaults.
    """

    type: type
    fields: Mapping[str, Check]
    left: frozenset[str] = frozenset()


KINDS: dict[str, Kind] = {
    kind.type.__name__: kind
    for kind in (
        Kind(
            Message,
            {
                "round": _count,
                "client": _text,
                "state": _STATE,
                "returns": _TEXTS,
                "extras": _EXTRAS,
                "work": _either(_nothing, _count),
                "model": _text,
                "data": _one_of("train", "pooled"),
                "tag": _text,
                "visit": _count,
                "links": _either(_nothing, _count),
            },
        ),
        Kind(
            Update,
            {
                "round": _count,
                "client": _text,
                "state": _STATE,
                "extras": _EXTRAS,
                "num_samples": _count,
                "steps": _count,
                "skipped": _count,
                "own_steps": _count,
                "selections": _count,
                "lr_sum": _number,
                "metrics": _SCORES,
                "evaluations": _sequence(_fixed(_text, _text, _text, _text, _number, _count), list),
                "gaps": _sequence(_fixed(_text, _text, _text, _text), list),
                "logs": _sequence(_a(ClientLog), list),
                "model": _text,
                "origin": _text,
                "tag": _text,
                "links": _either(_nothing, _count),
                "error": _either(_nothing, _text),
            },
            left=frozenset({"cause", "staleness", "left_out"}),  # an exception is code; the others are the server's
        ),
        Kind(ClientLog, {"values": _by(_text, _anything), "step": _count, "method": _text}),
        Kind(Evaluate, {"splits": _TEXTS, "data": _TEXTS, "clients": _either(_nothing, _TEXTS)}),
        Kind(Visit, {"message": _a(Message), "evaluate": _a(Evaluate), "round": _either(_nothing, _count)}),
        Kind(ScoredModel, {"round": _count, "stage": _text, "model": _text, "checkpoint": _text}),
        Kind(
            ScoreClient,
            {
                "message": _a(Message),
                "evaluate": _a(Evaluate),
                "scored": _a(ScoredModel),
                "others": _sequence(_text, list, tuple),
                "kept": _text,
                "shared": _either(_nothing, _STATE),
                "known": _by(_fixed(_text, _text), _fixed(_SCORES, _count)),
            },
        ),
        Kind(
            ScoreModel,
            {
                "model": _a(ServerModel),
                "clients": _TEXTS,
                "evaluate": _a(Evaluate),
                "scored": _a(ScoredModel),
                "others": _sequence(_text, list, tuple),
            },
            left=frozenset({"client"}),
        ),
        Kind(
            Deploy,
            {
                "message": _a(Message),
                "kept": _text,
                "stage": _text,
                "write": _a(bool),
                "folder": _either(_nothing, _text),
                "about": _by(_text, _anything),
                "shared": _either(_nothing, _a(ServerModel)),
                "bring": _a(bool),
            },
        ),
        Kind(
            CheckThere,
            {
                "callback": _text,
                "architecture": _text,
                "client": _text,
                "facts": _by(_text, _anything),
                "shared": _by(_text, _TEXTS),
                "batches": _by(_text, _count),
                "pooled": _TEXTS,
                "splits": _TEXTS,
                "is_mixed": _a(bool),
                "has_public": _a(bool),
            },
            left=frozenset({"num_bytes"}),
        ),
        Kind(
            TryStep,
            {"client": _text, "split": _one_of("train", "val", "test"), "listen": _a(bool)},
            left=frozenset({"num_bytes"}),
        ),
        Kind(
            Tried,
            {
                "has_batches": _either(_nothing, _a(bool)),
                "refusal": _either(_nothing, _text),
                "names": _sequence(_text, list),
            },
            left=frozenset({"cause"}),
        ),
        Kind(
            Deployed,
            {
                "client": _text,
                "path": _either(_nothing, _text),
                "is_shared": _a(bool),
                "reason": _either(_nothing, _text),
                "content": _either(_nothing, _by(_text, _anything)),
            },
            left=frozenset({"module"}),  # it stays where it is
        ),
        Kind(
            Description,
            {
                "module": _text,
                "client_ids": _sequence(_text, list),
                "sizes": _by(_text, _fixed(_count, _count, _count)),
                "partition_name": _text,
                "planted_groups": _either(_nothing, _by(_text, _whole)),
                "seed": _whole,
                "together": _a(bool),
                "classes": _by(_text, _either(_nothing, _sequence(_count, list))),
                "splits": _by(_text, _text),
                "loaders": _by(_text, _by(_text, _anything)),
                "batches": _by(_text, _count),
                "pooled": _TEXTS,
                "public": _either(_nothing, _by(_text, _anything)),
                "public_print": _either(_nothing, _text),
                "public_content": _either(_nothing, _text),
                "content": _either(_nothing, _text),
            },
        ),
        Kind(Row, _ROW),
        Kind(Gap, {**_ROW, "value": lambda value: type(value) is float and math.isnan(value), "reason": _text}),
    )
}
"""By the name that messages use."""
_BY_TYPE = {kind.type: (name, kind) for name, kind in KINDS.items()}


class Objects:
    """The objects of :data:`KINDS`, for :class:`~fedlightning.wire.tree.TreeWriter` and its reader."""

    def apart(self, value: Any) -> tuple[str, dict[str, Any]] | None:
        if type(value) is Lost:
            return "Lost", {"rows": list(value)}
        if type(value) is ServerModel:
            if value.owner is None:
                raise WireError(
                    "A message cannot hold a model of the server that no architecture of the run gives: a method that scores "
                    "such a model does not run at sites."
                )
            return "ServerModel", {"state": value.state, "owner": value.owner}
        if type(value) not in _BY_TYPE:
            return None
        name, kind = _BY_TYPE[type(value)]
        fields = {field: getattr(value, field) for field in kind.fields}
        if type(value) is Evaluate and value.clients is not None:
            fields["clients"] = tuple(value.clients)  # any collection of names
        return name, fields

    def whole(self, kind: str, fields: dict[str, Any]) -> Any:
        if kind == "Lost":
            _same_names(kind, fields, ["rows"])
            if not _sequence(_either(_a(Row), _a(Gap)), list)(fields["rows"]):
                raise WireError("A message was refused: it holds a list of lost scores that are no scores.")
            return Lost(fields["rows"])
        if kind == "ServerModel":
            _same_names(kind, fields, ["state", "owner"])
            if not _STATE(fields["state"]) or not _fixed(_text, _text)(fields["owner"]):
                raise WireError("A message was refused: it holds a model without entries or owner.")
            return ServerModel.of(fields["state"], fields["owner"])
        if kind not in KINDS:
            raise WireError(f"A message was refused: it holds an object of the unknown kind {kind!r:.40}.")
        known = KINDS[kind]
        _same_names(kind, fields, known.fields)
        for name, check in known.fields.items():
            if not check(fields[name]):
                raise WireError(f"A message was refused: {name} of its {kind} is a {_short(fields[name])}.")
        return known.type(**fields)


def _same_names(kind: str, fields: Mapping[str, Any], wanted: Iterable[str]) -> None:
    if set(fields) != set(wanted):
        raise WireError(
            f"A message was refused: its {kind} has the fields {sorted(fields)!r:.200}, not {sorted(wanted)}. Install the "
            "same version of FedLightning on both sides."
        )


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if isinstance(value, int | float | str) else type(value).__name__

"""The objects that messages may hold, each by the list of its fields; what a field must be, its annotation says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_type_hints

from fedlightning.client.data_summary import Description
from fedlightning.client.requests import Evaluate
from fedlightning.contract.messages import ClientLog, Message, Update
from fedlightning.deployment.tasks import Deploy, Deployed
from fedlightning.engines.base import Visit
from fedlightning.engines.score_tasks import Lost, ScoreClient, ScoredModel, ScoreModel
from fedlightning.engines.server_model import ServerModel
from fedlightning.guards.preflight_task import PreflightTask, StepFinding
from fedlightning.guards.step_trials import StepTrial
from fedlightning.scores.rows import Gap, Row
from fedlightning.tensors import State
from fedlightning.wire.container import WireError
from fedlightning.wire.fields import Check, Whole, check_of

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

"""What travels: a :class:`Message` from the server to a client, an :class:`Update` back.

Both are named tensor trees. They can be counted in bytes, copied and sent to another process; they hold no module, no
optimizer and no data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedlightning.tensors import State

GLOBAL = "global"
"""Key of the server's model, unless an algorithm keeps several."""
Shape = tuple[int, ...]
Spec = Literal["scalar", "parameters", "state", "states"] | Shape
"""An extra's declaration: one number, a tensor shape (-1: any size), named tensors shaped as the trainable parameters
(``"parameters"``) or as any entries of the model's state (``"state"``), or several such states by name (``"states"``)."""


@dataclass(frozen=True)
class Wire:
    """The extras a callback puts on the wire, under its own key: what may go ``down`` and what may come ``up``."""

    down: Mapping[str, Spec] = field(default_factory=dict)
    up: Mapping[str, Spec] = field(default_factory=dict)


@dataclass
class Message:
    """Server to client, for one visit.

    Attributes:
        round: the round, counted from 0.
        client: the client's id.
        state: model entries sent down.
        returns: names of the entries the client is to send back; everything else stays with it.
        extras: per callback key, what that callback declared in ``wire().down``.
        work: local epochs or steps (whichever the trainer counts); ``None`` is the trainer's default, 0 trains nothing.
        model: which of the server's models this is (``"global"`` unless an algorithm keeps several).
        data: ``"train"``: the client's own loader; ``"pooled"``: the union (central baselines).
        tag: the algorithm's own mark on the job.
    """

    round: int
    client: str
    state: State
    returns: tuple[str, ...]
    extras: dict[str, Any] = field(default_factory=dict)
    work: int | None = None
    model: str = GLOBAL
    data: Literal["train", "pooled"] = "train"
    tag: str = ""

    @property
    def num_bytes(self) -> int:
        """Payload size: tensors at their own width, numbers as 8 bytes."""
        return tree_bytes(self.state) + tree_bytes(self.extras)


@dataclass
class Update:
    """Client to server, the answer to one message.

    Attributes:
        state: the entries that were asked for.
        num_samples: training samples an epoch really uses; the default weight.
        steps: optimizer steps really taken (a step skipped by the gradient scaler is none).
        skipped: steps that the scaler skipped.
        lr_sum: sum over the real steps of the first parameter group's learning rate.
        metrics: what the module logged in training (last values).
        evaluations: scores of this visit's model: (stage, data, split, metric, value, num_samples).
        gaps: evaluations that failed: (stage, data, split, reason).
        error: why this client contributes nothing (no samples, NaN ...); ``None`` if all went well.
        cause: the exception behind it, for whoever debugs.
    """

    round: int
    client: str
    state: State = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 0
    steps: int = 0
    skipped: int = 0
    lr_sum: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[tuple[str, str, str, str, float, int]] = field(default_factory=list)
    gaps: list[tuple[str, str, str, str]] = field(default_factory=list)
    model: str = GLOBAL
    tag: str = ""
    error: str | None = None
    cause: Exception | None = None

    @property
    def num_bytes(self) -> int:
        """Payload size: tensors at their own width, numbers as 8 bytes. Scores and counters are not counted."""
        return tree_bytes(self.state) + tree_bytes(self.extras)


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree of tensors, numbers, strings, lists and dicts (keys are part of the contract, not of the load)."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(tree_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(tree_bytes(value) for value in tree)
    if isinstance(tree, str | bytes):
        return len(tree)
    return 0 if tree is None else 8


def check_extras(
    key: str, extras: Mapping[str, Any], declared: Mapping[str, Spec], shapes: Mapping[str, torch.Size]
) -> None:
    """Compare what a callback sends with what it declared.

    Args:
        key: the callback's key, for the message.
        extras: the payload.
        declared: its ``wire()`` for this direction.
        shapes: shape of every state entry of the model.

    Raises:
        ValueError: naming the callback, the entry, the rule.
    """
    for name, value in extras.items():
        if name not in declared:
            raise ValueError(
                f"{key} puts '{name}' on the wire but declares only {sorted(declared) or 'nothing'}. "
                "Declare every extra in wire(): private values must not leave by accident."
            )
        spec = declared[name]
        if spec == "scalar":
            fits = isinstance(value, int | float | bool) or (isinstance(value, Tensor) and value.numel() == 1)
        elif spec in ("parameters", "state"):
            fits = _is_state(value, shapes)
        elif spec == "states":
            fits = isinstance(value, Mapping) and all(_is_state(state, shapes) for state in value.values())
        else:
            fits = (
                isinstance(value, Tensor)
                and len(value.shape) == len(spec)
                and all(want in (-1, have) for want, have in zip(spec, value.shape, strict=True))
            )
        if not fits:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{key} declares '{name}' as {spec!r} but sends {found}. Send what wire() declares.")


def _is_state(value: Any, shapes: Mapping[str, torch.Size]) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(tensor, Tensor) and name in shapes and tensor.shape == shapes[name] for name, tensor in value.items()
    )

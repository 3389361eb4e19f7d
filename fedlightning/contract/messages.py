"""Messages from the server to a client, and the updates that come back.

Both are named tensor trees. They can be counted in bytes, copied and sent to another process; they hold no module, no
optimizer and no data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedlightning.tensors import State

GLOBAL = "global"
"""Key of the server's model, unless an algorithm keeps several."""
Form = Literal["scalar", "parameters", "state", "states", "tensors"] | tuple[int | str, ...]
"""An extra's form: one number, a tensor shape (-1: any size; a word: one size for all extras with that word, down and up, and
those up come together), named tensors shaped as the trainable parameters (``"parameters"``) or as any entries of the
model's state (``"state"``), several such states by name (``"states"``), or named tensors of any shape (``"tensors"``), such
as a model of another architecture."""


@dataclass(frozen=True)
class Extra:
    """An extra's form, and what its numbers may be: what the check on arrival holds every client to.

    Attributes:
        form: Its form.
        low: Least number that it may hold.
        high: Largest number that it may hold.
        whole: Whether it is of whole numbers.
        counts: Whether it counts training samples: `"samples"`: together no more than the client has; `"seen"`: once for each
            epoch or step of the visit.
        gaps: Whether a NaN or an infinity may stand for what is not there. Else all numbers are finite.
        by_class: Whether it is made of means by class of the client's samples, which a
            :class:`~fedlightning.contract.families.Protection` can make in the method's place.
        told: Whether it only tells of the client, and nothing that is combined goes by it: whatever its size, it is not an
            update that explodes (`failures.update_limit`).
        due: Tags of the messages (an ordinary visit's is empty) whose updates must bring it, if the client has trained or was
            not to train.

    Example:
        >>> Wire(up={"accuracy": Extra("scalar", low=0, high=1, gaps=True)}).up["accuracy"].high
        1
    """

    form: Form
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    counts: Literal["", "samples", "seen"] = ""
    gaps: bool = False
    by_class: bool = False
    told: bool = False
    due: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: Spec) -> Extra:
        """Return a declaration in full: of a form alone, any finite numbers."""
        return spec if isinstance(spec, Extra) else cls(spec)


Spec = Form | Extra
"""An extra's declaration."""


@dataclass(frozen=True)
class Wire:
    """The extras that a callback declares, under its own key.

    Attributes:
        down: Extras that may go to clients, by name.
        up: Extras that may come from clients, by name.
        entries: Exact names or module prefixes of all entries of the model that can ever leave a client: its side holds every
            request to them. `"shared"`: what `shared_names` answers a server that has `module`, `kinds` and nothing else.
            `"all"`: every one; a method whose choice depends on the round or on the server's state declares what no round
            exceeds.

    Example:
        >>> Wire(up={"delta_c": "parameters", "steps": "scalar"}).down
        {}
    """

    down: Mapping[str, Spec] = field(default_factory=dict)
    up: Mapping[str, Spec] = field(default_factory=dict)
    entries: Sequence[str] | Literal["shared", "all"] = "shared"

    def __post_init__(self) -> None:
        if not isinstance(self.entries, Collection):
            raise TypeError(
                f"Wire got entries={self.entries!r}. Give a list of names or module prefixes ([]: none ever leaves), "
                "'shared' or 'all'."
            )


@dataclass
class Message:
    """Server to client, for one visit.

    Attributes:
        round: The round, counted from 0.
        client: The client's id.
        state: Model entries sent down.
        returns: Names of the entries the client is to send back; everything else stays with it.
        extras: Per callback key, the extras that the callback declared in `wire().down`.
        work: Local epochs or steps (whichever the trainer counts); `None`: the trainer's default; 0: no training.
        model: Key of the server's model (`"global"` unless an algorithm keeps several).
        data: `"train"`: the client's own loader; `"pooled"`: the union (central baselines).
        tag: The algorithm's own label on the job.
        visit: Number in the addresses of the visit's randomness. Default: the round. A client that trains more than
            once in a round gets another number each time, so that its visits do not draw the same batches and noise.
        links: Where there is no server: over how many links the client sends its entries, one copy each. What the message
            holds is the client's own then, and no traffic. `None`: the message comes from a server, and the update goes
            there.
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
    visit: int = -1
    links: int | None = None

    def __post_init__(self) -> None:
        if self.visit < 0:
            self.visit = self.round

    @property
    def num_bytes(self) -> int:
        """Traffic: tensors at their own width, numbers as 8 bytes; 0 where there is no server."""
        return self.size if self.links is None else 0

    @property
    def size(self) -> int:
        """Bytes that the payload takes in memory, whether or not it is traffic."""
        return tree_bytes(self.state) + tree_bytes(self.extras)


@dataclass(frozen=True)
class ClientLog:
    """Something that was logged inside a client's training, on its way to the run's loggers.

    Attributes:
        values: By name, what was logged.
        step: The client's optimizer step, counted over all its visits.
        method: `"metrics"` for numbers; else the method of a TensorBoard writer to call with (name, value, step).
    """

    values: dict[str, Any]
    step: int
    method: str = "metrics"


@dataclass
class Update:
    """Client to server, the answer to one message.

    Attributes:
        round: The round of the message.
        client: The client's id.
        state: The entries that were asked for.
        extras: Per callback key, the extras that the callback declared in `wire().up`.
        num_samples: Training samples that an epoch really uses; the default weight.
        contributed: Whether the client counts in the round (:func:`contributors`): an optimizer of its federated fits has
            stepped, or their trainable entries have moved; under client-level privacy it always does. `None`: it had no
            such fit. Of a job with `work=0` as for `steps`, where it did.
        steps: Steps really taken by the first optimizer (one skipped by the gradient scaler is none): a measure of work,
            not of whether there was any. Of a job with `work=0` those of the client's last fit, as for `lr_sum`;
            `num_samples` too if it asks for entries.
        skipped: Steps that the scaler skipped.
        own_steps: Steps of phases that are not federated: models of the client's own, fine-tuning.
        selections: Passes over validation data with which the client has chosen something.
        lr_sum: Sum over the real steps of the largest learning rate of any parameter.
        metrics: Values that the module logged in training (last ones).
        evaluations: Scores of this visit's model: (stage, data, split, metric, value, num_samples).
        model: Key of the server's model that it updates.
        origin: Key of the server's model that the visit was sent; the scores of the visit go under it.
        tag: The message's label.
        logs: What was logged in training, if the client's logs are kept.
        gaps: Evaluations that failed: (stage, data, split, reason).
        staleness: Steps of the server's models between the message and the arrival of the update.
        left_out: Whether the job was not carried out, as a callback wished (`on_job`): :attr:`error` says so, nobody failed.
        links: The message's: over how many links the entries are sent; `None`: to a server.
        code_bytes: Bytes of the entries and extras as they were sent, where they were a code of others
            (:class:`~fedlightning.contract.families.UpdateCodec`); the server notes them.
        error: The reason why this client contributes nothing (no samples, NaN ...); `None` if all went well.
        cause: The exception behind it, for debugging.
    """

    round: int
    client: str
    state: State = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 0
    contributed: bool | None = None
    steps: int = 0
    skipped: int = 0
    own_steps: int = 0
    selections: int = 0
    lr_sum: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[tuple[str, str, str, str, float, int]] = field(default_factory=list)
    gaps: list[tuple[str, str, str, str]] = field(default_factory=list)
    logs: list[ClientLog] = field(default_factory=list)
    model: str = GLOBAL
    origin: str = GLOBAL
    tag: str = ""
    staleness: int = 0
    left_out: bool = False
    links: int | None = None
    code_bytes: int | None = None
    error: str | None = None
    cause: BaseException | None = None

    @property
    def num_bytes(self) -> int:
        """Traffic over all links: tensors at their own width, numbers as 8 bytes. Scores and counters are not counted."""
        size = tree_bytes(self.state) + tree_bytes(self.extras) if self.code_bytes is None else self.code_bytes
        return size * (1 if self.links is None else self.links)


def contributors(updates: Iterable[Update]) -> list[Update]:
    """Return the updates that count in a round: weights, thresholds, denominators and shares of noise follow from this list.

    Example:
        >>> updates = [Update(0, "a", contributed=True), Update(0, "b", contributed=False), Update(0, "c", error="late")]
        >>> [update.client for update in contributors(updates)]
        ['a']
    """
    return [update for update in updates if update.error is None and update.contributed]


Payload = TypeVar("Payload", Message, Update)


def shallow_copy(payload: Payload, **changes: Any) -> Payload:
    """Return another object with the attributes of a message or an update, some changed: `replace` made for every visit."""
    copied = object.__new__(type(payload))
    vars(copied).update(vars(payload), **changes)
    return copied


def tree_bytes(tree: Any) -> int:
    """Count the bytes of a tree of tensors, numbers, strings, lists and dicts (keys are not counted)."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict | Mapping):  # most are dicts, which takes no time to see
        return sum(tree_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(tree_bytes(value) for value in tree)
    if isinstance(tree, str | bytes):
        return len(tree)
    return 0 if tree is None else 8


def check_extras(
    key: str,
    extras: Mapping[str, Any],
    declared: Mapping[str, Spec],
    shapes: Mapping[str, torch.Size],
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Compare the extras that a callback sends with those it declared.

    Args:
        key: The callback's key, for the message.
        extras: The payload.
        declared: Its `wire()` for this direction.
        shapes: Shape of every state entry of the model.
        sizes: What words in shapes are, as far as it is known.

    Raises:
        ValueError: Naming the callback, the entry, the rule.
    """
    lengths = dict(sizes or {})
    for name, value in extras.items():
        if name not in declared:
            raise ValueError(
                f"{key} puts '{name}' on the wire but declares only {sorted(declared) or 'nothing'}. "
                "Declare every extra in wire(): private values must not leave by accident."
            )
        spec = Extra.of(declared[name]).form
        if spec == "scalar":
            fits = isinstance(value, int | float | bool) or (isinstance(value, Tensor) and value.numel() == 1)
        elif spec in ("parameters", "state"):
            fits = _is_state(value, shapes)
        elif spec == "tensors":
            fits = isinstance(value, Mapping) and all(
                isinstance(part, str) and isinstance(tensor, Tensor) for part, tensor in value.items()
            )
        elif spec == "states":
            fits = isinstance(value, Mapping) and all(_is_state(state, shapes) for state in value.values())
        else:
            fits = (
                isinstance(value, Tensor)
                and len(value.shape) == len(spec)
                and all(
                    want in (-1, have)
                    for want, have in zip(_sized(spec, lengths, value.shape), value.shape, strict=True)
                )
            )
        if not fits:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{key} declares '{name}' as {spec!r} but sends {shape}. Send what wire() declares.")


def sizes_in(extras: Mapping[str, Any], declared: Mapping[str, Spec]) -> dict[str, int]:
    """Return what the words in the shapes of some extras are.

    Args:
        extras: The extras.
        declared: Their declaration.
    """
    sizes: dict[str, int] = {}
    for name, value in extras.items():
        form = Extra.of(declared[name]).form if name in declared else ()
        if isinstance(form, tuple) and isinstance(value, Tensor) and value.ndim == len(form):
            _sized(form, sizes, value.shape)
    return sizes


def _sized(form: Any, sizes: dict[str, int], shape: torch.Size) -> list[int]:
    """Return a form in numbers: a word is the size that it had first."""
    return [
        want if isinstance(want, int) else sizes.setdefault(want, have) for want, have in zip(form, shape, strict=True)
    ]


def _is_state(value: Any, shapes: Mapping[str, torch.Size]) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(tensor, Tensor) and name in shapes and tensor.shape == shapes[name] for name, tensor in value.items()
    )


Outcome = Literal["taken", "late", "stale", "failed"]
"""What became of a job on a virtual clock."""


@dataclass(frozen=True)
class JobTrace:
    """A job from its message to its update, in virtual seconds.

    Attributes:
        round: The round in which it arrived, from 1.
        client: The client's id.
        began: When the message left.
        computed: When the client had computed.
        arrived: When the update arrived.
        version: Steps of the server's models when the message left.
        staleness: Steps that the server had made when it arrived.
        outcome: What became of it: `"taken"`, or `"late"`, `"stale"`, `"failed"`.

    Example:
        >>> JobTrace(1, "a", 0.0, 2.0, 2.5, version=0).ended("late").outcome
        'late'
    """

    round: int
    client: str
    began: float
    computed: float
    arrived: float
    version: int
    staleness: int = 0
    outcome: Outcome = "taken"

    def ended(self, outcome: Outcome) -> JobTrace:
        """Return the trip with another outcome."""
        return replace(self, outcome=outcome)

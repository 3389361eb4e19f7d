"""Helpers of the checks: they interrupt a run, record its visits, and compare two runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.client import visit
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import Facts, FederatedCallback
from fedlightning.contract.messages import Message, Update
from fedlightning.server.server import Server
from fedlightning.tensors import module_state
from fedlightning.trainer import FederatedTrainer


class Stopped(BaseException):
    """Raised to end a run as a killed process would, without any cleaning up."""


class StopAfter(FederatedCallback):
    """A callback that interrupts a run in the round after `rounds`."""

    facts = Facts(takes_part=False)

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round_start(self, server: Server) -> None:
        """Interrupt the run."""
        if server.round == self.rounds:
            raise Stopped


class Visits:
    """Recorded visits.

    Attributes:
        all: (message, update, record kept) of every visit, in order.
        records: Client -> a copy of the record kept at its last visit.
    """

    def __init__(self) -> None:
        self.all: list[tuple[Message, Update, Any]] = []
        self.records: dict[str, Any] = {}


@contextmanager
def watching() -> Iterator[Visits]:
    """Record the message, the update and the client's record of every visit of a run in this process."""
    visits, visit_steps = Visits(), visit.visit_steps

    def watched(runner: ClientRuntime, message: Message, record: Any, evaluate: Any) -> Any:
        update, kept = yield from visit_steps(runner, message, record, evaluate)
        visits.all.append((message, update, kept))
        visits.records[message.client] = copy.deepcopy(kept)  # as it is now: what is edited in place later must differ
        return update, kept

    visit.visit_steps = watched
    try:
        yield visits
    finally:
        visit.visit_steps = visit_steps


def server_of(trainer: FederatedTrainer) -> Server:
    """Return the server of a trainer that has run."""
    assert trainer.server is not None
    return trainer.server


def deployed(trainer: FederatedTrainer) -> Iterator[tuple[str, LightningModule]]:
    """Yield a name and the module of the global model, if there is one, and of every client's deployed model."""
    server = server_of(trainer)
    module = server.global_module(None)
    if module is not None:
        yield "the global model", module
    for client in server.clients:
        yield f"client '{client}'", trainer.client(client).module


def assert_same(a: FederatedTrainer, b: FederatedTrainer, text: str, rows: bool = True) -> None:
    """Assert that two runs have the same models, states and (if `rows`) scores. `text` begins the message."""
    first, second = server_of(a), server_of(b)
    for what in ("models", "state"):
        assert same_tree(getattr(first, what), getattr(second, what)), f"{text}: in server.{what}."
    for client in {*a.store, *b.store}:
        mine, theirs = a.store.get(client), b.store.get(client)
        for what in ("personal", "state", "lightning"):
            assert same_tree(getattr(mine, what), getattr(theirs, what)), f"{text}: client '{client}', {what}."
    if rows:
        assert sorted(map(str, a.rows)) == sorted(map(str, b.rows)), f"{text}: in the scores."


def same_tree(a: Any, b: Any) -> bool:
    """Return True if two nested values are equal; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_tree(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_tree(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors of a nested value."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors_in(value)]
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in tensors_in(value)]
    return []


def as_lists(value: Any) -> Any:
    """Return a value in which modules and tensors are lists, so that they are compared by content."""
    if isinstance(value, torch.nn.Module):
        return {"module": type(value).__name__, **{name: v.tolist() for name, v in module_state(value).items()}}
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_lists(item) for item in value]
    return value

"""A client that is open: built, with its merged model, and bound to every callback."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from fedlightning.client.client import Client
from fedlightning.client.record import ClientRecord
from fedlightning.compat.attached import detached
from fedlightning.contract import Stage
from fedlightning.contract.messages import Message
from fedlightning.tensors import load_state
from fedlightning.tensors.parametrized import settle

if TYPE_CHECKING:
    from fedlightning.client.runtime import LocalRunner


@contextmanager
def open_client(
    runner: LocalRunner, message: Message, record: ClientRecord, evaluating: bool = False
) -> Iterator[Client]:
    """Open a client with its merged model (stage L1), on a copy of its record, bound to every callback."""
    entries = runner.blueprint.plain_entries(record.personal | message.state, message.client)
    module = runner.blueprint.build(message.client) if entries is None else None
    client = Client(runner, copy.copy(message), record.copy(), module, entries)
    client.evaluating = evaluating
    client.received = dict(message.state)
    client.message.state = dict(message.state)
    bind(runner, client)
    try:
        if entries is None:
            runner.callbacks.event("on_build", client, client.message)
            if client.record.personal:
                load_state(client.module, client.record.personal)
            runner.callbacks.event("on_receive", client, client.message)
            load_state(client.module, client.message.state)
            settle(client.module, client.message.state)
        yield client
    finally:
        for callback in runner.callbacks:
            for name in ("_client", "log", "log_dict"):  # Lightning leaves the last two on every callback
                callback.__dict__.pop(name, None)
        if not client.is_unbuilt:
            detached(client.module)


def bind(runner: LocalRunner, client: Client) -> None:
    """Bind a client to every callback. An engine with several open clients binds the one that it continues with."""
    for callback in runner.callbacks:
        callback._client = client


def find_personal_module(runner: LocalRunner, client: Client, stage: Stage) -> LightningModule:
    """Return the model that the client deploys at `stage`."""
    owner = runner.callbacks.role("personal_module")
    return client.module if owner is None else owner.personal_module(client, stage)


def find_scored_splits(runner: LocalRunner, splits: Sequence[str]) -> list[str]:
    """Return the splits whose scores may leave: those on validation data do not where a callback withholds them."""
    withheld = bool(runner.callbacks.withholding("scores"))
    return [split for split in splits if split != "val" or not withheld]

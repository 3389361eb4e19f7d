"""What of a federation is saved and restored: the server and the clients' records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlightning.compat.attached import detached_copy
from fedlightning.federation.server import Server
from fedlightning.federation.store import ClientStore
from fedlightning.hooks import POOLED
from fedlightning.run import persistence
from fedlightning.tensors import load_state, module_state
from fedlightning.visit.record import ClientRecord

FIELDS = ("models", "state", "checkpoints", "bytes_up", "bytes_down", "steps")
"""Attributes of the server that a saved state holds."""


def save_state(folder: Path, server: Server, store: ClientStore, rounds_done: int, extra: dict[str, Any]) -> None:
    """Write the state after `rounds_done` rounds.

    Args:
        folder: `checkpoints/last`.
        server: The server.
        store: The clients' records; only those that have changed are written.
        rounds_done: Finished rounds.
        extra: Plain values to keep with the state.
    """
    persistence.save(
        folder,
        rounds_done,
        {name: getattr(server, name) for name in FIELDS},
        store.changed,
        lambda client: vars(store.get(client)),
        lambda: module_state(server.blueprint.template),
        extra,
    )
    store.changed.clear()


def restore_state(folder: Path, server: Server, store: ClientStore) -> tuple[int, dict[str, Any]]:
    """Put back what :func:`save_state` wrote.

    Returns:
        Finished rounds, and the extra values.

    Raises:
        FileNotFoundError: If there is no complete state in `folder`.
        DamagedStateError: If every state in it is damaged.
        ValueError: If the state belongs to other clients or another model; the sentence says which.
    """
    saved = persistence.load(folder)
    for model, state in saved.server["models"].items():
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        now = {name: tuple(shape) for name, shape in server.shapes.items()}
        if shapes != now:
            differing = sorted(set(shapes.items()) ^ set(now.items()))[0][0]
            raise ValueError(
                f"The state in {folder} holds a different model ('{model}' differs at '{differing}'). "
                "Resume with the module and callbacks that the run was started with."
            )
    unknown = sorted(set(saved.files) - set(server.clients) - {POOLED})
    if unknown:
        raise ValueError(
            f"The state in {folder} knows client '{unknown[0]}', the data does not. Use the run's own data."
        )
    template = detached_copy(server.blueprint.template)
    load_state(template, saved.template())
    server.blueprint.template = template
    server.module = server.blueprint.build("server")
    for name in FIELDS:
        setattr(server, name, saved.server[name])
    for client, record in saved.records():
        store.put(client, ClientRecord(**record), changed=False)
    return saved.rounds_done, saved.extra

"""What of a federation is saved and restored: the server and the clients' records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlightning.client.record import ClientRecord
from fedlightning.compat.attached import detached_copy
from fedlightning.contract import POOLED
from fedlightning.engines.records import ClientStore
from fedlightning.errors import DamagedStateError
from fedlightning.resume import state_files as persistence
from fedlightning.server.server import Server
from fedlightning.tensors import load_state, module_state

LOOP = "loop"
"""Entry of what the loop keeps from round to round."""
SERVER_TYPES: dict[str, Any] = {
    **dict.fromkeys(("models", "state", "checkpoints", "model_architectures", LOOP), dict),
    **dict.fromkeys(("bytes_up", "bytes_down", "steps"), int),
    "time": float,
}
"""What a saved state holds of the server, and of which type."""
EXTRA = (
    *("seconds", "evaluation_seconds", "history", "spent_of_rounds", "final", "lasting", "clients", "held_out"),
    *("metrics", "loggers", "spent", "failures", "stopped", "local_loop"),
)
"""Values that lie beside the server's state and the records."""
RECORD_TYPES: dict[str, Any] = {
    field.name: {"int": int, "float": int | float, "bool": bool}.get(str(field.type), dict)
    for field in fields(ClientRecord)
}


def save_state(
    folder: Path,
    server: Server,
    store: ClientStore,
    rounds_done: int,
    extra: dict[str, Any],
    in_flight: dict[str, Any] | None = None,
) -> None:
    """Write the state after `rounds_done` rounds."""
    persistence.save(
        folder,
        rounds_done,
        server.state_dict() | {LOOP: in_flight or {}},
        store.changed,
        lambda client: vars(store.get(client)),
        lambda: module_state(server.blueprint.template),
        extra,
    )
    store.saved()


def restore_state(
    folder: Path, server: Server, store: ClientStore, go_on: bool = False
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Put back what :func:`save_state` wrote."""
    saved = persistence.load(folder, server.max_rounds if go_on else 0)
    found = saved.server()
    _check(saved, "the server's state", found, SERVER_TYPES)
    for model, state in found["models"].items():
        if not _is_state(state):
            raise DamagedStateError(f"The state in {folder} is damaged: model '{model}' is no named tensors.")
        architecture = found["model_architectures"].get(model)
        if architecture is not None and architecture not in server.models.architectures:
            raise ValueError(
                f"The state in {folder} has a model '{model}' of architecture '{architecture}', which is not among "
                f"{list(server.models.architectures)}. Resume with the ClientModels that the run was started with."
            )
        own = server.models.main if architecture is None else server.models.architectures[architecture]
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        now = {name: tuple(shape) for name, shape in own.shapes.items()}
        if shapes != now:
            differing = sorted(set(shapes.items()) ^ set(now.items()))[0][0]
            raise ValueError(
                f"The state in {folder} holds a different model ('{model}' differs at '{differing}'). "
                "Resume with the module and callbacks that the run was started with."
            )
    unknown = sorted(set(saved.files) - set(server.clients) - {POOLED})
    if unknown and unknown[0] in server.held_out:
        raise ValueError(
            f"The state in {folder} is of a run that trained client '{unknown[0]}', which held_out keeps out of training "
            "now. Resume with the held_out that the run was started with."
        )
    if unknown:
        raise ValueError(
            f"The state in {folder} knows client '{unknown[0]}', the data does not. Use the run's own data (between "
            "machines: wait for all of its sites), or begin a new run."
        )
    template, began = detached_copy(server.blueprint.template), saved.template()
    now = {name: value.shape for name, value in module_state(template).items()}
    if not _is_state(began) or any(now.get(name) != value.shape for name, value in began.items()):
        raise ValueError(
            f"The state in {folder} began with a different module. Resume with the module that the run was started with."
        )
    load_state(template, began)
    server.blueprint.template = template
    server.models.rebuild(server.blueprint)
    server.load_state_dict(found)
    for client, record in saved.records():
        _check(saved, f"the record of client '{client}'", record, RECORD_TYPES)
        store.put(client, ClientRecord(**record), changed=False)
    return saved.rounds_done, saved.extra, found[LOOP]


def check_extra(folder: Path, extra: dict[str, Any], parts: Sequence[str]) -> None:
    """Refuse a state without the values that lie beside the server's state, those of parts among them."""
    missing = [name for name in (*EXTRA, *parts) if name not in extra]
    if missing:
        raise DamagedStateError(f"The state in {folder} is damaged: its manifest has no '{missing[0]}'.")


def _check(saved: persistence.SavedState, what: str, found: dict[str, Any], types: dict[str, Any]) -> None:
    """Refuse a part of a state that has other entries than it should."""
    for name in [*types, *found]:
        kind = types.get(name)
        if kind is None or name not in found or not _fits(name, found[name], kind):
            what_it_is = "missing" if name not in found else "unknown" if kind is None else "not what it should be"
            raise DamagedStateError(f"The state in {saved.folder} is damaged: '{name}' in {what} is {what_it_is}.")


def _fits(name: str, value: Any, kind: Any) -> bool:
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
        return False
    if name == "personal":
        return _is_state(value)
    if name == LOOP:
        return all(isinstance(key, str) for key in value)
    if name == "model_architectures":
        return isinstance(value, dict) and all(isinstance(word, str) for pair in value.items() for word in pair)
    return kind is not dict or all(isinstance(key, str) and isinstance(entry, dict) for key, entry in value.items())


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )

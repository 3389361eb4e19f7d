"""The complete state of a federation on disk, so that a run can be killed at any moment and go on.

``checkpoints/last/`` holds immutable files and one manifest that names them. A round writes files for what changed,
then replaces the manifest in one atomic rename, then deletes what no manifest names any more. So there is a complete,
consistent state on disk at every instant, and a round rewrites only the clients that took part.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from fedlightning.attached import detached_copy
from fedlightning.client import ClientRecord
from fedlightning.engines.sequential import ClientStore
from fedlightning.server import Server
from fedlightning.tensors import load_state, module_state

MANIFEST = "manifest.json"
TEMPLATE = "template.pt"
VERSION = 1


def save(folder: Path, server: Server, store: ClientStore, rounds_done: int, extra: dict[str, Any]) -> None:
    """Write the state after ``rounds_done`` rounds.

    Args:
        folder: ``checkpoints/last``; made if need be.
        server, store: the whole state.
        rounds_done: finished rounds.
        extra: plain values to keep in the manifest (what the run was started with, seconds spent ...).
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = _read_manifest(folder)
    if old is None:  # what clients start with that have not been visited yet
        write_atomically(folder / TEMPLATE, module_state(server.runner.template))
    files: dict[str, str] = dict(old["clients"]) if old else {}
    # no file that a manifest names is ever rewritten
    stamp = f"{rounds_done:06d}" + ("-final" if extra.get("final") else "")
    for client in sorted(store.changed):
        name = f"client-{quote(client, safe='')}-{stamp}.pt"
        write_atomically(folder / name, vars(store.get(client)))
        files[client] = name
    server_file = f"server-{stamp}.pt"
    write_atomically(
        folder / server_file,
        {
            "models": server.models,
            "state": server.state,
            "checkpoints": server.checkpoints,
            "bytes_up": server.bytes_up,
            "bytes_down": server.bytes_down,
            "steps": server.steps,
        },
    )
    manifest = {"version": VERSION, "rounds_done": rounds_done, "server": server_file, "clients": files, "extra": extra}
    write_text_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
    store.changed.clear()
    keep = {MANIFEST, TEMPLATE, server_file, *files.values()}
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink()


def load(folder: Path, server: Server, store: ClientStore) -> tuple[int, dict[str, Any]]:
    """Restore what :func:`save` wrote.

    Returns:
        Finished rounds, and the manifest's extra values.

    Raises:
        FileNotFoundError: if there is no complete state in ``folder``.
        ValueError: if the state belongs to other clients or another model; the sentence says which.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"There is nothing to resume in {folder}: no {MANIFEST}. Start without resume.")
    saved = _load(folder / manifest["server"])
    for model, state in saved["models"].items():
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        now = {name: tuple(shape) for name, shape in server.shapes.items()}
        if shapes != now:
            differing = sorted(set(shapes.items()) ^ set(now.items()))[0][0]
            raise ValueError(
                f"The state in {folder} holds a different model ('{model}' differs at '{differing}'). "
                "Resume with the module and callbacks that the run was started with."
            )
    unknown = sorted(set(manifest["clients"]) - set(server.clients) - {"pooled"})
    if unknown:
        raise ValueError(
            f"The state in {folder} knows client '{unknown[0]}', the data does not. Use the run's own data."
        )
    template = detached_copy(server.runner.template)
    load_state(template, _load(folder / TEMPLATE))
    server.runner.template = template
    server.module = server.runner.build("server")
    server.models, server.state, server.checkpoints = saved["models"], saved["state"], saved["checkpoints"]
    server.bytes_up, server.bytes_down, server.steps = saved["bytes_up"], saved["bytes_down"], saved["steps"]
    for client, name in manifest["clients"].items():
        store.put(client, ClientRecord(**_load(folder / name)), changed=False)
    return int(manifest["rounds_done"]), manifest["extra"]


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.exists() else None


def _load(path: Path) -> Any:
    # these are the run's own files; optimizer and callback states may hold any plain Python value
    return torch.load(path, map_location="cpu", weights_only=False)


def write_atomically(path: Path, value: Any) -> None:
    """``torch.save`` so that the file is either complete or not there."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save(value, temporary)
    os.replace(temporary, path)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)

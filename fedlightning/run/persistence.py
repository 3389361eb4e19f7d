"""The complete state of a federation on disk, so that a run can be killed at any moment and go on.

`checkpoints/last/` holds immutable files and one manifest that names them. A round writes files for what changed, then
replaces the manifest in one atomic rename, then deletes what no manifest names any more. So there is a complete,
consistent state on disk at every instant, and a round rewrites only the clients that took part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from fedlightning.run.files import write_atomically, write_text_atomically
from fedlightning.tensors import State

MANIFEST = "manifest.json"
TEMPLATE = "template.pt"
VERSION = 1


def save(
    folder: Path,
    rounds_done: int,
    server: Mapping[str, Any],
    changed: Iterable[tuple[str, Mapping[str, Any]]],
    template: Callable[[], State],
    extra: dict[str, Any],
) -> None:
    """Write the state after `rounds_done` rounds.

    Args:
        folder: `checkpoints/last`; made if need be.
        rounds_done: Finished rounds.
        server: The server's state as a tree of tensors and plain values.
        changed: Clients whose records have changed since the last save, with the records' fields.
        template: Gives the state of the user's module, which clients that were never visited start with.
        extra: Plain values to keep in the manifest (what the run was started with, seconds spent ...).
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = _read_manifest(folder)
    if old is None:
        write_atomically(folder / TEMPLATE, template())
    files: dict[str, str] = dict(old["clients"]) if old else {}
    # no file that a manifest names is ever rewritten
    stamp = f"{rounds_done:06d}" + ("-final" if extra.get("final") else "")
    for client, record in changed:
        name = f"client-{quote(client, safe='')}-{stamp}.pt"
        write_atomically(folder / name, record)
        files[client] = name
    server_file = f"server-{stamp}.pt"
    write_atomically(folder / server_file, server)
    manifest = {"version": VERSION, "rounds_done": rounds_done, "server": server_file, "clients": files, "extra": extra}
    write_text_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
    keep = {MANIFEST, TEMPLATE, server_file, *files.values()}
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink()


@dataclass(frozen=True)
class SavedState:
    """What :func:`save` wrote.

    Attributes:
        folder: Where it lies.
        rounds_done: Finished rounds.
        extra: The manifest's extra values.
        files: File of each client's record.
        server: The server's state.
    """

    folder: Path
    rounds_done: int
    extra: dict[str, Any]
    files: Mapping[str, str]
    server: dict[str, Any]

    def template(self) -> State:
        """Read the state of the user's module as the run began."""
        state: State = _load(self.folder / TEMPLATE)
        return state

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Read the clients' records, one after another, as their fields."""
        for client, name in self.files.items():
            yield client, _load(self.folder / name)


def load(folder: Path) -> SavedState:
    """Read the state in a folder.

    Raises:
        FileNotFoundError: If there is no complete state in `folder`.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"There is nothing to resume in {folder}: no {MANIFEST}. Start without resume.")
    server = _load(folder / manifest["server"])
    return SavedState(folder, int(manifest["rounds_done"]), manifest["extra"], manifest["clients"], server)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.exists() else None


def _load(path: Path) -> Any:
    # these are the run's own files; optimizer and callback states may hold any plain Python value
    return torch.load(path, map_location="cpu", weights_only=False)

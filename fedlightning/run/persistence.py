"""The complete state of a federation on disk, so that a run can be killed at any moment and go on.

`checkpoints/last/` holds immutable files and manifests that name them, with their checksums. A round writes files for what
changed, then puts its manifest in place in one atomic rename, then deletes what no kept manifest names any more. So there is
a complete, consistent state on disk at every instant, a round rewrites only the clients that took part, and should the newest
state be damaged the one before it is still there.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlightning.messages import tree_bytes
from fedlightning.run.files import readable_json, sha256, sync_folder, write_atomically, write_text_atomically
from fedlightning.tensors import State

MANIFEST = "manifest.json"
BEFORE = "manifest-before.json"
"""The manifest of the state before the newest one."""
TEMPLATE = "template.pt"
VERSION = 2
FIELDS = {"version", "rounds_done", "server", "clients", "extra"}
"""Entries of every manifest."""
PACK = 2**28
"""Bytes of records in one file, at most (but one record at least): what is held in memory while it is written."""


class DamagedStateError(ValueError):
    """A saved state whose files are not those that were written."""


def save(
    folder: Path,
    rounds_done: int,
    server: Mapping[str, Any],
    changed: Iterable[str],
    record_of: Callable[[str], Mapping[str, Any]],
    template: Callable[[], State],
    extra: dict[str, Any],
) -> None:
    """Write the state after `rounds_done` rounds.

    Args:
        folder: `checkpoints/last`; made if need be.
        rounds_done: Finished rounds.
        server: The server's state as a tree of tensors and plain values.
        changed: Clients whose records have changed since the last save.
        record_of: Gives the fields of a client's record.
        template: Gives the state of the user's module, which clients that were never visited start with.
        extra: Plain values to keep in the manifest (what the run was started with, seconds spent ...).
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = _read_manifest(folder / MANIFEST)
    sums: dict[str, str] = dict(old.get("sha256", {})) if old else {}
    if old is None:
        write_atomically(folder / TEMPLATE, template())
        sums[TEMPLATE] = sha256(folder / TEMPLATE)
    files: dict[str, str] = dict(old["clients"]) if old else {}
    sizes: dict[str, int] = dict(old.get("packs", {})) if old else {}
    # no file that a manifest names is ever rewritten
    stamp = f"{rounds_done:06d}" + ("-final" if extra.get("final") else "")
    for number, pack in enumerate(_packs(sorted({*changed, *_scattered(files, sizes)}), record_of)):
        name = f"records-{stamp}-{number}.pt"
        write_atomically(folder / name, pack)
        files |= dict.fromkeys(pack, name)
        sizes[name] = len(pack)
        sums[name] = sha256(folder / name)
    server_file = f"server-{stamp}.pt"
    write_atomically(folder / server_file, dict(server))
    sums[server_file] = sha256(folder / server_file)
    used = {TEMPLATE, server_file, *files.values()}
    manifest = {
        "version": VERSION,
        "rounds_done": rounds_done,
        "server": server_file,
        "clients": files,
        "packs": {name: size for name, size in sizes.items() if name in used},
        "sha256": {name: value for name, value in sums.items() if name in used},
        "extra": extra,
    }
    sync_folder(folder)
    if old is not None:
        write_text_atomically(folder / BEFORE, readable_json(old, levels=2))
    write_text_atomically(folder / MANIFEST, readable_json(manifest, levels=2))
    keep = {MANIFEST, BEFORE, *used, *_files_of(old)}
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink()


def _packs(
    clients: Iterable[str], record_of: Callable[[str], Mapping[str, Any]]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the clients' records in files of bounded size: a file each would cost a thousand clients a thousand syncs."""
    pack: dict[str, dict[str, Any]] = {}
    size = 0
    for client in clients:
        record = dict(record_of(client))
        more = tree_bytes(record)
        if pack and size + more > PACK:
            yield pack
            pack, size = {}, 0
        pack[client] = record
        size += more
    if pack:
        yield pack


def _scattered(files: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    """Return the clients whose files are mostly out of date, to be written again: so the disk holds two of each at most."""
    current = Counter(files.values())
    return [client for client, name in files.items() if 2 * current[name] < sizes.get(name, 1)]


def _files_of(manifest: Mapping[str, Any] | None) -> set[str]:
    return {TEMPLATE, manifest["server"], *manifest["clients"].values()} if manifest else set()


@dataclass(frozen=True)
class SavedState:
    """A state that :func:`save` has written.

    Attributes:
        folder: Where it lies.
        rounds_done: Finished rounds.
        extra: The manifest's extra values.
        files: File of each client's record.
        server: The server's state.
        packed: Whether a file holds the records of several clients.
    """

    folder: Path
    rounds_done: int
    extra: dict[str, Any]
    files: Mapping[str, str]
    server: dict[str, Any]
    packed: bool

    def template(self) -> State:
        """Read the state of the user's module as the run began."""
        state: State = _load(self.folder / TEMPLATE)
        return state

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Read the clients' records, one file after another, as their fields."""
        if not self.packed:
            yield from ((client, _load(self.folder / name)) for client, name in self.files.items())
            return
        found: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(self.files.values()):
            pack = _load(self.folder / name)
            found |= {client: pack[client] for client in pack if self.files.get(client) == name}
        yield from ((client, found.pop(client)) for client in self.files)


def load(folder: Path) -> SavedState:
    """Read the newest undamaged state in a folder.

    A newest state that is damaged is set aside with a warning, and the one before it is read.

    Raises:
        FileNotFoundError: If there is no state in `folder`.
        DamagedStateError: If every state in it is damaged.
    """
    if not (folder / MANIFEST).exists() and not (folder / BEFORE).exists():
        raise FileNotFoundError(f"There is nothing to resume in {folder}: no {MANIFEST}. Start without resume.")
    try:
        return _checked(folder, MANIFEST)
    except DamagedStateError as damage:
        try:
            before = _checked(folder, BEFORE)
        except DamagedStateError:
            raise damage from None
        (folder / BEFORE).replace(folder / MANIFEST)  # its files' names are free to be written again
        warnings.warn(
            f"{damage} The state before it, after round {before.rounds_done}, is used.", UserWarning, stacklevel=3
        )
        return before


def _checked(folder: Path, manifest_file: str) -> SavedState:
    try:
        manifest = _read_manifest(folder / manifest_file)
    except (ValueError, UnicodeDecodeError):
        raise DamagedStateError(f"The newest state in {folder} is damaged: {manifest_file} is no JSON.") from None
    if manifest is None:
        raise DamagedStateError(f"The newest state in {folder} is damaged: {manifest_file} is missing.")
    if not isinstance(manifest, dict) or not manifest.keys() >= FIELDS:
        raise DamagedStateError(f"The newest state in {folder} is damaged: {manifest_file} is no manifest.")
    for name in sorted(_files_of(manifest)):
        path, expected = folder / name, manifest.get("sha256", {}).get(name)
        if not path.exists():
            raise DamagedStateError(f"The newest state in {folder} is damaged: {name} is missing.")
        if expected is not None and sha256(path) != expected:
            raise DamagedStateError(
                f"The newest state in {folder} is damaged: {name} is not the file that was written."
            )
    server = _load(folder / manifest["server"])
    packed = manifest["version"] >= 2
    return SavedState(folder, int(manifest["rounds_done"]), manifest["extra"], manifest["clients"], server, packed)


def _read_manifest(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _load(path: Path) -> Any:
    # these are the run's own files; optimizer and callback states may hold any plain Python value
    return torch.load(path, map_location="cpu", weights_only=False)

"""The complete state of a federation on disk, so that a run can be killed at any moment and go on.

`checkpoints/last/` holds immutable files and manifests that name them, with their checksums. A round writes files for what
changed, then puts its manifest in place in one atomic rename, then deletes what no kept manifest names any more. So there is
a complete, consistent state on disk at every instant, a round rewrites only the clients that took part, and should the newest
state be damaged the one before it is still there.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlightning.codec.tree import FileWriter, NotPlainError, file_of
from fedlightning.codec.tree import load as load_values
from fedlightning.errors import DamagedStateError
from fedlightning.resume.manifest import CHECK, fault_of_extra, fault_of_manifest, heads_of, shortened, sum_of, whole
from fedlightning.storage.files import (
    UnreadableError,
    is_writing_process,
    read_json,
    readable_json,
    sha256,
    sync_folder,
    write_text_atomically,
    writing,
)
from fedlightning.tensors import State

MANIFEST = "manifest.json"
BEFORE = "manifest-before.json"
"""The manifest of the state before the newest one."""
TEMPLATE = "template.safetensors"
VERSION = 3
"""Version of the format: values and tensors, which cannot run code, and the manifest that names them."""
PACK = 2**28
"""Bytes of records after which another file is begun: what is held in memory while it is written."""


LONG = 10_000
"""Entries above which a value that stays as it is lies in a file of its own, and not in every manifest."""
ELSEWHERE = "elsewhere"
"""Of the extra values, those that lie in files of their own: file by name."""


def save(
    folder: Path,
    rounds_done: int,
    server: Mapping[str, Any],
    changed: Iterable[str],
    record_of: Callable[[str], Mapping[str, Any]],
    template: Callable[[], State],
    extra: dict[str, Any],
) -> None:
    """Write the state after `rounds_done` rounds."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        old = _read_manifest(folder / MANIFEST)
        sums: dict[str, str] = dict(old["sha256"]) if old else {}
        if old is None:
            file_of(template(), "the module").save(folder / TEMPLATE)
            sums[TEMPLATE] = sha256(folder / TEMPLATE)
        files: dict[str, str] = dict(old["clients"]) if old else {}
        sizes: dict[str, int] = dict(old["packs"]) if old else {}
        # no file that a manifest names is ever rewritten
        stamp = f"{rounds_done:06d}" + ("-final" if extra.get("final") else "")
        for number, (clients, pack) in enumerate(_packs(sorted({*changed, *_scattered(files, sizes)}), record_of)):
            name = f"records-{stamp}-{number}.safetensors"
            pack.save(folder / name)
            files |= dict.fromkeys(clients, name)
            sizes[name] = len(clients)
            sums[name] = sha256(folder / name)
        extra = shortened(extra, folder, old["extra"] if old else None)
        elsewhere = [*extra.get(ELSEWHERE, {}).values(), *heads_of(extra)]
        sums |= {name: sha256(folder / name) for name in elsewhere if name not in sums}
        server_file = f"server-{stamp}.safetensors"
        file_of(server, "the server").save(folder / server_file)
        sums[server_file] = sha256(folder / server_file)
        used = {TEMPLATE, server_file, *files.values(), *elsewhere}
        manifest = {
            "version": VERSION,
            "rounds_done": rounds_done,
            "server": server_file,
            "clients": files,
            "packs": {name: size for name, size in sizes.items() if name in used},
            "sha256": {name: value for name, value in sums.items() if name in used},
            "extra": extra,
        }
        manifest[CHECK] = sum_of(json.loads(json.dumps(manifest)))
        sync_folder(folder)
        if old is not None:
            write_text_atomically(folder / BEFORE, readable_json(old, levels=2))
        write_text_atomically(folder / MANIFEST, readable_json(manifest, levels=2))
        keep = {MANIFEST, BEFORE, *used, *_files_of(old)}
        for path in folder.iterdir():
            if path.name not in keep and not path.is_dir():
                path.unlink()
            elif path.suffix == ".safetensors" and path.stat().st_mode & 0o077:  # somebody has opened it to others
                path.chmod(0o600)


def store_long_values(folder: Path, lasting: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that are in every state of a run, as extra values for :func:`save`; write the long ones to files.

    A manifest is written after every round, and the ids of a hundred thousand clients need not be.
    """
    short = {name: value for name, value in lasting.items() if len(value) <= LONG}
    elsewhere = {}
    for name in lasting.keys() - short.keys():
        text = json.dumps(lasting[name])
        elsewhere[name] = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / elsewhere[name], text)
    return short | ({ELSEWHERE: elsewhere} if elsewhere else {})


def _packs(
    clients: Iterable[str], record_of: Callable[[str], Mapping[str, Any]]
) -> Iterator[tuple[list[str], FileWriter]]:
    """Yield the clients' records in files of bounded size: a file each would cost a thousand clients a thousand syncs."""
    names: list[str] = []
    pack = FileWriter()
    for client in clients:
        pack.add(client, dict(record_of(client)), f"client '{client}'")
        names.append(client)
        if pack.num_bytes > PACK:
            yield names, pack
            names, pack = [], FileWriter()
    if names:
        yield names, pack


def _scattered(files: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    """Return the clients whose files are mostly out of date, to be written again: so the disk holds two of each at most."""
    current = Counter(files.values())
    return [client for client, name in files.items() if 2 * current[name] < sizes[name]]


def _files_of(manifest: Mapping[str, Any] | None) -> set[str]:
    if not manifest:
        return set()
    elsewhere = manifest["extra"].get(ELSEWHERE, {}).values()
    return {TEMPLATE, manifest["server"], *manifest["clients"].values(), *elsewhere, *heads_of(manifest["extra"])}


@dataclass(frozen=True)
class SavedState:
    """A state that :func:`save` has written.

    Attributes:
        folder: Where it lies.
        rounds_done: Finished rounds.
        extra: The manifest's extra values.
        files: File of each client's record.
        server_file: File of the server's state.
    """

    folder: Path
    rounds_done: int
    extra: dict[str, Any]
    files: Mapping[str, str]
    server_file: str

    def server(self) -> dict[str, Any]:
        """Read the server's state."""
        return _load(self.folder / self.server_file)

    def template(self) -> State:
        """Read the state of the user's module as the run began."""
        return _load(self.folder / TEMPLATE)

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Read the clients' records, one file after another, as their fields."""
        records: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(self.files.values()):
            pack = _load(self.folder / name)
            records |= {client: pack[client] for client in pack if self.files.get(client) == name}
        for client, name in self.files.items():
            if not isinstance(records.get(client), dict):
                raise DamagedStateError(f"The state in {self.folder} is damaged: {name} has no record of '{client}'.")
            yield client, records.pop(client)


def load(folder: Path, max_rounds: int = 0) -> SavedState:
    """Read the newest undamaged state in a folder.

    A newest state that is damaged is set aside with a warning, and the one before it is read.
    """
    newest = _newest(folder)
    return _not_over(newest) if max_rounds > newest.rounds_done and _is_over(newest) else newest


FINAL, FLUSHED = "final", "flushed"
"""Entries of the extra values of a run that is over: the visits after its last round were made; what that round did that it
would not have done in a longer run, such as to wait for all jobs in flight."""


def _is_over(saved: SavedState) -> bool:
    ended = saved.extra.get("stopped")  # a callback's decision holds, however many rounds there might be
    return (ended is None or ended["round"] > saved.rounds_done) and bool(
        saved.extra.get(FINAL) or saved.extra.get(FLUSHED)
    )


def _not_over(newest: SavedState) -> SavedState:
    """Return the state before what a run did because it was over, to go on from there: see :func:`restore_previous_state`.

    Where it is lost, a run goes on from its end, with a warning: what clients keep was changed by the visits after that.
    """
    folder, kept, done = newest.folder, newest.rounds_done, newest.extra.get(FLUSHED)
    if done is True:  # an older state, of a time when no other round was another one at the end
        done = "waited for all jobs in flight (at_end='flush')"
    try:
        before = _checked(folder, BEFORE)
    except DamagedStateError:
        before = _checked(folder, MANIFEST)  # another rank of this run may have put it there by now
    if _is_over(before):
        if done:
            raise ValueError(
                f"Round {kept} of the run in {folder} was its last, and {done}. "
                "More rounds would not be those of a longer run, and there is no state from before that round. Start a new "
                "run with more rounds."
            )
        warnings.warn(
            f"The run in {folder} was over after round {kept}, and the state before the visits after that is lost: "
            "it goes on with what these visits left at clients, so it differs from a run with more rounds from the start.",
            UserWarning,
            stacklevel=4,
        )
        return newest
    if before.rounds_done < kept:
        warnings.warn(
            f"Round {before.rounds_done + 1} is the next one: the run in {folder} was over after round {kept}, which {done}, "
            "and in a longer run it does not.",
            UserWarning,
            stacklevel=4,
        )
    return replace(before, extra=before.extra | {UNDONE: True})


def restore_previous_state(folder: Path) -> None:
    """Make the state before what a run did because it was over its newest one, once nothing refuses to go on from it."""
    if is_writing_process():
        with writing(folder):
            (folder / BEFORE).replace(folder / MANIFEST)  # the names of the others' files are free to be written again


UNDONE = "undone"
"""Entry of the extra values of a state that was over, and is no longer: loggers may have seen more than it says."""


def _newest(folder: Path) -> SavedState:
    if not (folder / MANIFEST).exists() and not (folder / BEFORE).exists():
        raise FileNotFoundError(f"There is nothing to resume in {folder}: no {MANIFEST}. Start without resume.")
    try:
        return _checked(folder, MANIFEST)
    except DamagedStateError as damage:
        try:
            before = _checked(folder, BEFORE)
        except DamagedStateError:
            raise damage from None
        with writing(folder):
            (folder / BEFORE).replace(folder / MANIFEST)  # its files' names are free to be written again
        warnings.warn(
            f"{damage} The state before it, after round {before.rounds_done}, is used.", UserWarning, stacklevel=4
        )
        return before


def _checked(folder: Path, manifest_file: str) -> SavedState:
    damaged = f"The newest state in {folder} is damaged:"
    try:
        manifest = _read_manifest(folder / manifest_file)
    except (UnreadableError, IsADirectoryError):
        raise DamagedStateError(f"{damaged} {manifest_file} is not JSON.") from None
    if manifest is None:
        raise DamagedStateError(f"{damaged} {manifest_file} is missing.")
    fault = fault_of_manifest(manifest)
    if fault is not None:
        raise DamagedStateError(f"{damaged} {manifest_file} is not a manifest{fault}.")
    if manifest["version"] != VERSION:
        raise ValueError(
            f"The state in {folder} was written by another version of FedLightning (format {manifest['version']}, this one "
            f"reads {VERSION}). Resume it with that version."
        )
    for name in sorted(_files_of(manifest)):
        path = folder / name
        if not path.is_file():
            raise DamagedStateError(f"{damaged} {name} is missing.")
        if sha256(path) != manifest["sha256"].get(name):
            raise DamagedStateError(f"{damaged} {name} is not the file that was written.")

    def read(file: str) -> Any:
        try:
            return read_json(folder / file)
        except UnreadableError:
            raise DamagedStateError(f"{damaged} {file} is not JSON.") from None

    extra = whole(manifest["extra"], read)
    extra |= {name: read(file) for name, file in extra.pop(ELSEWHERE, {}).items()}
    if (fault := fault_of_extra(extra)) is not None:
        raise DamagedStateError(f"{damaged} {manifest_file} is not a manifest{fault}.")
    return SavedState(folder, manifest["rounds_done"], extra, manifest["clients"], manifest["server"])


def _read_manifest(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _load(path: Path) -> dict[str, Any]:
    try:
        return load_values(path)
    except (UnreadableError, NotPlainError) as error:
        raise DamagedStateError(
            f"The state in {path.parent} is damaged: {path.name} cannot be read: {error}. Put it back from a copy."
        ) from None

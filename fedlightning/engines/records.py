"""The clients' records between visits: in memory, and on disk beyond a limit."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlightning.client.record import ClientRecord
from fedlightning.codec.plain import decode, encode
from fedlightning.storage.files import read_tensors, save_tensors, writing


@dataclass(frozen=True)
class Note:
    """What the server knows of a client's record without having it.

    Attributes:
        is_personal: Whether the client keeps entries of its own model.
        checkpoints: By callback, the models that it has selected: `name`, `stage` and `round`.
    """

    is_personal: bool = False
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, record: ClientRecord) -> Note:
        """Return the note of a record."""
        kept = record.checkpoints.items()
        return cls(bool(record.personal), {key: {n: entry[n] for n in NOTED} for key, entry in kept})


NOTED = ("name", "stage", "round")


class ClientStore:
    """The records of all clients, or what is known of them where they stay with the clients.

    Args:
        limit: Bytes of tensors to keep in memory. The least recently used records lie on disk, in a temporary folder
            that is removed with the process. `None`: a quarter of the machine's memory.

    Attributes:
        is_here: Whether the records are here. Else there are notes only (:meth:`tell`), and :meth:`get` knows no record.
        changed: Clients whose records have changed since they were last saved.
    """

    is_here = True

    def __init__(self, limit: int | None = None) -> None:
        self._notes: dict[str, Note] = {}
        self.limit = limit if limit is not None else default_limit()
        self.changed: set[str] = set()
        self._clients: dict[str, None] = {}  # in the order of their first visits
        self._records: OrderedDict[str, ClientRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._held = 0
        self._files: dict[str, Path] = {}  # what lies on disk is the record as it is now
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in memory."""
        return self._held

    def get(self, client: str) -> ClientRecord:
        """Return the client's record, an empty one if it has never been visited. Do not change it: put a new one."""
        if client in self._records:
            self._records.move_to_end(client)
        elif client in self._files:
            self._hold(client, ClientRecord(**decode(read_tensors(self._files[client]))))
        return self._records.get(client, ClientRecord())

    def note(self, client: str) -> Note:
        """Return what is known of the client's record."""
        return Note.of(self.get(client)) if self.is_here else self._notes.get(client, Note())

    def tell(self, client: str, note: Note) -> None:
        """Take what the client's machine says of a record that stays there."""
        self._clients[client] = None
        self._notes[client] = note

    def put(self, client: str, record: ClientRecord, changed: bool = True) -> None:
        """Replace the client's record."""
        self._clients[client] = None
        if client in self._files:
            self._files.pop(client).unlink()
        self._hold(client, record)
        if changed:
            self.changed.add(client)

    def forget(self, clients: Iterable[str], key: str) -> None:
        """Delete what a callback keeps at clients; who has nothing of it keeps its record as it is."""
        for client in (one for one in clients if key in self.get(one).state):
            record = self.get(client)
            self.put(client, replace(record, state={name: kept for name, kept in record.state.items() if name != key}))

    def saved(self) -> None:
        """Take note that everything has been saved."""
        self.changed.clear()

    def __contains__(self, client: str) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def _hold(self, client: str, record: ClientRecord) -> None:
        """Keep `record` in memory, and move others to disk where there is no room."""
        size = tensor_bytes(vars(record))
        self._held += size - self._sizes.get(client, 0)
        self._records[client], self._sizes[client] = record, size
        self._records.move_to_end(client)
        while self._held > self.limit and len(self._records) > 1:
            oldest, old = self._records.popitem(last=False)
            self._held -= self._sizes.pop(oldest)
            if oldest not in self._files:
                self._files[oldest] = self._write(oldest, old)

    def _write(self, client: str, record: ClientRecord) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fedlightning-clients-")
        path = Path(self._folder.name) / f"{list(self._clients).index(client)}.pt"
        with writing(path):
            save_tensors(encode(vars(record), f"client '{client}'"), path)
        return path


def tensor_bytes(tree: Any) -> int:
    """Count the bytes of the tensors in a tree of dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(tensor_bytes(value) for value in tree.values())
    return sum(tensor_bytes(value) for value in tree) if isinstance(tree, list | tuple) else 0


def default_limit() -> int:
    """Return a quarter of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4

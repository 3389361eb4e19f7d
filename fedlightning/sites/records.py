"""The records of a site's clients on its disk: every version that the server may come back to."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from pathlib import Path

from fedlightning.client.record import ClientRecord
from fedlightning.codec.plain import decode, encode
from fedlightning.compat.system import file_name_of
from fedlightning.errors import ConfigurationError
from fedlightning.storage.files import UnreadableError, read_tensors, sync_folder, write_atomically, writing

TERMS = "leaves"
"""Beside the fields of a record in its file: a hash of what could leave the client when it was kept."""
VERSIONS = 1000
"""Versions of a client's record in a run. A server that was resumed lets none go until it has saved its state twice."""


class UnknownVersionError(ConfigurationError):
    """A version of a record that is not on this site's disk."""


class Records:
    """The records of a site's clients in one folder, by run, client and version. A version is never changed.

    Args:
        folder: The folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = Records(Path(folder))
        ...     first = records.put("run", "a", ClientRecord(steps=1))
        ...     second = records.put("run", "a", ClientRecord(steps=2))
        ...     records.forget("run", "a", keep=[first])
        ...     records.get("run", "a", first).steps, records.versions("run", "a") == [first]
        (1, True)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: dict[
            tuple[str, str, str | None], tuple[str, ClientRecord]
        ] = {}  # the newest of each client is read no more

    def get(self, run: str, client: str, version: str, terms: str | None = None) -> ClientRecord:
        """Return a version of a client's record; the empty one is that of a client that was never visited."""
        if not version:
            return ClientRecord()
        known, record = self._last.get((run, client, terms), ("", ClientRecord()))
        if known == version:
            return record
        path = self._path(run, client, version)
        try:
            content = decode(read_tensors(path))
            kept_under = content.pop(TERMS, "")
            found = ClientRecord(**content)
        except FileNotFoundError:
            raise UnknownVersionError(
                f"the record of client '{client}' that the server goes on from ({version}) is not in the site's folder. "
                "Start the site with the folder that it had, or begin a new run"
            ) from None
        except (UnreadableError, TypeError, ValueError) as error:
            name = f"{path.parent.name}/{path.name}"
            raise UnknownVersionError(f"{name} is damaged ({type(error).__name__}). Put it back from a copy") from None
        if terms is not None and kept_under != terms:
            raise UnknownVersionError(
                f"the record of client '{client}' ({version}) was kept by a configuration of this site under which other "
                "parts of the model leave. Begin a new run"
            )
        self._last[run, client, terms] = version, found
        return found

    def put(self, run: str, client: str, record: ClientRecord, terms: str = "") -> str:
        """Write a record. It is on the disk when this returns its version."""
        version = uuid.uuid4().hex
        path = self._path(run, client, version)
        if len(self.versions(run, client)) >= VERSIONS:
            raise ConfigurationError(
                f"{VERSIONS} versions of the record of client '{client}' are here, and the server says of none that it needs "
                "it no more. Let it save its state more often (save_state)"
            )
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode({**vars(record), TERMS: terms}, f"client '{client}'"))
        sync_folder(path.parent)
        self._last[run, client, terms] = version, record
        return version

    def versions(self, run: str, client: str) -> list[str]:
        """Return the versions of a client's record that are here."""
        return sorted(path.stem for path in self._path(run, client, "x").parent.glob("*.pt"))

    def forget(self, run: str, client: str, keep: Collection[str]) -> None:
        """Remove all versions of a client's record but some."""
        for version in self.versions(run, client):
            if version not in keep:
                self._path(run, client, version).unlink(missing_ok=True)

    def _path(self, run: str, client: str, version: str) -> Path:
        if not all(part.isascii() and part.isalnum() for part in (run, version)):
            raise UnknownVersionError(
                f"{run!r:.60} and {version!r:.60} are no names of a run and a version of a record"
            )
        return self.folder / run / f"client-{file_name_of(client)}" / f"{version}.pt"

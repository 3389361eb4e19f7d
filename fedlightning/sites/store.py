"""What the server knows of records that stay at the sites: which version of each is in force, and a note on it."""

from __future__ import annotations

import uuid
from collections import deque
from typing import Any

from fedlightning.client.record import ClientRecord
from fedlightning.engines.records import ClientStore, Note

SITE = "site"
"""Entry of a record's `state` that stands for a record at a site."""
RESTS = 2
"""Saved states whose records are kept: the newest, and the one before it, to which a damaged one gives way."""


class SiteStore(ClientStore):
    """The versions of the clients' records, each as a small record that is saved and restored with the server's state.

    So a server that goes back to an earlier round goes back to the versions that the records had in that round.

    Attributes:
        run: Name of the run, for the sites; a run that is resumed has the name that it had.
    """

    is_here = False

    def __init__(self) -> None:
        super().__init__()
        self._run = uuid.uuid4().hex
        self._rests: deque[dict[str, str]] = deque(maxlen=RESTS)
        self._is_resumed = False

    @property
    def run(self) -> str:
        return next((self._of(client)["run"] for client in self if self._of(client)), self._run)

    def version(self, client: str) -> str:
        """Return the version of the client's record that is in force; empty: it has none yet."""
        return str(self._of(client).get("version", ""))

    def needed(self, client: str) -> list[str] | None:
        """Return the versions that the server may come back to; `None` while it does not know them all."""
        if self._is_resumed and len(self._rests) < RESTS:
            return None
        return sorted({self.version(client), *(rest.get(client, "") for rest in self._rests)} - {""})

    def keep(self, client: str, version: str, note: Note) -> None:
        """Put another version in force."""
        about = {
            "run": self.run,
            "version": version,
            "is_personal": note.is_personal,
            "checkpoints": note.checkpoints,
        }
        self.put(client, ClientRecord(state={SITE: about}))

    def note(self, client: str) -> Note:
        about = self._of(client)
        return Note(bool(about.get("is_personal")), dict(about.get("checkpoints", {})))

    def put(self, client: str, record: ClientRecord, changed: bool = True) -> None:
        super().put(client, record, changed)
        self._is_resumed |= not changed  # of a saved state, and perhaps not of the newest

    def saved(self) -> None:
        super().saved()
        self._rests.append({client: self.version(client) for client in self})

    def _of(self, client: str) -> dict[str, Any]:
        return self.get(client).state.get(SITE, {})

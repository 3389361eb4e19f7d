"""What a site tells of itself: a line where something happens, and the file of `fedlightning sites`.

What the server knows of records that stay at the sites: which version of each is in force, and a note on it.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedlightning.client.record import ClientRecord
from fedlightning.engines.contract import ClientRecords, RecordNote, Visit
from fedlightning.sites.status import LISTED, OwnStatus, StatusFile, of_clients, printable, stamped
from fedlightning.sites.task_bounds import VERBS, describe_task

SITE = "site"
"""Entry of a record's `state` that stands for a record at a site."""
RESTS = 2
"""Saved states whose records are kept: the newest, and the one before it, to which a damaged one gives way."""


class SiteStore(ClientRecords):
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

    def keep(self, client: str, version: str, note: RecordNote) -> None:
        """Put another version in force."""
        about = {"run": self.run, "version": version, "is_personal": note.is_personal, "checkpoints": note.checkpoints}
        self.put(client, ClientRecord(state={SITE: about}))

    def note(self, client: str) -> RecordNote:
        about = self._of(client)
        return RecordNote(bool(about.get("is_personal")), dict(about.get("checkpoints", {})))

    def put(self, client: str, record: ClientRecord, changed: bool = True) -> None:
        super().put(client, record, changed)
        self._is_resumed |= not changed  # of a saved state, and perhaps not of the newest

    def saved(self) -> None:
        super().saved()
        self._rests.append({client: self.version(client) for client in self})

    def _of(self, client: str) -> dict[str, Any]:
        return self.get(client).state.get(SITE, {})


def _say(text: str) -> None:
    print(stamped(text), flush=True)


class SiteLog:
    """Says what happens at a site, each thing when it changes, and keeps its file.

    Args:
        folder: The site's folder; `None`: there is no file.
        name: The site's name.
        server: Address of its server.
        clients: Its clients.
        say: Is told a line at a time.
    """

    def __init__(
        self,
        folder: Path | None,
        name: str,
        server: str = "",
        clients: Sequence[str] = (),
        say: Callable[[str], None] = _say,
    ) -> None:
        self._file = StatusFile(folder, every=0.0)  # beside what each task costs, a small file is nothing
        self._say = say
        self._last_refusal: str | None = None
        self._told_round: int | None = None
        self._is_new, self._outgoing = False, ""
        self._began = time.time()
        self.status = OwnStatus(name, server, time.time(), clients=list(clients))
        self.write()

    def connection(self, reason: str | None) -> None:
        """Note whether the server is reached."""
        self._state("connected" if reason is None else "not connected", reason)

    def turned_away(self, reason: str) -> None:
        """Note that the server does not let this site take part."""
        self._state("refused", printable(reason))

    def _state(self, state: str, reason: str | None) -> None:
        status = self.status
        if (state, reason or "") == (status.state, status.reason):
            return
        if state != status.state or status.since is None:
            status.since = time.time()
        status.state, status.reason = state, reason or ""
        if reason is None:
            self._say(f"Connected to {status.server}.")
        elif state == "refused":
            self._say(f"{status.server} does not let this site take part: {reason}.")
        else:
            self._say(f"{reason} Waiting: it is tried again until it works.")
        self.write()

    def joined(self, run: str, outgoing: str = "") -> None:
        """Note that the site takes part in a run; it is said with the run's first task, and what can leave a client."""
        self.connection(None)  # a SuperNode that finds its server again does so in silence
        status = self.status
        if status.run != run:
            status.run, status.run_since = run, time.time()
            status.tasks = status.failures = 0
            status.round, self._told_round = None, None
            self._is_new, self._outgoing = True, outgoing
        self._last_refusal = None
        self.write()

    def began(self, task: Any) -> None:
        """Note a task that begins."""
        self.connection(None)
        if self._is_new and type(task) in VERBS:  # the server of a run that is resumed asks before it has read its name
            self._is_new = False
            who = f"run {printable(self.status.run, 12)} with {of_clients(self.status.clients)}"
            self._say(f"Takes part in {who}.{f' Can leave: {self._outgoing}.' if self._outgoing else ''}")
        self.status.doing, self._began = describe_task(task), time.time()
        self.write()

    def ended(self, task: Any, answer: Any) -> None:
        """Note a task that was carried out."""
        status = self.status
        status.doing, status.last, status.last_at = "", describe_task(task), time.time()
        status.round = task.address[0]
        status.tasks += 1
        failed = task.failure(answer)
        if failed is not None:
            status.failures += 1
            self._say(f"Round {status.round}: {printable(failed[1])}")
        elif isinstance(task, Visit) and len(status.clients) <= LISTED:
            self._say(
                f"Round {status.round}: trained {of_clients([task.client])} in {time.time() - self._began:.1f} s."
            )
        elif isinstance(task, Visit) and status.round != self._told_round:
            self._say(f"Round {status.round}: trains its clients.")
        self._told_round = status.round
        self.write()

    def refused(self, reason: str) -> None:
        """Note a request that was refused. The same reason again is not said again."""
        status = self.status
        status.doing, status.refused, status.refused_at = "", printable(reason), time.time()
        if reason != self._last_refusal:
            self._say(f"Refused a request of {status.server}: {status.refused}")
        self._last_refusal = reason
        self.write()

    def end(self) -> None:
        """Note that the site has been stopped."""
        self.status.state, self.status.since = "ended", time.time()
        self.status.doing = self.status.reason = ""
        self.write(lasting=True)

    def write(self, lasting: bool = False) -> None:
        """Write the file."""
        self._file.write(self.status, lasting)

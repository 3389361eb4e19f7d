"""What a server tells of its sites, in lines and in a file: who is here, since when, and what each does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlightning.sites.connections import Connections
from fedlightning.sites.status import NAME, ServerStatus, SiteStatus, StatusFile, of_clients, printable, stamped

Doing = Mapping[str, tuple[str, int | None]]
"""What each site does that has something to do, by its name, and the round of that."""


@dataclass(frozen=True)
class Run:
    """What the log shows of the run.

    Attributes:
        folder: Its folder.
        rounds_done: Finished rounds.
        max_rounds: Rounds in all.
        failures: Its failures so far, as in `summary.json`.
    """

    folder: str = ""
    rounds_done: int = 0
    max_rounds: int = 0
    failures: Sequence[Mapping[str, Any]] = ()


def _say(text: str) -> None:
    print(stamped(text), file=sys.stderr, flush=True)  # a progress bar on the terminal makes room for it


class ServerLog:
    """Compares who is here with who was, says what has changed, and keeps the file of `fedlightning sites`.

    Args:
        folder: Folder of the file; `None`: no file.
        expected: Sites without which no run begins.
        run: Tells of the run.
        site_names: Names of sites that may come, as their keys are called.
        say: Is told what has changed, a line at a time.
        clock: Seconds since 1970.
        file: The file; a test brings its own.

    Attributes:
        outcome: How the server ends, if nothing else happens.
    """

    def __init__(
        self,
        folder: Path | None = None,
        expected: int = 0,
        run: Callable[[], Run] = Run,
        site_names: Sequence[str] = (),
        say: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.time,
        file: StatusFile | None = None,
    ) -> None:
        self._file = StatusFile(folder) if file is None else file
        self._run, self._say, self._clock = run, say, clock
        self._status = ServerStatus(started=clock(), expected=expected)
        self.outcome = "finished"
        self._sites = {name: SiteStatus(name) for name in map(_name, site_names)}
        self._refused: dict[str, SiteStatus] = {}  # by node
        self._began: dict[str, float] = {}
        self._greeted_sites: set[str] = set()

    def look(self, connections: Connections, doing: Callable[[], Doing], waits_for: str = "") -> None:
        """Take in what has changed, and write it down when it is time to."""
        self._who(connections)
        if not self._file.is_due:
            return
        self._status.doing = waits_for
        now, work = self._clock(), doing()
        for name, site in self._sites.items():
            self._does(site, work.get(name) if site.state == "connected" else None, now)
            site.heard = connections.last_answers.get(name, site.heard)
        self._write()

    def end(self, outcome: str) -> None:
        """Write down that the server has ended."""
        self._status.ended, self._status.outcome = self._clock(), printable(outcome)
        self._status.doing = ""
        for site in [*self._sites.values(), *self._refused.values()]:
            site.doing, site.doing_since = "", None
            if site.state == "connected":
                site.state, site.since = "not connected", self._status.ended
        self._write(lasting=True)

    # -- who -----------------------------------------------------------------------------------------------------------
    def _who(self, connections: Connections) -> None:
        for name, since in connections.since.items():
            site = self._sites.setdefault(name, SiteStatus(name))
            if site.state != "connected" or self._began.get(name) != since:
                self._here(site, connections, since)
        for name, site in self._sites.items():
            if site.state == "connected" and name not in connections.since:
                site.state, site.since = "not connected", self._clock()
                self._say(f"Site '{name}' is gone; it may come back.")
        for node in set(self._refused) - set(connections.refused):
            del self._refused[node]
        for node in connections.refused:
            why = printable(connections.why(node))
            old = self._refused.get(node)
            if old is None or old.reason != why:
                name = connections.link.owner(node) or "?"
                self._refused[node] = SiteStatus(_name(name), [], "refused", self._clock(), why)

    def _here(self, site: SiteStatus, connections: Connections, since: float) -> None:
        clients = connections.clients[site.name]
        again = site.name in self._greeted_sites
        site.clients = [printable(client, NAME) for client in clients]
        site.state, site.since, site.reason = "connected", since, ""
        self._began[site.name] = since
        self._greeted_sites.add(site.name)
        if again:
            self._say(f"Site '{site.name}' is back.")
            return
        here = sum(1 for other in self._sites.values() if other.state == "connected")
        count = f" ({here} of {self._status.expected})" if here <= self._status.expected else ""
        self._say(f"Site '{site.name}' is here with {of_clients(clients)}{count}.")

    # -- what ----------------------------------------------------------------------------------------------------------
    def _does(self, site: SiteStatus, work: tuple[str, int | None] | None, now: float) -> None:
        what = "" if work is None else work[0]
        if work is not None and work[1] is not None:
            site.round = work[1]
        if what != site.doing:
            site.doing, site.doing_since = what, now if what else None

    def _write(self, lasting: bool = False) -> None:
        run, status = self._run(), self._status
        status.run, status.rounds_done, status.max_rounds = run.folder, run.rounds_done, run.max_rounds
        for site in self._sites.values():
            clients = set(site.clients)
            site.failures = sum(1 for failure in run.failures if failure["client"] in clients)
        status.sites = sorted([*self._sites.values(), *self._refused.values()], key=lambda site: site.name)
        self._file.write(status, lasting)


def _name(name: str) -> str:
    return printable(name, NAME)


_shown: list[ServerLog] = []


@contextmanager
def showing(log: ServerLog) -> Iterator[ServerLog]:
    """Let engines that are made inside the block write into a log."""
    _shown.append(log)
    try:
        yield log
    finally:
        _shown.remove(log)


def log_of_server(expected: int) -> ServerLog:
    """Return the log of this process, or one without a file."""
    return _shown[-1] if _shown else ServerLog(expected=expected)

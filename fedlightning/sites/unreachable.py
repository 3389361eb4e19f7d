"""Sites that did not answer in time: each is waited for once, and the run goes on without it until it is back."""

from __future__ import annotations

from collections.abc import Mapping

from fedlightning.sites.connections import PING, Connections
from fedlightning.sites.task_window import Entry, Window


class Absent:
    """Knows which sites are not to be waited for.

    A site that was too slow once is asked whether it is there. If it says so, nothing has happened; one that is not
    connected, was refused, or is silent for `PING` seconds more is absent until it answers
    anything, or is greeted again.

    Args:
        connections: The sites.
    """

    def __init__(self, connections: Connections) -> None:
        self._meeting = connections
        self._since: dict[str, tuple[float, int]] = {}  # by site: when it was too slow, and its answers until then

    def mark(self, site: str, now: float) -> None:
        """Note that a site has not answered in time."""
        self._since[site] = now, self._meeting.answers[site]

    def since(self, site: str, now: float) -> float | None:
        """Return since when a site is absent; `None` if it is to be waited for."""
        if site not in self._since:
            return None
        marked, answers = self._since[site]
        if self._meeting.answers[site] != answers:
            del self._since[site]
            return None
        here = site in self._meeting.names.values()
        return None if here and now <= marked + PING else marked

    def to_give_up(self, window: Window, sites: Mapping[str, str], now: float) -> list[Entry]:
        """Return tasks that came when their sites were absent already; none while there is another one to wait for."""
        waiting = [entry for entry in window if not entry.done] if self.marked else []
        found = []
        for entry in waiting:
            since = self.since(sites.get(entry.client, ""), now)
            if since is None or entry.since is None or entry.since < since:
                return []
            found.append(entry)
        return found

    @property
    def marked(self) -> bool:
        """Whether any site has been too slow and has not answered since."""
        return bool(self._since)

    @property
    def nodes(self) -> list[str]:
        """Nodes of marked sites that are connected: they are to be asked."""
        return [node for node, site in self._meeting.names.items() if site in self._since]

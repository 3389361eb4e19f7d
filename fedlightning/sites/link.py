"""What the server needs of a connection to its sites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from fedlightning.engines.attempts import FederationError
from fedlightning.errors import ConfigurationError

Answer = Callable[[bytes], bytes]
"""A site as a connection sees it: a request in, a reply out. It never raises."""


class LostConnectionError(FederationError):
    """The connection to all sites is gone. The state of the rounds before is intact."""


class Link(Protocol):
    """A connection to sites. A site answers one request after another, in the order in which they were sent."""

    @property
    def expected(self) -> int:
        """Number of sites without which no run begins."""

    def nodes(self) -> Collection[str]:
        """Return the sites that are connected now, by a name that the connection gives them."""

    def owner(self, node: str) -> str | None:
        """Return the name of the site whose key a node has proved; `None`: the connection knows no keys."""

    def missing(self) -> Collection[str]:
        """Return names of sites that would be let in and are not connected, as far as the connection knows them."""

    def send(self, node: str, request: bytes) -> str:
        """Send a request and return the name of its reply."""

    def receive(self, waiting: Collection[str], timeout: float) -> list[tuple[str, bytes]]:
        """Return replies that have come, with their names; wait for one at most some seconds.

        Of a request or a reply that got lost on the way, `write({"lost": ""})` is the reply, where the connection knows it.
        """


_current: list[tuple[Link, bool, bool, float]] = []


@contextmanager
def connected(
    link: Link, export: bool = False, allow_other_code: bool = False, max_share: float = 1.0
) -> Iterator[Link]:
    """Let trainers with `engine="flower"` that are fitted inside the block reach their sites over a connection."""
    about = (link, export, allow_other_code, max_share)
    _current.append(about)
    try:
        yield link
    finally:
        _current.remove(about)


def current() -> tuple[Link, bool, bool, float]:
    """Return the connection of this process, and the options of `fedlightning serve` that :func:`connected` was given."""
    if not _current:
        raise ConfigurationError(
            "engine='flower' trains at sites, to which this process has no connection. Start it with `fedlightning serve`, "
            "and each site with `fedlightning site`. A client's model is a file at its site (fedlightning.load opens it), "
            "and new sites join when the run is resumed (docs/how-to/deploy.md)."
        )
    return _current[-1]

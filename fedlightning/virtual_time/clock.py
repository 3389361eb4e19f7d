"""The virtual clock of a federation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedlightning.errors import ConfigurationError, warn
from fedlightning.ranges import checked
from fedlightning.server.round_clock import Clock
from fedlightning.virtual_time.availability import AlwaysAvailable, Availability
from fedlightning.virtual_time.link import FixedLink, Link
from fedlightning.virtual_time.settings import Described
from fedlightning.virtual_time.speed import SampleSpeed, Speed
from fedlightning.virtual_time.timing import RoundTimes

if TYPE_CHECKING:
    from fedlightning.engines.base import Engine
    from fedlightning.server.server import Server


class VirtualClock(Described, Clock):
    """How long visits take in virtual seconds, and when clients can be reached.

    All answers depend on the arguments here and those of the question alone: a run is replayed to the bit, and two
    methods are compared on the same devices. The time that this machine takes has no part in it.

    Args:
        speed: Seconds of computing. Default: 0.01 for each sample and epoch.
        link: Seconds of sending. Default: bytes take no time.
        availability: When clients can be reached. Default: always.
        seed: Address of all draws. It belongs to the devices, not to the run: runs of several seeds see the same ones.

    Example:
        >>> clock = VirtualClock(SampleSpeed(0.5), FixedLink(down=100, up=10))
        >>> clock.duration("a", visit=0, samples=4, bytes_down=50, bytes_up=50)
        7.5
        >>> clock.available("a", time=3.0), clock.next_available("a", time=3.0)
        (True, 3.0)
    """

    @checked
    def __init__(
        self,
        speed: Speed | None = None,
        link: Link | None = None,
        availability: Availability | None = None,
        seed: int = 0,
    ) -> None:
        self.speed = SampleSpeed() if speed is None else speed
        self.link = FixedLink() if link is None else link
        self.availability = AlwaysAvailable() if availability is None else availability
        self.seed = seed
        for name, value, kind in (
            ("speed", self.speed, Speed),
            ("link", self.link, Link),
            ("availability", self.availability, Availability),
        ):
            if not isinstance(value, kind):
                raise ConfigurationError(
                    f"VirtualClock got {name}={value!r}. Give an object of fedlightning.virtual_time, a {kind.__name__}."
                )

    def download(self, client: str, visit: int, num_bytes: int) -> float:
        """Return the seconds until a message has arrived at a client."""
        return self.link.seconds(self.seed, client, visit, num_bytes, "down")

    def compute(self, client: str, visit: int, samples: float) -> float:
        """Return the seconds that a client computes."""
        return self.speed.seconds(self.seed, client, visit, samples)

    def upload(self, client: str, visit: int, num_bytes: int) -> float:
        """Return the seconds until an update has arrived at the server."""
        return self.link.seconds(self.seed, client, visit, num_bytes, "up")

    def duration(self, client: str, visit: int, samples: float, bytes_down: int, bytes_up: int) -> float:
        """Return the seconds from the start of a message to the arrival of its update.

        Args:
            client: The client's id.
            visit: Number of the visit among those of the client.
            samples: Training samples that it goes through, each as often as it is seen.
            bytes_down: Bytes of the message.
            bytes_up: Bytes of the update.
        """
        there = self.download(client, visit, bytes_down) + self.compute(client, visit, samples)
        return there + self.upload(client, visit, bytes_up)

    def available(self, client: str, time: float) -> bool:
        """Return whether a client can start a visit at a time."""
        return self.availability.available(self.seed, client, time)

    def next_available(self, client: str, time: float) -> float:
        """Return the first time from `time` on at which a client can start a visit; infinity: never again."""
        return self.availability.next_available(self.seed, client, time)

    @property
    def is_always_available(self) -> bool:
        """Whether every client can be reached at any time."""
        return isinstance(self.availability, AlwaysAvailable)

    def for_round(self, server: Server, engine: Engine, **limits: Any) -> RoundTimes:
        """Return the clock of a round that is about to begin, when somebody can be reached."""
        return RoundTimes.of(self, server, engine, **limits)

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a clock that does not fit the clients of a federation; warn of clients that never come.

        Args:
            clients: The clients' ids.

        Raises:
            ConfigurationError: If a table names a client that there is not, or no client is ever available.
        """
        for model in (self.speed, self.link, self.availability):
            unknown = sorted(model.clients() - set(clients))
            if unknown:
                some = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
                raise ConfigurationError(
                    f"{type(model).__name__} names client '{unknown[0]}', which the federation does not have ({some})."
                )
        never = [client for client in clients if math.isinf(self.next_available(client, 0.0))]
        if len(never) == len(clients):
            raise ConfigurationError(
                f"{type(self.availability).__name__} never lets in any of the {len(clients)} clients ({clients[0]}, ...): no "
                "round could be done. Give it intervals of these clients."
            )
        if never:
            warn(
                f"{type(self.availability).__name__} never lets in {len(never)} of the {len(clients)} clients ('{never[0]}', "
                "...): they take no part in training."
            )

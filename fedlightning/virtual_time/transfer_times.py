"""How long bytes take between the server and a client."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from fedlightning.errors import ConfigurationError
from fedlightning.virtual_time.settings import Described, class_of, normal, number, shares_of, table, table_of_classes

Direction = Literal["down", "up"]


def rate(where: str, name: str, value: Any) -> float | None:
    """Return bytes per second, checked; `None`: bytes take no time."""
    return None if value is None else number(where, name, value, above=True)


class Link(Described, ABC):
    """A model of the clients' links."""

    @abstractmethod
    def seconds(self, seed: int, client: str, visit: int, num_bytes: int, direction: Direction) -> float:
        """Return the seconds that a message takes.

        Args:
            seed: The clock's seed.
            client: The client's id.
            visit: Number of the visit among those of the client.
            num_bytes: Bytes of the message.
            direction: `"down"`: to the client; `"up"`: from it.
        """

    def clients(self) -> set[str]:
        """Return the clients that are named in tables."""
        return set()


class FixedLink(Link):
    """A fixed speed in both directions.

    Args:
        down: Bytes per second to a client; `None`: bytes take no time.
        up: Bytes per second from a client; `None`: bytes take no time.
        latency: Seconds of every message beside.
        slowdown: By client, a factor on all of it.

    Raises:
        ConfigurationError: If a speed is not positive, or another number is negative.

    Example:
        >>> link = FixedLink(down=1000, up=100, latency=0.5)
        >>> link.seconds(0, "a", 0, 200, "down"), link.seconds(0, "a", 0, 200, "up")
        (0.7, 2.5)
    """

    def __init__(
        self,
        down: float | None = None,
        up: float | None = None,
        latency: float = 0.0,
        slowdown: Mapping[str, float] | None = None,
    ) -> None:
        self.down = rate("FixedLink", "down", down)
        self.up = rate("FixedLink", "up", up)
        self.latency = number("FixedLink", "latency", latency)
        self.slowdown = table("FixedLink", "slowdown", slowdown)

    def seconds(self, seed: int, client: str, visit: int, num_bytes: int, direction: Direction) -> float:
        """Return latency, and bytes over speed."""
        speed = self.down if direction == "down" else self.up
        return self.slowdown.get(client, 1.0) * (self.latency + (num_bytes / speed if speed else 0.0))

    def clients(self) -> set[str]:
        """Return the clients with a factor."""
        return set(self.slowdown)


class LogNormalLink(Link):
    """Speeds of links that are log-normal over clients, and again over messages; both directions share a client's factor.

    Args:
        down: Median of bytes per second to a client; `None`: bytes take no time.
        up: Median of bytes per second from a client; `None`: bytes take no time.
        sigma: Spread over the clients, in logarithms.
        visit_sigma: Spread over the messages of one client.
        latency: Seconds of every message beside.

    Raises:
        ConfigurationError: If a speed is not positive, another number is negative, or both speeds are `None`.

    Example:
        >>> link = LogNormalLink(down=1e6, up=1e5, sigma=0.5)
        >>> round(link.seconds(0, "a", 0, 1000, "up") / link.seconds(0, "a", 0, 1000, "down"), 9)
        10.0
    """

    def __init__(
        self,
        down: float | None = 1e6,
        up: float | None = 1e6,
        sigma: float = 0.5,
        visit_sigma: float = 0.0,
        latency: float = 0.0,
    ) -> None:
        self.down = rate("LogNormalLink", "down", down)
        self.up = rate("LogNormalLink", "up", up)
        self.sigma = number("LogNormalLink", "sigma", sigma, most=10)
        self.visit_sigma = number("LogNormalLink", "visit_sigma", visit_sigma, most=10)
        self.latency = number("LogNormalLink", "latency", latency)
        if self.down is None and self.up is None:
            raise ConfigurationError(
                "LogNormalLink got down=None and up=None, so there is no speed to spread. Give one of them, or use FixedLink."
            )

    def seconds(self, seed: int, client: str, visit: int, num_bytes: int, direction: Direction) -> float:
        """Return latency, and bytes over the client's speed."""
        speed = self.down if direction == "down" else self.up
        if speed is None:
            return self.latency
        exponent = self.sigma * normal(seed, "link", client) if self.sigma else 0.0
        exponent += self.visit_sigma * normal(seed, "link", client, visit, direction) if self.visit_sigma else 0.0
        return self.latency + num_bytes / speed * math.exp(exponent)


class DeviceLink(Link):
    """Links by class of device. With the classes and shares of a :class:`DeviceSpeed` each client has the same class there.

    Args:
        classes: By name of the class, its `share` and, if wanted, `down` and `up` (bytes per second; without: no time) and
            `latency` (seconds of every message).
        clients: Classes by client; others are drawn.

    Raises:
        ConfigurationError: If a number is out of range, or a client has a class that there is not.

    Example:
        >>> DeviceLink({"fibre": {"down": 1e8}, "mobile": {"down": 1e6}}, {"a": "mobile"}).seconds(0, "a", 0, 1000, "down")
        0.001
    """

    def __init__(self, classes: Mapping[str, Mapping[str, float]], clients: Mapping[str, str] | None = None) -> None:
        self.classes = shares_of("DeviceLink", classes, (), ("down", "up", "latency"))
        for kind, entry in self.classes.items():
            for name in ("down", "up"):
                entry[name] = rate("DeviceLink", f"{name} of '{kind}'", entry.get(name))
            entry["latency"] = number("DeviceLink", f"latency of '{kind}'", entry.get("latency", 0.0))
        self._class_by_client = table_of_classes("DeviceLink", clients, self.classes)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {"classes": self.classes, "clients": self._class_by_client}

    def seconds(self, seed: int, client: str, visit: int, num_bytes: int, direction: Direction) -> float:
        """Return latency, and bytes over the speed of the client's class."""
        entry = self.classes[class_of(seed, client, self.classes, self._class_by_client)]
        speed = entry[direction]
        return float(entry["latency"] + (num_bytes / speed if speed else 0.0))

    def clients(self) -> set[str]:
        """Return the clients with a given class."""
        return set(self._class_by_client)

"""How long a client computes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from fedlightning.virtual_time.settings import Described, class_of, normal, number, shares_of, table, table_of_classes


class Speed(Described, ABC):
    """A model of the clients' speeds."""

    @abstractmethod
    def seconds(self, seed: int, client: str, visit: int, samples: float) -> float:
        """Return the seconds of computing in one visit.

        Args:
            seed: The clock's seed.
            client: The client's id.
            visit: Number of the visit among those of the client.
            samples: Training samples that the visit goes through, each as often as it is seen. Without any: 0 seconds.
        """

    def clients(self) -> set[str]:
        """Return the clients that are named in tables, so that a misspelled one is found."""
        return set()


class FixedSpeed(Speed):
    """A visit takes a fixed time, whatever the client has to do.

    Args:
        seconds_per_visit: Seconds of a visit.
        slowdown: By client, a factor on them.

    Raises:
        ConfigurationError: If a number is negative, or none.

    Example:
        >>> FixedSpeed(2.0, slowdown={"b": 10}).seconds(0, "b", visit=0, samples=64)
        20.0
    """

    def __init__(self, seconds_per_visit: float = 1.0, slowdown: Mapping[str, float] | None = None) -> None:
        self.seconds_per_visit = number("FixedSpeed", "seconds_per_visit", seconds_per_visit)
        self.slowdown = table("FixedSpeed", "slowdown", slowdown)

    def seconds(self, seed: int, client: str, visit: int, samples: float) -> float:
        """Return the same seconds in every visit."""
        return self.seconds_per_visit * self.slowdown.get(client, 1.0) if samples else 0.0

    def clients(self) -> set[str]:
        """Return the clients with a factor."""
        return set(self.slowdown)


class SampleSpeed(Speed):
    """A visit takes a fixed time per sample that it goes through: a client with more data, or more epochs, takes longer.

    Args:
        seconds_per_sample: Seconds of one sample in one epoch.
        overhead: Seconds of every visit beside them.
        slowdown: By client, a factor on both.

    Raises:
        ConfigurationError: If a number is negative, or none.

    Example:
        >>> SampleSpeed(0.5, slowdown={"b": 10}).seconds(0, "b", visit=0, samples=4)
        20.0
    """

    def __init__(
        self, seconds_per_sample: float = 0.01, overhead: float = 0.0, slowdown: Mapping[str, float] | None = None
    ) -> None:
        self.seconds_per_sample = number("SampleSpeed", "seconds_per_sample", seconds_per_sample)
        self.overhead = number("SampleSpeed", "overhead", overhead)
        self.slowdown = table("SampleSpeed", "slowdown", slowdown)

    def seconds(self, seed: int, client: str, visit: int, samples: float) -> float:
        """Return overhead and samples times the seconds of one."""
        slow = self.slowdown.get(client, 1.0)
        return slow * (self.overhead + self.seconds_per_sample * samples) if samples else 0.0

    def clients(self) -> set[str]:
        """Return the clients with a factor."""
        return set(self.slowdown)


class LogNormalSpeed(Speed):
    """Speeds with a long tail: seconds per sample are log-normal over clients, and again over a client's visits.

    A client's factor is ``exp(sigma z)`` with a standard normal ``z`` of its own; a visit's is ``exp(visit_sigma z')``.

    Args:
        seconds_per_sample: Median over the clients.
        sigma: Spread over the clients, in logarithms: 1.0 puts a factor of 10 between the 12th and the 88th percentile.
        visit_sigma: Spread over the visits of one client.
        overhead: Median seconds of every visit beside.

    Raises:
        ConfigurationError: If a number is negative, or none.

    Example:
        >>> speed = LogNormalSpeed(0.01, sigma=1.0)
        >>> speed.seconds(0, "a", 0, 100) == speed.seconds(0, "a", 1, 100) != speed.seconds(0, "b", 0, 100)
        True
    """

    def __init__(
        self, seconds_per_sample: float = 0.01, sigma: float = 0.5, visit_sigma: float = 0.0, overhead: float = 0.0
    ) -> None:
        self.seconds_per_sample = number("LogNormalSpeed", "seconds_per_sample", seconds_per_sample)
        self.sigma = number("LogNormalSpeed", "sigma", sigma, most=10)
        self.visit_sigma = number("LogNormalSpeed", "visit_sigma", visit_sigma, most=10)
        self.overhead = number("LogNormalSpeed", "overhead", overhead)

    def seconds(self, seed: int, client: str, visit: int, samples: float) -> float:
        """Return the client's time with its own factor and the visit's."""
        if not samples:
            return 0.0
        exponent = self.sigma * normal(seed, "speed", client) if self.sigma else 0.0
        exponent += self.visit_sigma * normal(seed, "speed", client, visit) if self.visit_sigma else 0.0
        return math.exp(exponent) * (self.overhead + self.seconds_per_sample * samples)


class DeviceSpeed(Speed):
    """Speeds by class of device: each client is one device of a class, drawn by the classes' shares or given.

    Args:
        classes: By name of the class, its `share` (shares need not add up to 1), `seconds_per_sample` and, if wanted,
            `overhead` (seconds of a visit beside) and `sigma` (spread over the visits, in logarithms).
        clients: Classes by client. Others are drawn, by the client's id alone, so they stay when clients join.

    Raises:
        ConfigurationError: If a class lacks something, or a client has a class that there is not.

    Example:
        >>> desktop, phone = {"share": 3, "seconds_per_sample": 0.001}, {"share": 1, "seconds_per_sample": 0.01}
        >>> DeviceSpeed({"desktop": desktop, "phone": phone}, clients={"mine": "phone"}).seconds(0, "mine", 0, 100)
        1.0
    """

    def __init__(self, classes: Mapping[str, Mapping[str, float]], clients: Mapping[str, str] | None = None) -> None:
        optional = ("overhead", "sigma")
        self.classes: dict[str, dict[str, Any]] = shares_of("DeviceSpeed", classes, ("seconds_per_sample",), optional)
        for kind, entry in self.classes.items():
            for name in ("seconds_per_sample", *optional):
                where = f"{name} of '{kind}'"
                entry[name] = number("DeviceSpeed", where, entry.get(name, 0.0), most=10 if name == "sigma" else 1e15)
        self._class_by_client = table_of_classes("DeviceSpeed", clients, self.classes)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {"classes": self.classes, "clients": self._class_by_client}

    def seconds(self, seed: int, client: str, visit: int, samples: float) -> float:
        """Return the time on the client's device."""
        if not samples:
            return 0.0
        entry = self.classes[class_of(seed, client, self.classes, self._class_by_client)]
        spread = math.exp(entry["sigma"] * normal(seed, "speed", client, visit)) if entry["sigma"] else 1.0
        return float(spread * (entry["overhead"] + entry["seconds_per_sample"] * samples))

    def clients(self) -> set[str]:
        """Return the clients with a given class."""
        return set(self._class_by_client)

"""Asynchronous rounds without a clock: the staleness of each update is drawn."""

from __future__ import annotations

import math

import torch

from fedlightning.errors import ConfigurationError
from fedlightning.seeding import generator
from fedlightning.server.server import Server
from fedlightning.virtual_time.asynchronous import Asynchronous
from fedlightning.virtual_time.clock import VirtualClock
from fedlightning.virtual_time.in_flight import Planned
from fedlightning.virtual_time.speed import FixedSpeed


class DrawnStaleness(Asynchronous):
    """Updates arrive one after another, each with a staleness drawn uniformly from 0 to a maximum.

    The setting in which FedAsync was published: no devices, no speeds, only the question what staleness does. The t-th update
    comes from a client drawn uniformly (of those that none of the `max_staleness` updates before it comes from, so that
    nobody has two jobs at a time) and answers the model as it was `d` arrivals ago, `d` uniform in 0 ... `max_staleness`.
    The loop's time counts arrivals. Where every arrival makes a step, as with `FedAsync`, `d` is the update's staleness.

    Args:
        max_staleness: Largest staleness; the paper takes 4 and 16.
        arrivals: Updates that make a round. Default: as the algorithm says, else 1.

    Raises:
        ConfigurationError: If a number is out of range.

    Example:
        >>> DrawnStaleness(16)
        DrawnStaleness(max_staleness=16, arrivals=None)
    """

    def __init__(self, max_staleness: int = 4, arrivals: int | None = None) -> None:
        super().__init__(VirtualClock(FixedSpeed(0.0)), arrivals=arrivals, max_staleness=max_staleness)
        self._draws: list[
            tuple[str, int]
        ] = []  # client and staleness of each arrival: draws, so they need not be saved

    def check(self, server: Server) -> None:
        """Refuse too few clients, and callbacks that leave jobs out."""
        super().check(server)
        assert self.max_staleness is not None
        if len(server.clients) <= self.max_staleness:
            raise ConfigurationError(
                f"DrawnStaleness got max_staleness={self.max_staleness}, and {len(server.clients)} clients with at most one "
                "job at a time can be at most one less behind. Lower it."
            )
        picky = next((callback.key for callback in server.callbacks if callback.claims("on_job")), None)
        if picky is not None:
            raise ConfigurationError(
                f"{picky} changes jobs or leaves them out, and here each has its turn. Leave it out."
            )

    def _drawn(self, server: Server, number: int) -> tuple[str, int]:
        """Return client and staleness of an arrival."""
        assert self.max_staleness is not None
        able = [client for client in server.clients if server.num_samples[client]]
        while len(self._draws) <= number:
            place = len(self._draws)
            draws = generator(server.seed, "drawn staleness", place)
            recent = {client for client, _ in self._draws[max(place - self.max_staleness, 0) :]}
            free = [client for client in able if client not in recent] or able
            client = free[int(torch.randint(len(free), (1,), generator=draws))]
            most = min(self.max_staleness, place)
            self._draws.append((client, int(torch.randint(most + 1, (1,), generator=draws))))
        return self._draws[number]

    def _depart(self, server: Server, planned: Planned, width: int) -> float:
        """Send the present model to those whose updates will be as old as was drawn."""
        assert self.max_staleness is not None
        now = int(server.costs.virtual_time)
        for number in range(now, now + self.max_staleness + 1):
            client, staleness = self._drawn(server, number)
            if number - staleness == now:
                job = self._sent_off(server, server.job(client), planned)
                job.computed = job.arrival = number + 1.0
                self._in_flight.append(job)
        return math.inf

"""Clocks that a loop may have, and the time of each round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedlightning.contract import Job
from fedlightning.contract.messages import JobTrace, Message, Update
from fedlightning.tensors import State

if TYPE_CHECKING:
    from fedlightning.engines.contract import Engine
    from fedlightning.server.server import Server


class RoundClock:
    """The time of one round of lists of jobs. This one is of rounds without time: everybody is there, and nobody is late.

    Attributes:
        takes_time: Whether clients may be away or late.
        trips: The jobs that came back, for the timeline.
        neighbour_models: By client whose update is being combined, and by neighbour, the latest model that the neighbour has
            sent it, with the number of steps that the neighbour had taken: in a loop that delivers such messages.
    """

    takes_time = False
    trips: Sequence[JobTrace] = ()
    neighbour_models: Mapping[str, Mapping[str, tuple[int, State]]] = {}

    def is_reachable(self, client: str) -> bool:
        """Return whether a client can be reached as the round begins."""
        return True

    def begin(self, jobs: Iterable[Job | None]) -> list[Job | None]:
        """Begin a list of jobs. `None` stands for one that is left out, as those are whose clients cannot be reached."""
        return list(jobs)

    def sent(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Yield the messages of the list as they leave; a slow client may be given less to do."""
        return messages

    def arrivals(self, updates: Iterator[Update]) -> Iterator[tuple[Update, str | None]]:
        """Yield every update of the list with the reason why it is too late, or `None`."""
        return map(_in_time, updates)  # a generator would keep one while the next client trains

    def end(self) -> None:
        """End the list of jobs."""


def _in_time(update: Update) -> tuple[Update, str | None]:
    return update, None


NO_CLOCK = RoundClock()
"""The clock of rounds without time."""


class Clock(ABC):
    """What synchronous rounds ask of a clock; :class:`fedlightning.virtual_time.VirtualClock` is one."""

    @property
    @abstractmethod
    def is_always_available(self) -> bool:
        """Whether every client can be reached at any time."""

    @abstractmethod
    def check(self, clients: Sequence[str]) -> None:
        """Refuse a clock that does not fit the clients of a federation."""

    @abstractmethod
    def for_round(self, server: Server, engine: Engine, **limits: Any) -> RoundClock:
        """Return the clock of a round that is about to begin, when somebody can be reached.

        Args:
            server: Keeps the time.
            engine: Carries out the visits.
            limits: Who is waited for: `deadline`, `late` and `first` of
                :class:`~fedlightning.server.loop.Synchronous`.
        """

"""Who there is in a federation, and who takes part in a round: :class:`Population` and :class:`Participation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlightning.datamodules.base import in_order


@dataclass
class Population:
    """The clients of a federation and what is known of their data.

    Attributes:
        num_samples: Training samples of every client that takes part in training, as of the round asked for last.
        held_out: Ids of the clients that are kept out of training, in order. Algorithms do not see them.
        scored: Ids of the clients that are scored, in order: `clients`, or those that `evaluation.clients` drew.
        sizes: Samples of each client in training, validation and test, as they were told before round 1.
        over_rounds: Training samples of a client in rounds 0, 1, ..., the last number from then on, where they change.
        together: Whether all clients' data are in one place.
        sites: Name of each client's site, where clients are at sites.
        public_source: Gives the data module's loader of public data, or `None`, and the name of the data module.
        clients: Ids of the clients that take part in training, in order.
    """

    num_samples: dict[str, int]
    held_out: list[str] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    sizes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    over_rounds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    together: bool = True
    sites: Mapping[str, str] = field(default_factory=dict)
    public_source: Callable[[], tuple[Any, str]] = lambda: (None, "The data module")
    clients: list[str] = field(init=False)
    _round: int = field(default=-1, init=False)  # the round that `num_samples` are of, where they change

    def __post_init__(self) -> None:
        self.clients = in_order(self.num_samples)
        self.held_out = in_order(self.held_out)
        self.num_samples = {client: self.num_samples[client] for client in self.clients}
        self.scored = self.scored or self.clients

    @property
    def all_are_scored(self) -> bool:
        """Whether every client is scored."""
        return self.scored is self.clients

    def samples_in(self, round: int) -> dict[str, int]:
        """Return the training samples of each client in a round, from 0."""
        if self.over_rounds and self._round != round:
            now = {client: counts[min(round, len(counts) - 1)] for client, counts in self.over_rounds.items()}
            self.num_samples = {client: now.get(client, count) for client, count in self.num_samples.items()}
            self._round = round
        return self.num_samples


@dataclass
class Participation:
    """How many clients take part in a round, where no callback says who.

    Attributes:
        share: A share (float in (0, 1]) or a number (int) of clients.
        asked: Whether the clients of a round were asked for since it was planned.
    """

    share: int | float = 1.0
    asked: bool = False

    @property
    def is_everybody(self) -> bool:
        """Whether all clients take part, however many they are."""
        return self.share == 1.0 and not isinstance(self.share, int)

    def count(self, clients: int) -> int:
        """Return how many of so many clients take part.

        Example:
            >>> Participation(0.5).count(5), Participation(3).count(2), Participation(0.01).count(5)
            (2, 2, 1)
        """
        count = self.share if isinstance(self.share, int) else round(self.share * clients)
        return min(max(count, 1), clients)

"""What a visit asks of whoever runs it: to be fitted, and to be scored."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from fedlightning.client import Client, ClientRecord
from fedlightning.evaluation.wanted import Wanted
from fedlightning.hooks import Phase
from fedlightning.messages import Message, Update


@dataclass(frozen=True)
class Evaluate:
    """What to score during a visit: the trained model (stage L2) on these splits, on local and pooled data."""

    splits: tuple[str, ...] = ()
    data: tuple[str, ...] = ("local",)


@dataclass(frozen=True)
class Fit:
    """A fit that a visit is about to do: ``work`` epochs or steps of ``phase``, on the client's module as it stands.

    A ``loader`` that nobody has iterated yet may come with it.
    """

    client: Client
    message: Message
    phase: Phase
    work: int
    loader: DataLoader[Any] | None = None


@dataclass(frozen=True)
class Score:
    """Models that a visit wants to have scored, in this order."""

    client: Client
    wanted: list[Wanted]


class Fitted(Protocol):
    """What came of a fit: optimizer steps really taken, steps attempted, and per parameter the sum of learning rates."""

    @property
    def steps(self) -> int: ...
    @property
    def attempts(self) -> int: ...
    @property
    def lr_sums(self) -> Mapping[str, float]: ...


Visiting = Generator[Fit | Score, Any, tuple[Update, ClientRecord]]
"""A visit in progress (see :meth:`LocalRunner.visiting`): waits for something :class:`Fitted`, or for a list of scores."""

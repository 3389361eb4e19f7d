"""What a scoring task wants scored. The task says what, and goes on with the scores; whoever carries it out says how."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from fedlightning.client import ClientRecord
from fedlightning.seeding import isolated

if TYPE_CHECKING:
    from fedlightning.local import LocalRunner

Scores = dict[str, float]
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


@dataclass(frozen=True)
class Wanted:
    """A module to be scored on a loader.

    Attributes:
        module: as it is; it is not changed; loader: all of its batches count; split: ``val`` or ``test``.
        seed: the address of the randomness that loader and module may draw.
    """

    module: LightningModule
    loader: DataLoader[Any]
    split: str
    seed: tuple[object, ...]


Scoring = Generator[Iterable[Wanted], list[Scores], Answer]
"""Asks once for scores, is sent them in that order, and ends with the task's answer. What is wanted may be drawn lazily:
it is not needed longer than until it is scored."""


class Scored(Protocol[Answer_co]):
    """A task that does nothing but wait for scores: an engine may score several of them together."""

    @property
    def client(self) -> str | None:
        """Whose record it takes."""

    def scoring(
        self, runner: LocalRunner, record: ClientRecord
    ) -> Generator[Iterable[Wanted], list[Scores], tuple[Answer_co, ClientRecord | None]]:
        """What it wants; then its answer and the client's new record, ``None`` if that stays as it is."""


def score_one(runner: LocalRunner, wanted: Wanted) -> Scores:
    """Its scores, found alone; every global generator is left as it was."""
    with isolated(*wanted.seed):
        return runner.scorer.score(wanted.module, wanted.loader, wanted.split)


def score_alone(runner: LocalRunner, scoring: Scoring[Answer]) -> Answer:
    """Carry out one scoring, one after another of what it wants."""

    def scores() -> Iterator[Scores]:
        for wanted in next(scoring):
            yield score_one(runner, wanted)

    try:
        found = list(scores())
    except BaseException as error:  # it may have a client open
        scoring.throw(error)
        raise
    return finish(scoring, found)


def finish(scoring: Scoring[Answer], scores: list[Scores]) -> Answer:
    """Send a scoring what it waits for; its answer."""
    try:
        scoring.send(scores)
    except StopIteration as end:
        answer: Answer = end.value
        return answer
    raise RuntimeError("A scoring task asked for scores twice; it has to ask for all at once.")

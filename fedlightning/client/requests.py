"""Requests of visits and scoring tasks to the engine: fit a client, or score models.

Visits and scoring tasks are generators. They yield a request, wait for its result, and end with their answer. So one
engine serves one request after another, and another serves the requests of many clients at once.

:class:`LocalSettings` says how every client trains.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from fedlightning.client.client import Client
from fedlightning.client.client_errors import client_failure, describe_error
from fedlightning.client.data_summary import limited
from fedlightning.client.record import ClientRecord
from fedlightning.compat.system import file_name_of
from fedlightning.contract import Phase
from fedlightning.contract.messages import Message, Update
from fedlightning.datamodules.views import IndexView
from fedlightning.options.value_objects import Source
from fedlightning.seeding import isolated, seed_all

if TYPE_CHECKING:
    from fedlightning.client.runtime import ClientRuntime


@dataclass
class LocalSettings:
    """Settings of local training. Plain values, so that a worker process can be given them.

    Attributes:
        seed: Addresses all randomness of the run.
        max_rounds: Rounds of the federation: the horizon of schedules under `optimizer_state="keep"`.
        local_epochs: Epochs of a visit; or
        local_steps: Optimizer steps of a visit. One of the two is `None`.
        optimizer_state: `"reset"`: optimizers, schedulers and clocks are new in every visit; `"keep"`: they go on,
            with the horizon of the whole federation.
        lr_decay: Factor on every learning rate per round.
        trainer_arguments: Arguments of `lightning.pytorch.Trainer`, forwarded as they are.
        callbacks: Ordinary Lightning callbacks; each visit works on copies with the client's own state.
        log_clients: Clients whose own logs are kept for the run's loggers; `True`: all.
        local_loop: `"fast"`, `"trainer"`, or `"auto"`: fast where it applies.
        float_buffers: `"average"`: running statistics travel; `"local"`, `"server"`: no client sends them.
        other_seeds: Source of randomness -> its seed, where that is another.
    """

    seed: int
    max_rounds: int
    local_epochs: int | None = 1
    local_steps: int | None = None
    optimizer_state: Literal["reset", "keep"] = "reset"
    lr_decay: float = 1.0
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    log_clients: bool | list[str] = False
    local_loop: Literal["auto", "trainer", "fast"] = "auto"
    float_buffers: Literal["average", "local", "server"] = "average"
    other_seeds: dict[str, int] = field(default_factory=dict)

    def seed_of(self, source: Source) -> int:
        """Return the seed of a source of randomness."""
        return self.other_seeds.get(source, self.seed)

    def folder_of(self, client: str) -> str | None:
        """Return the folder for what is written inside a client's training; `None` if the run writes nothing."""
        root = self.trainer_arguments.get("default_root_dir")
        return None if root is None else os.path.join(root, "clients", file_name_of(client))

    def logs(self, client: str) -> bool:
        """Return True if the logs of a client are kept."""
        return self.log_clients if isinstance(self.log_clients, bool) else client in self.log_clients

    def train_batches(self, batches: int) -> int:
        """Return how many of an epoch's training batches Lightning's `limit_train_batches` leaves."""
        return limited(batches, self.trainer_arguments.get("limit_train_batches"))

    @property
    def unit(self) -> Literal["epochs", "steps"]:
        """The unit in which work is counted."""
        return "epochs" if self.local_steps is None else "steps"

    @property
    def work(self) -> int:
        """Default work of a visit, in :attr:`unit`."""
        return self.local_steps if self.local_steps is not None else int(self.local_epochs or 0)


Scores = dict[str, float]
"""Value of each metric that a module logged, by name."""
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


# -- of a visit --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Evaluate:
    """Evaluation during a visit: of the trained model (stage L2).

    Attributes:
        splits: Splits to evaluate on: `"val"`, `"test"`.
        data: Data to evaluate on: `"local"`, `"pooled"`; for scoring tasks also `"clients"`.
        clients: Clients whose models are scored; `None`: all.
    """

    splits: tuple[str, ...] = ()
    data: tuple[str, ...] = ("local",)
    clients: Collection[str] | None = None

    def of(self, client: str) -> Evaluate:
        """Return the evaluation in one client's visit.

        Example:
            >>> Evaluate(("val",), clients={"a"}).of("a").splits, Evaluate(("val",), clients={"a"}).of("b").splits
            (('val',), ())
        """
        if self.clients is None:
            return self
        return Evaluate(self.splits, self.data) if client in self.clients else Evaluate()


@dataclass(frozen=True)
class Fit:
    """Request for one fit of a client's module.

    Attributes:
        client: The client.
        message: The message from the server.
        phase: Part that trains, and for how long.
        work: Epochs or optimizer steps.
        loader: Training batches, not iterated yet. `None`: make a loader.
    """

    client: Client
    message: Message
    phase: Phase
    work: int
    loader: DataLoader[Any] | None = None


@dataclass(frozen=True)
class Score:
    """Request for scores of a client's trained model.

    Attributes:
        client: The client.
        requests: Modules and loaders, in the order of the scores.
    """

    client: Client
    requests: Sequence[ScoreRequest]


VisitSteps = Generator[Fit | Score, Any, tuple[Update, ClientRecord]]
"""A visit in progress: yields a :class:`Fit` and waits for a :class:`~fedlightning.client.record.FitResult`, yields a
:class:`Score` and waits for a list of :data:`Scores`, and ends with the update and the client's new record."""


# -- of scoring --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ScoreRequest:
    """Request for the scores of one module on one loader.

    Attributes:
        module: Module to score; it is not changed.
        loader: Batches to score it on.
        split: `"val"` or `"test"`.
        seed: Address of the randomness that loader and module may draw.
        client: Client whose loaders the module finds in its data module; `"pooled"`: those of the union.
    """

    module: LightningModule
    loader: DataLoader[Any]
    split: str
    seed: tuple[object, ...]
    client: str = ""


Scoring = Generator[Iterable[ScoreRequest], list[Scores], Answer]
"""A scoring task in progress. It yields all its requests at once (they may be drawn lazily), waits for their scores in
that order, and ends with its answer.
"""


class ScoringTask(Protocol[Answer_co]):
    """A task that only waits for scores, so that an engine may score several tasks together."""

    @property
    def client(self) -> str | None:
        """Client whose record the task needs, or `None`."""

    def scoring(
        self, runner: ClientRuntime, record: ClientRecord
    ) -> Generator[Iterable[ScoreRequest], list[Scores], tuple[Answer_co, ClientRecord | None]]:
        """Yield the requests; end with the answer and the client's new record (`None`: unchanged)."""


class MissingScores(Scores):
    """No scores, because scoring raised.

    Attributes:
        reason: The error in words.
        cause: The error.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause
        self.reason = describe_error(cause)


def score_one(runner: ClientRuntime, request: ScoreRequest) -> Scores:
    """Score one module alone. Every global random generator is left as it was."""
    with isolated(*request.seed):
        return score_or_miss(runner, request)


def score_or_miss(runner: ClientRuntime, request: ScoreRequest) -> Scores:
    """Score one module; an error in its code or data is a gap in the scores, not the end of the run."""
    runner.scorer.client = request.client
    try:
        return runner.scorer.score(request.module, request.loader, request.split)
    except BaseException as error:
        return MissingScores(client_failure(error))


def score_in_turn(runner: ClientRuntime, scoring: Scoring[Answer]) -> Answer:
    """Carry out one scoring task, one request after another."""
    try:
        scores_in_turn = [scores for series in _series(next(scoring)) for scores in _score_series(runner, series)]
    except BaseException as error:  # the task may have a client open
        scoring.throw(error)
        raise
    return finish(scoring, scores_in_turn)


MAX_WAITING = 128
"""Requests of one model that wait for one another: their loaders are in memory together."""


def _series(requests: Iterable[ScoreRequest]) -> Iterator[list[ScoreRequest]]:
    """Yield requests in a row of one model; a loader that is more than indices into data in memory comes alone."""
    series: list[ScoreRequest] = []
    for request in requests:
        light = type(request.loader) is DataLoader and type(request.loader.dataset) is IndexView
        if series and not (light and request.module is series[0].module and request.split == series[0].split):
            yield series
            series = []
        series.append(request)
        if not light or len(series) == MAX_WAITING:
            yield series
            series = []
    if series:
        yield series


def _score_series(runner: ClientRuntime, series: list[ScoreRequest]) -> Iterator[Scores]:
    """Yield the scores of requests for one model."""
    rest = series
    while rest:
        scores: list[Scores] = []
        failed: Exception | None = None
        if len(rest) > 1:
            first, loaders = rest[0], [request.loader for request in rest]
            with isolated():
                try:
                    runner.scorer.score_each(first.module, loaders, first.split, partial(_start, runner, rest), scores)
                except Exception as error:
                    failed = error
            yield from scores
        rest = rest[len(scores) :]
        if rest:
            yield score_one(runner, rest[0]) if failed is None else MissingScores(failed)
            rest = rest[1:]


def _start(runner: ClientRuntime, requests: Sequence[ScoreRequest], place: int) -> None:
    runner.scorer.client = requests[place].client
    seed_all(*requests[place].seed)


def finish(scoring: Scoring[Answer], scores: list[Scores]) -> Answer:
    """Send a scoring task its scores and return its answer."""
    try:
        scoring.send(scores)
    except StopIteration as end:
        answer: Answer = end.value
        return answer
    raise RuntimeError("A scoring task asked for scores twice; it has to ask for all at once.")

"""Scoring as tasks that an engine carries out: one model of the server on many clients' data, or one client's own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from fedlightning.hooks import Stage
from fedlightning.messages import Message, tree_bytes
from fedlightning.scoring.results import Row
from fedlightning.tensors import State, equal, load_state, module_state
from fedlightning.visit.record import ClientRecord
from fedlightning.visit.requests import Evaluate, ScoreRequest, Scores, Scoring, score_in_turn
from fedlightning.visit.runner import LocalRunner

EVERYBODY = "all"
"""In a row: the score is not of one client but of the union's data."""


@dataclass(frozen=True)
class Mark:
    """Which model was scored, and when: what the rows of one task have in common.

    Attributes:
        round: counted from 1, as in rows; stage, model, checkpoint: as in :class:`~fedlightning.scoring.results.Row`.
    """

    round: int
    stage: str
    model: str
    checkpoint: str = "latest"


@dataclass(frozen=True)
class ScoreModel:
    """Score one module on the data of several clients, or on the union (:data:`EVERYBODY`).

    Attributes:
        module: as it is, on the CPU; it is not changed.
        clients: whose data; evaluate: splits, and which data; mark: for the rows; others: all clients' ids.
    """

    module: LightningModule
    clients: tuple[str, ...]
    evaluate: Evaluate
    mark: Mark
    others: Sequence[str] = ()
    client: None = None

    @property
    def num_bytes(self) -> int:
        return tree_bytes(module_state(self.module))

    def cost(self, runner: LocalRunner) -> float:
        """Samples of the first split."""
        sources = runner.data.client_ids if EVERYBODY in self.clients else self.clients
        return sum(runner.data.num_samples(client, self.evaluate.splits[0]) for client in sources)

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[list[Row], ClientRecord | None]:
        return score_in_turn(runner, self.scoring(runner, record))

    def scoring(self, runner: LocalRunner, record: ClientRecord) -> Scoring[tuple[list[Row], ClientRecord | None]]:
        """What :meth:`run` does, but for the scores."""
        places: list[Place] = []

        def wanted() -> Iterator[ScoreRequest]:
            for client in self.clients:
                for place, loader in _loaders(runner, client, self.evaluate, self.others):
                    places.append(place)
                    yield place.wanted(runner, self.module, loader, self.mark)

        found = yield wanted()
        return [row for place, scores in zip(places, found, strict=True) for row in place.rows(self.mark, scores)], None

    def lost(self, reason: str) -> NoReturn:
        raise RuntimeError(f"The model of stage {self.mark.stage} could not be scored: {reason}.")


@dataclass(frozen=True)
class ScoreClient:
    """Score the model that a client deploys now (stage L1), or that a checkpoint callback kept for it.

    It works on a copy of the client's record; the one thing that may change is the record's ``checkpoints``.

    Attributes:
        message: what the server would send next; evaluate: splits and data; mark: for the rows; others: all clients' ids.
        kept: the selected model's state, loaded over the deployed one; then no callback is told.
        shared: the global model's state; ``known``: scores on the client's own data, by split, to be taken over where
            the client holds exactly that model.
    """

    message: Message
    evaluate: Evaluate
    mark: Mark
    others: Sequence[str] = ()
    kept: State | None = None
    shared: State | None = None
    known: Mapping[str, Scores] = field(default_factory=dict)

    @property
    def client(self) -> str:
        return self.message.client

    @property
    def num_bytes(self) -> int:
        return self.message.num_bytes

    def cost(self, runner: LocalRunner) -> float:
        """Samples of the first split."""
        return runner.data.num_samples(self.client, self.evaluate.splits[0])

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[list[Row], ClientRecord | None]:
        return score_in_turn(runner, self.scoring(runner, record))

    def scoring(self, runner: LocalRunner, record: ClientRecord) -> Scoring[tuple[list[Row], ClientRecord | None]]:
        """What :meth:`run` does, but for the scores."""
        stage = cast(Stage, self.mark.stage)
        with runner.client(self.message, record, evaluating=True) as client:
            module = runner.personal_module(client, stage)
            if self.kept is not None:
                load_state(module, self.kept)
            is_global = self.shared is not None and equal(module_state(module), self.shared)
            places: list[tuple[Place, Scores]] = []

            def wanted() -> Iterator[ScoreRequest]:
                for place, loader in _loaders(runner, self.client, self.evaluate, self.others):
                    known = self.known.get(place.split, {}) if is_global and place.data == "local" else {}
                    places.append((place, dict(known)))
                    if not known:
                        yield place.wanted(runner, module, loader, self.mark)

            found = iter((yield wanted()))
            runner.bind(client)  # others may have been opened meanwhile
            rows = []
            for place, known in places:
                scores = known or next(found)
                rows += place.rows(self.mark, scores)
                if place.data == "local" and self.kept is None:
                    runner.callbacks.event("on_client_evaluated", client, stage, place.split, scores, module)
            if client.record.checkpoints == record.checkpoints:
                return rows, None
            changed = record.copy()
            changed.checkpoints = client.record.checkpoints
            return rows, changed

    def lost(self, reason: str) -> NoReturn:
        raise RuntimeError(f"Client '{self.client}' could not be scored at stage {self.mark.stage}: {reason}.")


@dataclass(frozen=True)
class Place:
    """Data that is there to be scored on.

    Attributes:
        client: whose model, or whose data; split, data: as in rows; size: samples.
    """

    client: str
    split: str
    data: str
    size: int

    def wanted(self, runner: LocalRunner, module: LightningModule, loader: DataLoader[Any], mark: Mark) -> ScoreRequest:
        """``module`` is to be scored here."""
        seed = (runner.settings.seed, mark.round, self.client, "score", mark.stage, self.split, self.data)
        return ScoreRequest(module, loader, self.split, seed)

    def rows(self, mark: Mark, scores: Scores) -> list[Row]:
        """The scores as rows."""
        one = (mark.round, mark.stage, mark.model, mark.checkpoint, self.data, self.split, self.client)
        return [Row(*one, metric, value, self.size) for metric, value in scores.items()]


def _loaders(
    runner: LocalRunner, client: str, evaluate: Evaluate, others: Sequence[str]
) -> Iterator[tuple[Place, DataLoader[Any]]]:
    """The loaders that are there; ``others``: all clients' ids, for ``evaluate.data`` with ``"clients"``."""
    data = runner.data
    for split in evaluate.splits:
        sources: dict[str, Callable[[], DataLoader[Any] | None]] = {}
        if "local" in evaluate.data:
            sources["local"] = partial(data.client_dataloader, client, split)
        if "pooled" in evaluate.data:
            sources["pooled"] = partial(data.pooled_dataloader, split)
        if "clients" in evaluate.data:
            foreign = [other for other in others if other != client]
            sources |= {f"client:{other}": partial(data.client_dataloader, other, split) for other in foreign}
        for kind, make in sources.items():
            loader = make()
            if loader is not None and len(loader) > 0:
                yield Place(client, split, kind, len(loader.dataset)), loader  # type: ignore[arg-type]

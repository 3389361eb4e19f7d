"""Scoring tasks for engines: one model of the server on many clients' data, or the model that one client deploys."""

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
"""Client of a row whose score was computed on the union of all clients' data."""


@dataclass(frozen=True)
class ScoredModel:
    """The model that a task scores: what all rows of the task have in common.

    Attributes:
        round: Counted from 1, as in rows.
        stage: `"G"`, `"L1"` or `"L2"`.
        model: `"global"` or `"personal"`.
        checkpoint: `"latest"`, or the name of a checkpoint callback.
    """

    round: int
    stage: str
    model: str
    checkpoint: str = "latest"


@dataclass(frozen=True)
class ScoreModel:
    """Score one module on the data of several clients, or on the union (:data:`EVERYBODY`).

    Attributes:
        module: Scored as it is, on the CPU; not changed.
        clients: Whose data.
        evaluate: Splits and data.
        scored: What the rows have in common.
        others: All clients' ids, for `evaluate.data` with `"clients"`.
    """

    module: LightningModule
    clients: tuple[str, ...]
    evaluate: Evaluate
    scored: ScoredModel
    others: Sequence[str] = ()
    client: None = None

    @property
    def num_bytes(self) -> int:
        return tree_bytes(module_state(self.module))

    def cost(self, runner: LocalRunner) -> float:
        """Return the number of samples of the first split."""
        sources = runner.data.client_ids if EVERYBODY in self.clients else self.clients
        return sum(runner.data.num_samples(client, self.evaluate.splits[0]) for client in sources)

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[list[Row], ClientRecord | None]:
        return score_in_turn(runner, self.scoring(runner, record))

    def scoring(self, runner: LocalRunner, record: ClientRecord) -> Scoring[tuple[list[Row], ClientRecord | None]]:
        """Yield the requests, then end with the rows."""
        places: list[Place] = []

        def requests() -> Iterator[ScoreRequest]:
            for client in self.clients:
                for place, loader in _loaders(runner, client, self.evaluate, self.others):
                    places.append(place)
                    yield place.request(runner, self.module, loader, self.scored)

        found = yield requests()
        return [
            row for place, scores in zip(places, found, strict=True) for row in place.rows(self.scored, scores)
        ], None

    def lost(self, reason: str) -> NoReturn:
        raise RuntimeError(f"The model of stage {self.scored.stage} could not be scored: {reason}.")


@dataclass(frozen=True)
class ScoreClient:
    """Score the model that a client deploys now (stage L1), or that a checkpoint callback kept for it.

    It works on a copy of the client's record; the one thing that may change is the record's ``checkpoints``.

    Attributes:
        message: What the server would send next.
        evaluate: Splits and data.
        scored: What the rows have in common.
        others: All clients' ids, for `evaluate.data` with `"clients"`.
        kept: State of a selected model, loaded over the deployed one; callbacks do not see its scores.
        shared: State of the global model.
        known: The global model's scores on the client's own data, by split; taken over where the client holds exactly
            that model.
    """

    message: Message
    evaluate: Evaluate
    scored: ScoredModel
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
        """Return the number of samples of the first split."""
        return runner.data.num_samples(self.client, self.evaluate.splits[0])

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[list[Row], ClientRecord | None]:
        return score_in_turn(runner, self.scoring(runner, record))

    def scoring(self, runner: LocalRunner, record: ClientRecord) -> Scoring[tuple[list[Row], ClientRecord | None]]:
        """Yield the requests, then end with the rows."""
        stage = cast(Stage, self.scored.stage)
        with runner.client(self.message, record, evaluating=True) as client:
            module = runner.personal_module(client, stage)
            if self.kept is not None:
                load_state(module, self.kept)
            is_global = self.shared is not None and equal(module_state(module), self.shared)
            places: list[tuple[Place, Scores]] = []

            def requests() -> Iterator[ScoreRequest]:
                for place, loader in _loaders(runner, self.client, self.evaluate, self.others):
                    known = self.known.get(place.split, {}) if is_global and place.data == "local" else {}
                    places.append((place, dict(known)))
                    if not known:
                        yield place.request(runner, module, loader, self.scored)

            found = iter((yield requests()))
            runner.bind(client)  # others may have been opened meanwhile
            rows = []
            for place, known in places:
                scores = known or next(found)
                rows += place.rows(self.scored, scores)
                if place.data == "local" and self.kept is None:
                    runner.callbacks.event("on_client_evaluated", client, stage, place.split, scores, module)
            if client.record.checkpoints == record.checkpoints:
                return rows, None
            changed = record.copy()
            changed.checkpoints = client.record.checkpoints
            return rows, changed

    def lost(self, reason: str) -> NoReturn:
        raise RuntimeError(f"Client '{self.client}' could not be scored at stage {self.scored.stage}: {reason}.")


@dataclass(frozen=True)
class Place:
    """A loader that exists, as rows name it.

    Attributes:
        client: The client whose model is scored, or on whose data.
        split: `"val"` or `"test"`.
        data: `"local"`, `"pooled"`, or `"client:ID"` for another client's data.
        size: Samples.
    """

    client: str
    split: str
    data: str
    size: int

    def request(
        self, runner: LocalRunner, module: LightningModule, loader: DataLoader[Any], scored: ScoredModel
    ) -> ScoreRequest:
        """Request the scores of `module` here."""
        seed = (runner.settings.seed, scored.round, self.client, "score", scored.stage, self.split, self.data)
        return ScoreRequest(module, loader, self.split, seed)

    def rows(self, scored: ScoredModel, scores: Scores) -> list[Row]:
        """Return the scores as rows."""
        one = (scored.round, scored.stage, scored.model, scored.checkpoint, self.data, self.split, self.client)
        return [Row(*one, metric, value, self.size) for metric, value in scores.items()]


def _loaders(
    runner: LocalRunner, client: str, evaluate: Evaluate, others: Sequence[str]
) -> Iterator[tuple[Place, DataLoader[Any]]]:
    """Yield the loaders that exist for a client, with their places."""
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

"""Scoring tasks for engines: one model of the server on many clients' data, or the model that one client deploys.

A model of the server as tasks carry it to where it is scored: its entries, and how the module around them is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import FunctionType
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client import Client
from fedlightning.client.client_errors import client_failure
from fedlightning.client.record import ClientRecord, copy_tree
from fedlightning.client.requests import Evaluate, MissingScores, ScoreRequest, Scores, Scoring, score_in_turn
from fedlightning.client.runtime import ClientRuntime
from fedlightning.client.visit import bind, find_personal_module, find_scored_splits, open_client
from fedlightning.contract import POOLED, Stage
from fedlightning.contract.messages import Message, tree_bytes
from fedlightning.datamodules.sampling import samples_in
from fedlightning.scores.rows import EVERYBODY, LOCAL, OTHERS, UNSEEN, Gap, Row
from fedlightning.tensors import State, equal, load_state, module_state

PLAIN = (bool, int, float, str)
NOT_COMPARED = ("training", "_parameters", "_buffers", "_modules")
"""Attributes of a module that are its mode, or are compared elsewhere."""


class ServerModel:
    """A model of the server.

    In the process that made it the module is there, and is scored as it is. Into another process go its state and its owner:
    the architecture whose module the server builds, wrapped by the callbacks, and the path in that where the model is only a
    part of it. A module that no architecture gives (another class, other shapes, attributes of its own) travels whole.

    Args:
        module: The model.
        blueprint: Builds the server's modules.

    Example:
        >>> import pickle
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fedlightning.client.blueprint import Blueprint
        >>> from fedlightning.client.requests import LocalSettings
        >>> from fedlightning.contract import CallbackList
        >>> blueprint = Blueprint(BoringModel(), CallbackList([]), LocalSettings(seed=0, max_rounds=1))
        >>> model = ServerModel(BoringModel(), blueprint)
        >>> model.owner, sorted(model.state)
        (('', ''), ['layer.bias', 'layer.weight'])
        >>> there = pickle.loads(pickle.dumps(model))
        >>> bool((there.built(blueprint).layer.weight == model.built(blueprint).layer.weight).all())
        True
    """

    def __init__(self, module: LightningModule, blueprint: Blueprint) -> None:
        self._module: LightningModule | None = module
        self._blueprint = blueprint

    @cached_property
    def state(self) -> State:
        """The model's entries."""
        assert self._module is not None
        return module_state(self._module)

    @cached_property
    def owner(self) -> tuple[str, str] | None:
        """Name of the architecture, and path of the model in its module (empty: all of it); `None`: it travels whole."""
        assert self._module is not None
        for name in self._blueprint.architectures:
            for path, part in _parts(self._blueprint.reference(name)):
                if _alike(part, self._module):
                    return name, path
        return None

    @classmethod
    def of(cls, state: State, owner: tuple[str, str]) -> ServerModel:
        """Return the model as it arrives in another process."""
        model = cls.__new__(cls)
        model._module = None
        model.__dict__.update(state=state, owner=owner)
        return model

    def kind(self, blueprint: Blueprint) -> type:
        """Return the class of the module."""
        if self._module is not None:
            return type(self._module)
        assert self.owner is not None
        return type(blueprint.reference(self.owner[0]).get_submodule(self.owner[1]))

    def built(self, blueprint: Blueprint) -> LightningModule:
        """Return the module; where it is not there yet, build it around the state."""
        if self._module is not None:
            return self._module
        assert self.owner is not None
        architecture, path = self.owner
        module = blueprint.build("server", architecture).get_submodule(path)
        assert isinstance(module, LightningModule)
        load_state(module, self.state)
        return module

    def __reduce__(self) -> Any:
        if self.owner is None:
            return _whole, (self._module,)
        return ServerModel.of, (self.state, self.owner)


def _whole(module: LightningModule) -> ServerModel:
    model = ServerModel.__new__(ServerModel)
    model._module = module
    model.__dict__["owner"] = None
    return model


def _parts(module: LightningModule) -> Iterator[tuple[str, LightningModule]]:
    for path, part in module.named_modules():
        if isinstance(part, LightningModule):
            yield path, part


def _alike(module: nn.Module, other: nn.Module) -> bool:
    """Whether two modules differ in the values of their entries only."""
    if type(module) is not type(other):
        return False
    mine, theirs = dict(module.named_modules()), dict(other.named_modules())
    if {path: type(part) for path, part in mine.items()} != {path: type(part) for path, part in theirs.items()}:
        return False
    first, second = module_state(module), module_state(other)
    if first.keys() != second.keys() or any(
        (value.shape, value.dtype) != (second[name].shape, second[name].dtype) for name, value in first.items()
    ):
        return False
    # these are compared here, one by one
    compared: dict[tuple[int, int], Any] = {(id(part), id(theirs[path])): None for path, part in mine.items()}
    return all(_same(_attributes(part), _attributes(theirs[path]), compared) for path, part in mine.items())


def _attributes(part: nn.Module) -> dict[str, Any]:
    kept = {
        name: value for name, value in part.named_buffers(recurse=False) if name in part._non_persistent_buffers_set
    }
    compared = {name: value for name, value in vars(part).items() if name not in NOT_COMPARED and "hooks" not in name}
    return compared | {f"buffer {name}": value for name, value in kept.items()}


def _same(value: Any, other: Any, compared: dict[tuple[int, int], Any]) -> bool:
    """Whether two values are equal: tensors and plain values by themselves, other objects as they would be pickled."""
    if value is other or (id(value), id(other)) in compared:
        return True
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    if type(value) is not type(other):
        return False
    if isinstance(value, PLAIN):
        return bool(value == other) or repr(value) == repr(other)
    compared[id(value), id(other)] = value, other
    if type(value) is dict:
        return value.keys() == other.keys() and all(_same(value, other[key], compared) for key, value in value.items())
    if type(value) in (list, tuple):
        return len(value) == len(other) and all(_same(*pair, compared) for pair in zip(value, other, strict=True))
    if isinstance(value, FunctionType):  # those that a module makes for itself, as metrics do
        return value.__code__ == other.__code__ and _same(_around(value), _around(other), compared)
    try:
        return value == other or _same(_inside(value), _inside(other), compared)
    except Exception:  # it cannot be compared: the module travels whole
        return False


def _around(function: FunctionType) -> list[Any]:
    """Return what a function has besides its code."""
    cells = function.__closure__ or ()
    return [function.__defaults__, function.__kwdefaults__, [cell.cell_contents for cell in cells]]


def _inside(value: Any) -> Any:
    """Return what an object is made of."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        raise TypeError(f"{value!r} is known by its name")
    return [list(part) if place > 2 and part is not None else part for place, part in enumerate(reduced)]


@dataclass(frozen=True)
class ScoredModel:
    """The model that a task scores: what all rows of the task have in common.

    Attributes:
        round: Counted from 1, as in rows.
        stage: `"G"`, `"L1"` or `"L2"`.
        model: `"global"`, `"personal"` or `"unseen"`.
        checkpoint: `"latest"`, or the name of a checkpoint callback.
    """

    round: int
    stage: str
    model: str
    checkpoint: str = "latest"


@dataclass(frozen=True)
class ScoreModel:
    """Score one model of the server on the data of several clients, or on the union (:data:`EVERYBODY`).

    Attributes:
        model: Scored as it is, on the CPU; not changed.
        clients: Whose data.
        evaluate: Splits and data.
        scored: What the rows have in common.
        others: All clients' ids, for `evaluate.data` with `"clients"`.
    """

    model: ServerModel
    clients: tuple[str, ...]
    evaluate: Evaluate
    scored: ScoredModel
    others: Sequence[str] = ()
    client: None = None

    @property
    def address(self) -> tuple[int, str, str]:
        return self.scored.round, f"{self.scored.stage} {self.scored.checkpoint}", ",".join(self.clients)

    @property
    def num_bytes(self) -> int:
        return tree_bytes(self.model.state)

    def cost(self, runner: ClientRuntime) -> float:
        """Return the number of samples of the first split."""
        data = runner.described
        sources = data.client_ids if EVERYBODY in self.clients else self.clients
        return sum(data.num_samples(client, self.evaluate.splits[0]) for client in sources)

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[list[Row], ClientRecord | None]:
        return score_in_turn(runner, self.scoring(runner, record))

    def scoring(self, runner: ClientRuntime, record: ClientRecord) -> Scoring[tuple[list[Row], ClientRecord | None]]:
        """Yield the requests, then end with the rows."""
        places: list[tuple[Place, Scores | None]] = []
        module = self.model.built(runner.blueprint)

        def requests() -> Iterator[ScoreRequest]:
            for client in self.clients:
                for source in _sources(runner, client, self.evaluate, self.others):
                    yield from _requests(runner, client, source, module, self.scored, places)

        answers = iter((yield requests()))
        rows = []
        for place, scores in places:
            rows += place.rows(self.scored, next(answers) if scores is None else scores)
        return rows, None

    def lost(self, reason: str) -> list[Row]:
        """A gap for each client: which of several it was nobody knows, see :class:`Lost`."""
        data = POOLED if self.clients == (EVERYBODY,) else LOCAL
        return Lost(gap for client in self.clients for gap in gaps(client, data, self.evaluate, self.scored, reason))

    def failure(self, answer: list[Row]) -> tuple[str, str] | None:
        """Return the first gap in the scores. What was lost with several clients is scored again one by one anyway."""
        return None if isinstance(answer, Lost) and len(self.clients) > 1 else _first_gap(answer)


@dataclass(frozen=True)
class ScoreClient:
    """Score the model that a client deploys now (stage L1), or that a checkpoint callback kept for it.

    It works on a copy of the client's record; the one thing that may change is the record's ``checkpoints``.

    Attributes:
        message: What the server would send next.
        evaluate: Splits and data.
        scored: What the rows have in common.
        others: All clients' ids, for `evaluate.data` with `"clients"`.
        kept: Key of a model in the record's `checkpoints`, loaded over the deployed one; callbacks do not see its scores, nor
            those of a client that takes no part in training.
        shared: State of the global model.
        known: The global model's scores and number of samples, by split and data; taken over where the client holds
            exactly that model.
    """

    message: Message
    evaluate: Evaluate
    scored: ScoredModel
    others: Sequence[str] = ()
    kept: str = ""
    shared: State | None = None
    known: Mapping[tuple[str, str], tuple[Scores, int]] = field(default_factory=dict)

    @property
    def client(self) -> str:
        return self.message.client

    @property
    def address(self) -> tuple[int, str, str]:
        kept = " kept" if self.kept else ""
        return self.scored.round, f"{self.scored.stage} {self.scored.checkpoint}{kept}", self.client

    @property
    def num_bytes(self) -> int:
        return self.message.size

    def cost(self, runner: ClientRuntime) -> float:
        """Return the number of samples of the first split."""
        return runner.described.num_samples(self.client, self.evaluate.splits[0])

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[list[Row], ClientRecord | None]:
        return score_in_turn(runner, self.scoring(runner, record))

    def scoring(self, runner: ClientRuntime, record: ClientRecord) -> Scoring[tuple[list[Row], ClientRecord | None]]:
        """Yield the requests, then end with the rows."""
        stage = cast(Stage, self.scored.stage)
        with ExitStack() as stack:
            try:
                client = stack.enter_context(open_client(runner, self.message, record, evaluating=True))
                before = copy_tree(client.record.checkpoints)
                module = None if self._is_known(runner, client) else find_personal_module(runner, client, stage)
                if module is not None and self.kept:
                    load_state(module, before[self.kept]["model"])
            except BaseException as error:
                reason = MissingScores(client_failure(error)).reason
                yield ()
                return list(gaps(self.client, LOCAL, self.evaluate, self.scored, reason)), None
            is_global = module is None or (self.shared is not None and equal(module_state(module), self.shared))
            places: list[tuple[Place, Scores | None]] = []

            def requests() -> Iterator[ScoreRequest]:
                for split, data, make in _sources(runner, self.client, self.evaluate, self.others):
                    scores, size = self.known.get((split, data), ({}, 0)) if is_global else ({}, 0)
                    if scores:
                        places.append((Place(self.client, split, data, size), dict(scores)))
                        continue
                    assert module is not None
                    yield from _requests(runner, self.client, (split, data, make), module, self.scored, places)

            answers = iter((yield requests()))
            bind(runner, client)  # others may have been opened meanwhile
            rows = []
            for place, known_scores in places:
                scores = next(answers) if known_scores is None else known_scores
                is_own = place.data == LOCAL and not self.kept and self.scored.model != UNSEEN
                if is_own and module is not None and not isinstance(scores, MissingScores):
                    try:
                        runner.callbacks.event("on_client_evaluated", client, stage, place.split, scores, module)
                    except BaseException as error:
                        scores = MissingScores(client_failure(error))
                rows += place.rows(self.scored, scores)
            if client.record.checkpoints == before:
                return rows, None
            base = runner.blueprint.base(runner.blueprint.architecture_of(self.client))
            return rows, replace(record.copy(), checkpoints=client.record.folded(base).checkpoints)

    def _is_known(self, runner: ClientRuntime, client: Client) -> bool:
        """Whether all scores are known and nobody asks for the module, so that it need not be built."""
        if not self.known or self.kept or self.shared is None or not client.is_unbuilt:
            return False
        wanted = {(split, data) for split, data, _ in _sources(runner, self.client, self.evaluate, self.others)}
        places = {place for place, (scores, _) in self.known.items() if scores}
        asked = ("personal_module", *(("on_client_evaluated",) if self.scored.model != UNSEEN else ()))
        claimed = any(callback.claims(name) for callback in runner.callbacks for name in asked)
        return not claimed and wanted <= places and equal(client.entries, self.shared)

    def lost(self, reason: str) -> list[Row]:
        """A gap for each split."""
        return Lost(gaps(self.client, LOCAL, self.evaluate, self.scored, reason))

    def failure(self, answer: list[Row]) -> tuple[str, str] | None:
        """Return the first gap in the scores."""
        return _first_gap(answer)


class Lost(list[Row]):
    """The answer of a scoring task that was given up: gaps only."""


def gaps(client: str, data: str, evaluate: Evaluate, scored: ScoredModel, reason: str) -> Iterator[Row]:
    """Yield a gap for each split."""
    for split in evaluate.splits:
        columns = (scored.round, scored.stage, scored.model, scored.checkpoint, data, split, client)
        yield Gap(*columns, "", math.nan, 0, reason)


def _first_gap(rows: Iterable[Row]) -> tuple[str, str] | None:
    return next(((row.client, row.sentence) for row in rows if isinstance(row, Gap)), None)


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
        self, runner: ClientRuntime, module: LightningModule, loader: DataLoader[Any], scored: ScoredModel
    ) -> ScoreRequest:
        """Request the scores of `module` here."""
        seed = (runner.settings.seed, scored.round, self.client, "score", scored.stage, self.split, self.data)
        whose = POOLED if self.client == EVERYBODY else self.client
        return ScoreRequest(module, loader, self.split, seed, whose)

    def rows(self, scored: ScoredModel, scores: Scores) -> list[Row]:
        """Return the scores as rows."""
        columns = (scored.round, scored.stage, scored.model, scored.checkpoint, self.data, self.split, self.client)
        if isinstance(scores, MissingScores):
            return [Gap(*columns, "", math.nan, self.size, scores.reason)]
        return [Row(*columns, metric, value, self.size) for metric, value in scores.items()]


Make = Callable[[], DataLoader[Any] | None]


def _sources(
    runner: ClientRuntime, client: str, evaluate: Evaluate, others: Sequence[str]
) -> Iterator[tuple[str, str, Make]]:
    """Yield the data that a client's model is scored on: split, data as in rows, and what makes the loader."""
    data = runner.data
    for split in find_scored_splits(runner, evaluate.splits):
        if LOCAL in evaluate.data:
            yield split, LOCAL, partial(data.client_dataloader, client, split)
        if POOLED in evaluate.data:
            yield split, POOLED, partial(runner.pooled_dataloader, split)
        if "clients" in evaluate.data:
            for other in others:
                if other != client:
                    yield split, f"{OTHERS}{other}", partial(data.client_dataloader, other, split)


def _requests(
    runner: ClientRuntime,
    client: str,
    source: tuple[str, str, Make],
    module: LightningModule,
    scored: ScoredModel,
    places: list[tuple[Place, Scores | None]],
) -> Iterator[ScoreRequest]:
    """Yield the request for the data of a source, if there are any; note the place, and why there is no request."""
    split, data, make = source
    try:
        loader = make()
        size = 0 if loader is None or len(loader) == 0 else samples_in(loader)
    except BaseException as error:
        places.append((Place(client, split, data, 0), MissingScores(client_failure(error))))
        return
    if loader is not None and size:
        place = Place(client, split, data, size)
        places.append((place, None))
        yield place.request(runner, module, loader, scored)

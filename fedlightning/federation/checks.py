"""The checks of callbacks before round 1: on the server as far as no batch is needed, else where the batches are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch.utils.data import IterableDataset

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.blueprint.optimizers import optimizers_of
from fedlightning.datamodules.base import SPLITS
from fedlightning.datamodules.own_generators import kept
from fedlightning.datamodules.public import first_batch, size_of
from fedlightning.errors import ConfigurationError, warn
from fedlightning.federation.engine import Engine, Question, Task
from fedlightning.federation.server import Server
from fedlightning.hooks import Change, FederatedCallback, Setup, changes_of, refuse_combinations
from fedlightning.seeding import isolated
from fedlightning.tensors import entry_kinds
from fedlightning.visit.failing import client_failure
from fedlightning.visit.record import ClientRecord
from fedlightning.visit.runner import LocalRunner

Check = tuple[FederatedCallback, str, Setup]
"""A callback, the name of an architecture, and what the callback is told."""
PLAIN = (
    *("clients", "num_samples", "max_rounds", "local_epochs", "local_steps", "optimizer_state", "trainer_arguments"),
    *("evaluate_every", "participation", "loop", "absent", "has_clock"),
)
"""What a check that runs elsewhere is sent of its :class:`~fedlightning.hooks.Setup`, beside answers to what it may ask."""


class BatchElsewhere(BaseException):
    """A check asks for a client's batch, and the clients' data are elsewhere. No `except Exception` of a check catches it."""


def check_callbacks(
    server: Server,
    engine: Engine,
    evaluate_every: int,
    loop: str = "Synchronous",
    absent: str = "",
    beside: Sequence[Task[Any]] = (),
    *,
    has_clock: bool = False,
) -> dict[Task[Any], Any]:
    """Let every callback refuse what cannot work. Return the answers of the tasks in `beside`.

    Checks that need a batch from elsewhere are carried out together, and refuse and warn in the order of the callbacks.
    """
    blueprint, settings = server.blueprint, server.blueprint.settings
    asked, public = Questions(engine), Public(engine.public, blueprint)
    setup = Setup(
        module=blueprint.build("server"),
        template=blueprint.template_of(server.architecture().name),
        kinds=server.kinds,
        callbacks=list(server.callbacks),
        clients=server.clients,
        num_samples=server.num_samples,
        max_rounds=server.max_rounds,
        local_epochs=settings.local_epochs,
        local_steps=settings.local_steps,
        optimizer_state=settings.optimizer_state,
        trainer_arguments=settings.trainer_arguments,
        num_batches=asked.num_batches,
        first_batch=asked.first_batch,
        evaluate_every=evaluate_every,
        participation=server.participation,
        has_pooled=asked.has_pooled,
        has_split=asked.has_split,
        has_public=public.there,
        public_size=public.size,
        public_batch=public.batch,
        warn=warn,
        loop=loop,
        absent=absent_by(server) or absent,
        has_clock=has_clock,
    )
    modules = {name: blueprint.build("server", name) for name in server.architectures}
    checks: list[Check] = []
    for name, module in modules.items():
        whose = replace(
            setup,
            module=module,
            template=blueprint.template_of(name),
            kinds=server.architectures[name].kinds,
            optimizers=optimizers_of(module),
            modules=modules if server.is_mixed else {},
            shared_names=partial(server.shared_in, name),
        )
        refuse_combinations(whose.callbacks, whose)
        checks += [(callback, name, whose) for callback in server.callbacks]
    if engine.data_here:
        for callback, _, whose in checks:
            callback.check(whose)
        return {}
    return _check_there(checks, engine, asked, beside)


def absent_by(server: Server) -> str:
    """Return what keeps clients out of rounds, the loop apart; empty: nothing."""
    share, count = server.participation, len(server.clients)
    if share < count if isinstance(share, int) else share < 1.0:
        return f"participation={share}"
    away = {Change.ABSENCE, Change.PARTICIPANTS}
    return next((callback.key for callback in server.callbacks if away & changes_of(callback)), "")


def _check_there(
    checks: Sequence[Check], engine: Engine, asked: Questions, beside: Sequence[Task[Any]]
) -> dict[Task[Any], Any]:
    """Check callbacks here as far as no batch is needed, then the others where the batches are, all together."""
    done: list[tuple[Setup, list[str], CheckThere | None]] = []  # what each has said, or the task that is to say it
    refused: ValueError | None = None
    missing = engine.no_public if engine.public()[0] is None else ""
    for callback, architecture, setup in checks:
        said: list[str] = []
        there = None
        try:
            callback.check(replace(setup, warn=said.append))
        except BatchElsewhere:
            there = _there(callback, architecture, setup, asked, has_public=not missing)
        except ValueError as error:  # it counts if none of those before refuses
            refused = _without_public(callback.key, str(error), missing) or error
            break
        done.append((setup, said, there))
    wanted = [] if refused is not None else list(beside)
    tasks: list[Task[Any]] = [*(there for _, _, there in done if there is not None), *wanted]
    found = iter(list(engine.map(tasks)) if tasks else [])
    for setup, said, there in done:
        if there is not None:
            refusal, said = next(found)
            if refusal is not None:
                raise _without_public(there.callback, refusal, missing) or ConfigurationError(refusal)
        for text in said:
            setup.warn(text)
    if refused is not None:
        raise refused
    return dict(zip(wanted, found, strict=True))


def _there(
    callback: FederatedCallback, architecture: str, setup: Setup, asked: Questions, has_public: bool
) -> CheckThere:
    shared = {"": tuple(setup.shared_names())}
    shared |= {other.key: tuple(setup.shared_names(without=other)) for other in setup.callbacks}
    return CheckThere(
        callback.key,
        architecture,
        str(asked.client),
        {name: getattr(setup, name) for name in PLAIN},
        shared,
        asked.batches,
        asked.pooled,
        tuple(split for split in SPLITS if asked.has_split(split)),
        is_mixed=bool(setup.modules),
        has_public=has_public,
    )


def _without_public(callback: str, refusal: str, missing: str) -> ConfigurationError | None:
    """Return the refusal of a callback that misses public data, with the way out of where the clients are elsewhere."""
    return ConfigurationError(f"{callback} {missing}") if missing and "public data" in refusal else None


class Questions:
    """What a check may ask about the data, answered by what the engine knows.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @cached_property
    def batches(self) -> Mapping[str, int]:
        """Training batches in an epoch of each client."""
        return self._engine.describe(parts=["batches"]).batches

    @cached_property
    def pooled(self) -> tuple[str, ...]:
        """Splits whose union over the clients can be had in one place."""
        return self._engine.describe(parts=["pooled"]).pooled

    @cached_property
    def client(self) -> str | None:
        """The first client that has a training batch; `None`: nobody has."""
        return next((client for client in self._engine.runner.described.client_ids if self.batches[client]), None)

    def num_batches(self, client: str) -> int:
        """Return the training batches in an epoch of a client."""
        if self._engine.data_here:
            return self._engine.runner.num_batches(client)
        return self.batches[client]

    def first_batch(self) -> Any:
        """Return a training batch of the first client that has one; `None` if nobody has."""
        if self._engine.data_here:
            return self._engine.runner.first_batch()
        if self.client is None:
            return None
        raise BatchElsewhere

    def has_pooled(self, split: str) -> bool:
        """Return whether the union of all clients' data of a split can be had."""
        if self._engine.data_here:
            return self._engine.runner.has_pooled(split)
        return split in self.pooled

    def has_split(self, split: str) -> bool:
        """Return whether any client has samples of a split."""
        known = self._engine.runner.described
        return any(known.num_samples(client, split) for client in known.client_ids)


class Public:
    """What a check may ask about public data.

    Args:
        source: Gives their loader, or `None`, and the name of the data module.
        blueprint: Has the seed and the precision.
    """

    def __init__(self, source: Callable[[], tuple[Any, str]], blueprint: Blueprint) -> None:
        self._source, self._blueprint = source, blueprint

    def there(self) -> bool:
        """Return whether there are public data."""
        loader, name = self._source()
        dataset: Any = None if loader is None else loader.dataset
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{name}.public_dataloader gives an iterable {type(dataset).__name__}, but clients draw public samples at "
                "random, by their index. Give a dataset with __len__ and __getitem__."
            )
        return loader is not None

    def size(self) -> int:
        """Return the number of public samples; 0 without any."""
        return size_of(*self._source())

    def batch(self) -> Any:
        """Return the first public batch."""
        loader, name = self._source()
        with isolated(self._blueprint.settings.seed, "first public batch"), kept(getattr(loader, "dataset", None)):
            return self._blueprint.precision.convert_input(first_batch(loader, name))


@dataclass(frozen=True)
class CheckThere(Question):
    """The check of one callback, as a task for a machine that has a client's batch.

    Attributes:
        callback: Key of the callback.
        architecture: Name of the architecture whose module is checked.
        client: The first client with a batch.
        facts: The plain attributes of the `Setup`.
        shared: The names that travel in round 1: under "", and under the key of a callback those without its choice.
        batches: Training batches in an epoch of each client.
        pooled: Splits whose union can be had.
        splits: Splits of which any client has samples.
        is_mixed: Whether clients have models of different architectures.
        has_public: Whether the server has public data; a site's own are no use without.
    """

    callback: str
    architecture: str
    client: str
    facts: Mapping[str, Any]
    shared: Mapping[str, tuple[str, ...]]
    batches: Mapping[str, int]
    pooled: tuple[str, ...]
    splits: tuple[str, ...]
    is_mixed: bool
    has_public: bool

    @property
    def address(self) -> tuple[int, str, str]:
        return 0, f"check of {self.callback}", self.client

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[tuple[str | None, list[str]], None]:
        """Return the sentence of a refusal, or `None`, and what the check warns of."""
        blueprint = runner.blueprint
        names = blueprint.architectures if self.is_mixed else (self.architecture,)
        modules = {name: blueprint.build("server", name) for name in names}
        module = modules[self.architecture]
        loader = runner.data.public_dataloader() if self.has_public else None
        public = Public(lambda: (loader, type(runner.data).__name__), blueprint)
        said: list[str] = []
        setup = Setup(
            module=module,
            template=blueprint.template_of(self.architecture),
            kinds=entry_kinds(module),
            callbacks=list(blueprint.callbacks),
            optimizers=optimizers_of(module),
            modules=modules if self.is_mixed else {},
            num_batches=lambda client: self.batches[client],
            first_batch=runner.first_batch,
            has_pooled=lambda split: split in self.pooled,
            has_split=lambda split: split in self.splits,
            has_public=public.there,
            public_size=public.size,
            public_batch=public.batch,
            shared_names=lambda without=None: self.shared["" if without is None else without.key],
            warn=said.append,
            **self.facts,
        )
        owner = next(one for one in blueprint.callbacks if one.key == self.callback)
        try:
            owner.check(setup)
        except ValueError as error:
            return (str(client_failure(error)), said), None
        return (None, said), None

    def lost(self, reason: str) -> tuple[str | None, list[str]]:
        """An answer that refuses: the check could not be made."""
        return f"{self.callback} could not be checked at client '{self.client}': {reason}.", []

"""The client side of a federation: :class:`LocalRunner` opens clients, finds their batches, fits and scores them."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.blueprint.client_logger import ClientLogger
from fedlightning.blueprint.settings import LocalSettings
from fedlightning.compat.attached import detached
from fedlightning.compat.loader_workers import preload_fork_server
from fedlightning.compat.quiet import quiet
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.datamodules.held_out import FewerClients, without
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.datamodules.own_generators import kept, readdress, seed_in_workers
from fedlightning.datamodules.ready_batches import samples_in
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import samples_at
from fedlightning.hooks import POOLED, CallbackList, Phase, Stage, TrainingData
from fedlightning.messages import Message
from fedlightning.seeding import address, isolated
from fedlightning.tensors import load_state
from fedlightning.tensors.parametrized import settle
from fedlightning.visit import fit as local_fit
from fedlightning.visit.client import Client
from fedlightning.visit.description import Description, Part, describe
from fedlightning.visit.fitters import FitterChoice
from fedlightning.visit.freezing import only_training
from fedlightning.visit.lightning_loop import LightningFitter
from fedlightning.visit.monitors import Monitor
from fedlightning.visit.record import ClientRecord
from fedlightning.visit.requests import Fit, Score, Scores, score_or_miss
from fedlightning.visit.scorer import Scorer
from fedlightning.visit.surroundings import ClientData, Surroundings
from fedlightning.visit.visit_callback import VisitCallback, address_of

EPOCHS_OF_A_VISIT = 2**31
"""More than any visit has, so that its epochs never get the address of another round's."""


@dataclass
class LocalRunner:
    """The client side of a federation: blueprint and data. An engine decides where it runs.

    :mod:`fedlightning.visit.visit` describes one visit; the methods that it calls are here.

    Attributes:
        blueprint: Builds the clients' modules.
        data: Samples of each client.
        left_out: Clients of these data that take no part in training.
        together: Whether these are the data of all clients. A site that has its own clients only says False: the union of
            its data is not everybody's, so nothing is trained or scored on it.
        folder: Where the clients' models are written, where the run's own folder is on another machine.
        scorer: Scores modules.
        loop: Choice of who fits.
        monitor: What visits validate for; `None` if nothing asks for it.
    """

    blueprint: Blueprint
    data: FederatedDataModule
    left_out: list[str] = field(default_factory=list)
    together: bool = True
    folder: Path | None = None
    scorer: Scorer = field(init=False)
    loop: FitterChoice = field(init=False)
    monitor: Monitor | None = field(init=False, default=None)
    _described: Description | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        preload_fork_server()
        self._make_scorer()
        parts = self.blueprint.parts
        fitters = [make(self.blueprint) for make in parts.fitters]
        self.loop = FitterChoice(self.settings.local_loop, [*fitters, LightningFitter(parts.loop_checks)])
        if self.settings.log_clients is True:
            self.loop.give_up("log_clients=True keeps what Lightning's own loop logs")

    @property
    def callbacks(self) -> CallbackList:
        """The federated callbacks."""
        return self.blueprint.callbacks

    @property
    def settings(self) -> LocalSettings:
        """Settings of local training."""
        return self.blueprint.settings

    # -- data --------------------------------------------------------------------------------------------------------
    def set_up(self, stage: str) -> None:
        """Prepare the data and set them up, as Lightning does."""
        with quiet():
            self.data.prepare_data()
            self.data.setup(stage)

    def leave_out(self, clients: Collection[str]) -> None:
        """Keep clients out of training from now on: they are in no list and in no union of the data any more."""
        if clients:
            self.data = without(self.data, clients)
            self.left_out = [*self.left_out, *clients]
            self._described = None
            self._make_scorer()

    def measure(self) -> dict[str, dict[str, Any]]:
        """Return what each client that trains here gives for the statistics before round 1."""
        return {client: self.data.statistics_of(client) for client in self.data.client_ids}

    def agree(self, totals: Mapping[str, Any]) -> None:
        """Prepare the data with the totals of all clients, from now on."""
        self.data = self.data.with_statistics(totals)
        self._described = None
        self._make_scorer()

    def describe(self, leave_out: Collection[str] = (), parts: Collection[Part] = ()) -> Description:
        """Describe the data; see :func:`~fedlightning.visit.description.describe`."""
        limit = self.settings.trainer_arguments.get("limit_train_batches")
        return describe(self.data, leave_out, parts, left_out=self.left_out, limit=limit, together=self.together)

    def beside(self, blueprint: Blueprint) -> LocalRunner:
        """Return a runner of another blueprint on the same data."""
        made = LocalRunner(blueprint, self.data, self.left_out, self.together, self.folder)
        made._described = self._described
        return made

    @property
    def described(self) -> Description:
        """Ids and sizes of the clients. Where the data are not here, whoever knows them has said so (:meth:`know`)."""
        if self._described is None:
            self._described = self.describe()
        return self._described

    def know(self, description: Description) -> None:
        """Take ids and sizes from a description, in a process that has no data."""
        self._described = description

    def pooled_dataloader(self, split: str, round: int | None = None) -> DataLoader[Any] | None:
        """Return the loader over the union of all clients' data of a split; for training in a round, if one is given."""
        if not self.together:
            raise ValueError("the union of all clients' data is asked for, and here are only those of some clients")
        return (self.data if round is None else self.data.at_round(round)).pooled_dataloader(split)

    def _make_scorer(self) -> None:
        data = self.data.whole if isinstance(self.data, FewerClients) else self.data
        source = None if isinstance(data, LoaderDataModule) else getattr(data, "datamodule", data)
        self._source = source  # the data module that the user wrote; `None` if there are loaders only
        self.scorer = Scorer(self.blueprint, source, self._loader_of)

    def _loader_of(self, client: str, split: str) -> DataLoader[Any] | None:
        """Return the loader that a module finds while it is scored; of the first client where nobody is meant."""
        if client == POOLED:
            return self.pooled_dataloader(split)
        return self.data.client_dataloader(client or self.data.client_ids[0], split)

    def scored_splits(self, splits: Sequence[str]) -> list[str]:
        """Return the splits whose scores may leave: those on validation data do not where a callback withholds them."""
        withheld = bool(self.callbacks.withholding("scores"))
        return [split for split in splits if split != "val" or not withheld]

    # -- clients -----------------------------------------------------------------------------------------------------
    @contextmanager
    def client(self, message: Message, record: ClientRecord, evaluating: bool = False) -> Iterator[Client]:
        """Open a client with its merged model (stage L1), on a copy of its record, bound to every callback."""
        entries = self.blueprint.plain_entries(record.personal | message.state, message.client)
        module = self.blueprint.build(message.client) if entries is None else None
        client = Client(self, copy.copy(message), record.copy(), module, entries)
        client.evaluating = evaluating
        client.received = dict(message.state)
        client.message.state = dict(message.state)
        self.bind(client)
        try:
            if entries is None:
                self.callbacks.event("on_build", client, client.message)
                if client.record.personal:
                    load_state(client.module, client.record.personal)
                self.callbacks.event("on_receive", client, client.message)
                load_state(client.module, client.message.state)
                settle(client.module, client.message.state)
            yield client
        finally:
            for callback in self.callbacks:
                for name in ("_client", "log", "log_dict"):  # Lightning leaves the last two on every callback
                    callback.__dict__.pop(name, None)
            if not client.is_unbuilt:
                detached(client.module)

    def bind(self, client: Client) -> None:
        """Bind a client to every callback. An engine with several open clients binds the one that it continues with."""
        for callback in self.callbacks:
            callback._client = client

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the model that the client deploys at `stage`."""
        owner = self.callbacks.role("personal_module")
        return client.module if owner is None else owner.personal_module(client, stage)

    # -- batches -----------------------------------------------------------------------------------------------------
    def loader(self, message: Message, split: str) -> DataLoader[Any] | None:
        """Return the loader of a job for a split: the client's own, or the pooled one."""
        if message.data == POOLED or message.client == POOLED:
            return self.pooled_dataloader(split, message.round)
        return self.data.at_round(message.round).client_dataloader(message.client, split)

    def used_samples(self, loader: DataLoader[Any] | None) -> int:
        """Return the samples that one epoch uses, after `drop_last` and `limit_train_batches`."""
        if loader is None or len(loader) == 0:
            return 0
        samples = samples_in(loader)
        size = loader.batch_size or math.ceil(samples / len(loader))
        batches = self.settings.train_batches(len(loader))
        return min(samples, batches * size)

    def start_sampler(
        self,
        loader: Any,
        message: Message,
        purpose: str = "",
        epoch_offset: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Address the order of the batches: a function of (seed, client, visit, epoch), wherever the visit runs."""
        seed_in_workers(loader)
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, AddressedSampler):
            seed = self.settings.seed
            sampler.start(
                seed=address(seed, purpose) if purpose else seed,
                round=message.visit,
                epochs_per_round=EPOCHS_OF_A_VISIT,
                epoch_offset=epoch_offset,
                rank=rank,
                world_size=world_size,
            )
        else:
            readdress(loader, self.settings.seed, purpose, "samplers", message.client, message.visit)

    def start_fit(self, fit: Fit, loader: Any, offset: int = 0, rank: int = 0, world_size: int = 1) -> None:
        """Address the order of the batches of a fit."""
        own = address_of(fit.phase)
        purpose = "" if own == "fit" else f"phase-{own}"
        self.start_sampler(loader, fit.message, purpose, epoch_offset=offset, rank=rank, world_size=world_size)

    def knows_groups(self) -> bool:
        """Return whether the group (a patient) of every training sample is known."""
        return all(self.data.sample_groups(client) is not None for client in self.data.client_ids)

    def train_loaders(self) -> Iterator[DataLoader[Any]]:
        """Yield the training loaders of the clients that have a batch, for checks at the start."""
        for client in self.data.client_ids:
            loader = self.data.at_round(0).client_dataloader(client, "train")
            if loader is not None and len(loader) > 0:
                yield loader

    def first_batch(self) -> Any:
        """Return a training batch of the first client that has one, for checks at the start; else `None`."""
        for loader in self.train_loaders():
            dataset, size = loader.dataset, loader.batch_size or 1
            if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
                with isolated(self.settings.seed, "first batch"), kept(dataset):
                    return self.blueprint.precision.convert_input(next(iter(loader)))
            chosen = range(min(size, len(dataset)))  # type: ignore[arg-type]
            with kept(dataset):
                return self.blueprint.precision.convert_input(loader.collate_fn(samples_at(dataset, chosen)))
        return None

    def batches_of(self, request: Fit) -> Any:
        """Return the batches that a fit trains on."""
        data = request.phase.data
        if isinstance(data, str) and data == "train":
            own = self.loader(request.message, "train") if request.loader is None else request.loader
            owner = self.callbacks.answering(TrainingData, "training_batches")
            return own if owner is None or own is None else owner.training_batches(request.client, own)
        loader = request.client.public(shuffle=True) if isinstance(data, str) else data
        if len(loader) == 0:
            raise ValueError(f"phase '{request.phase.name}' has no batch to train on; leave the phase out")
        return loader

    # -- what a visit asks for ---------------------------------------------------------------------------------------
    def fit(self, request: Fit) -> VisitCallback:
        """Fit one client."""
        client, message, phase = request.client, request.message, request.phase
        loader = self.batches_of(request)
        inside = self.surroundings(client, phase)
        fitter = self.loop.last if self.settings.logs(client.id) else self.loop.choose(client.module, loader)
        val_loader = self.validation_loader(message)
        self.scorer.fitted.add(client.module)
        with nullcontext() if phase.train is None else only_training(client.module, phase.train):
            return local_fit.fit(
                client,
                self.callbacks,
                self.settings,
                loader,
                partial(self.start_fit, request, loader),
                inside,
                phase=phase,
                work=request.work,
                val_loader=val_loader,
                fitter=fitter,
            )

    def surroundings(self, client: Client, phase: Phase) -> Surroundings:
        """Return what the Trainer of a fit shows to the module and its callbacks."""
        settings, source = self.settings, self._source
        folder = settings.folder_of(client.id)
        logs = client.logs if settings.logs(client.id) else None
        before = client.record.lightning.get(phase.name, {}).get("logged_steps", 0)
        prefix = "" if phase.name == "fit" else f"{phase.name}/"
        seen = None if source is None else ClientData(source, partial(self.loader, client.message))
        return Surroundings(folder, ClientLogger(folder, logs, prefix, before), seen)

    def validate_visits(self, monitor: Monitor) -> None:
        """Validate inside local training from now on, because something monitors a metric of the validation."""
        self.monitor = monitor
        self.loop.give_up(f"{monitor}, so visits validate")
        rank_zero_info(f"{monitor}: each visit validates on the client's own validation data.")

    def validation_loader(self, message: Message) -> DataLoader[Any] | None:
        """Return the batches on which a visit validates inside training; `None` if it does not."""
        if self.monitor is None and self.settings.trainer_arguments.get("check_val_every_n_epoch") is None:
            return None
        loader = self.loader(message, "val")
        if self.monitor is not None and (loader is None or len(loader) == 0):
            raise ValueError(
                f"{self.monitor}, which {type(self.blueprint.template).__name__} does not log in training, and client "
                f"'{message.client}' has no validation data. Give every client some (val_fraction), or monitor a metric "
                "of training."
            )
        return loader

    def score(self, request: Score) -> list[Scores]:
        """Score a client's trained model, one request after another. Random draws continue from those of the fit."""
        return [score_or_miss(self, one) for one in request.requests]

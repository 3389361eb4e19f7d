"""A client visit: a message and the client's record in, an update and a new record out.

The record that came in is never changed, so a visit that fails leaves the client as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from fedlightning import fit as local_fit
from fedlightning.attached import detached
from fedlightning.client import Client, ClientRecord
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.evaluation.scoring import Scorer
from fedlightning.evaluation.wanted import Wanted
from fedlightning.fast.copier import Copier
from fedlightning.fast.trainer import NotInFastLoop
from fedlightning.fit import LocalSettings, VisitCallback, address_of
from fedlightning.freezing import only_training
from fedlightning.hooks import POOLED, CallbackList, Phase, Stage
from fedlightning.loop_choice import LoopChoice
from fedlightning.messages import Message, Update, check_extras
from fedlightning.requests import Evaluate, Fit, Fitted, Score, Visiting
from fedlightning.seeding import address, isolated, seed_all
from fedlightning.tensors import State, first_nonfinite, load_state, module_state, pack

BUILDERS = ("wrap_module", "on_build", "on_receive")
"""Events in which callbacks take part in the making of a client's module."""
EPOCHS_OF_A_VISIT = 2**31
"""More than any visit has: its epochs never get the address of another round's."""


@dataclass
class LocalRunner:
    """Builds clients and carries out their visits. An engine decides where; this is what happens there.

    Attributes:
        template: the user's module, never trained itself.
        callbacks: the federated callbacks; data: who has which samples; settings: how to train.
    """

    template: LightningModule
    callbacks: CallbackList
    data: FederatedDataModule
    settings: LocalSettings
    scorer: Scorer = field(init=False)
    loop: LoopChoice = field(init=False)
    _copier: Copier | None = field(init=False, default=None, repr=False)
    _by_hand: bool = field(init=False, default=False)  # a client's module is more than a copy of the template
    _light: bool = field(init=False, default=False)  # it is a copy, and nobody takes part in the making
    _entries: State = field(init=False, default_factory=dict, repr=False)  # the template's

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.settings.trainer_arguments, fast=self.settings.local_loop != "trainer")
        self.loop = LoopChoice(self.settings, self.callbacks, self.scorer)

    # -- building --------------------------------------------------------------------------------------------------
    @property
    def copier(self) -> Copier:
        """Makes copies of the template."""
        if self._copier is None or self._copier.module is not self.template:  # a resumed run has its own template
            self._copier = Copier(self.template)
            claimed = {name for name in BUILDERS for callback in self.callbacks if callback.claims(name)}
            self._by_hand = "wrap_module" in claimed or is_overridden("configure_model", self.template)
            self._light = self._copier.is_complete and not (self._by_hand or claimed or self.scorer.converts)
            self._entries = module_state(self.template)
        return self._copier

    def build(self, owner: str) -> LightningModule:
        """A fresh copy of the template, wrapped by every callback. The same bits for every call with one owner."""
        copier = self.copier
        with isolated(self.settings.seed, "build") if self._by_hand else nullcontext():
            module: LightningModule = detached(copier.copy())
            if self._by_hand:
                module.configure_model()
                for callback in self.callbacks:
                    module = callback.wrap_module(module, owner)
        return self.scorer.convert(module)

    def build_around(self, entries: State) -> LightningModule:
        """A client's module made around its entries in one go; for clients that nobody takes part in making."""
        return detached(self.copier.copy(entries))

    def _entries_of(self, message: Message, record: ClientRecord) -> State | None:
        """All that a client's module will hold, not copied; ``None`` if somebody takes part in the making."""
        copier = self.copier
        if not self._light:
            return None
        merged = record.personal | message.state
        return self._entries | merged if copier.holds(merged) else None

    def loader(self, message: Message, split: str) -> DataLoader[Any] | None:
        """The loader a job works on: the client's own, or the pooled one."""
        if message.data == POOLED or message.client == POOLED:
            return self.data.pooled_dataloader(split)
        return self.data.client_dataloader(message.client, split)

    def num_samples(self, message: Message) -> int:
        """Training samples that one epoch really uses: ``drop_last`` and ``limit_train_batches`` are counted."""
        return self._used_samples(self.loader(message, "train"))

    def _used_samples(self, loader: DataLoader[Any] | None) -> int:
        if loader is None or len(loader) == 0:
            return 0
        samples = len(loader.dataset)  # type: ignore[arg-type]
        size = loader.batch_size or math.ceil(samples / len(loader))
        batches = len(loader)
        limit = self.settings.trainer_arguments.get("limit_train_batches")
        if limit is not None:
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
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
        """Address the batch order: a function of (seed, client, round, epoch), whoever runs the visit."""
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, AddressedSampler):
            seed = self.settings.seed
            sampler.start(
                seed=address(seed, purpose) if purpose else seed,
                round=message.round,
                epochs_per_round=EPOCHS_OF_A_VISIT,
                epoch_offset=epoch_offset,
                rank=rank,
                world_size=world_size,
            )

    # -- clients ---------------------------------------------------------------------------------------------------
    @contextmanager
    def client(self, message: Message, record: ClientRecord, evaluating: bool = False) -> Iterator[Client]:
        """The client with its merged model (stage L1), on a copy of its record, bound to every callback."""
        entries = self._entries_of(message, record)
        module = self.build(message.client) if entries is None else None
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
            yield client
        finally:
            for callback in self.callbacks:
                for name in ("_client", "log", "log_dict"):  # Lightning leaves the last two on every callback
                    callback.__dict__.pop(name, None)
            if not client.is_light:
                detached(client.module)

    def bind(self, client: Client) -> None:
        """Let every callback see this client as its own. An engine that has several open binds the one it goes on with."""
        for callback in self.callbacks:
            callback._client = client

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """The model the client deploys at ``stage``."""
        owner = self.callbacks.role("personal_module")
        return client.module if owner is None else owner.personal_module(client, stage)

    def visit(self, message: Message, record: ClientRecord, evaluate: Evaluate) -> tuple[Update, ClientRecord]:
        """Carry out one job.

        A client without samples, with a NaN, or whose code raises, answers with ``update.error`` and its old record.
        """
        try:
            return self._one_visit(message, record, evaluate)
        except NotInFastLoop as reason:  # neither the record nor the message has changed: begin again
            self.loop.give_up(str(reason))
            return self._one_visit(message, record, evaluate)

    def _one_visit(self, message: Message, record: ClientRecord, evaluate: Evaluate) -> tuple[Update, ClientRecord]:
        visit = self.visiting(message, record, evaluate)
        try:
            wanted = next(visit)
            while True:
                try:
                    done = self._fit(wanted) if isinstance(wanted, Fit) else self._score(wanted)
                except BaseException as error:  # an interrupt too: the visit closes its client
                    wanted = visit.throw(error)
                else:
                    wanted = visit.send(done)
        except StopIteration as end:
            answer: tuple[Update, ClientRecord] = end.value
            return answer

    def visiting(self, message: Message, record: ClientRecord, evaluate: Evaluate) -> Visiting:
        """A visit that stops at each of its fits, and where it wants its model scored, and leaves that to whoever runs the
        visit: :meth:`visit`, or an engine that does it for several clients at once. Send back what came of it, or throw
        what was raised.
        """
        seed_all(self.settings.seed, message.round, message.client, "visit")
        update = Update(message.round, message.client, model=message.model, tag=message.tag)
        loader = self.loader(message, "train")
        update.num_samples = self._used_samples(loader)
        return agree(*(yield from self._guarded_visit(message, record, update, evaluate, loader)))

    def _guarded_visit(
        self, message: Message, record: ClientRecord, update: Update, evaluate: Evaluate, loader: Any
    ) -> Visiting:
        if message.work != 0 and update.num_samples == 0:
            update.error = f"client '{message.client}' has no training samples"
            return update, record
        try:
            with self.client(message, record) as client:
                client._num_samples = update.num_samples
                return (yield from self._visit(client, message, update, evaluate, loader))
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:  # one client's failure must not take the round with it; the loop reports it
            failed = Update(message.round, message.client, model=message.model, tag=message.tag)  # nothing of it leaves
            failed.num_samples, failed.cause = update.num_samples, error
            failed.error = f"client '{message.client}' failed: {type(error).__name__}: {error}"
            return failed, record

    def _visit(self, client: Client, message: Message, update: Update, evaluate: Evaluate, loader: Any) -> Visiting:
        before = client.entries if client.is_light else _buffers(client.module)
        if message.work != 0:
            self.callbacks.event("on_visit_start", client)
            yield from self._train(client, message, loader)
            client.record.visits += 1
            client.record.last_round = message.round
            client.record.num_samples = update.num_samples
            client.record.steps, client.record.lr_sum = client.steps, client.lr_sum
        elif message.returns:
            update.num_samples = client.record.num_samples
        update.steps, update.skipped, update.lr_sum = client.record.steps, client.skipped, client.record.lr_sum
        update.metrics = client.metrics
        state = client.entries
        sent = {name: state[name] for name in message.returns}
        if message.work == 0 or not client.is_light:  # what a light client has trained is its own
            sent = pack(sent)
        kept = pack({name: value for name, value in state.items() if name not in sent})
        state = {name: sent[name] if name in sent else kept[name] for name in state}
        bad = first_nonfinite(state)
        bad = bad and _first_diverged(client.module, state, before)
        if bad is not None:
            raise FloatingPointError(
                f"'{bad}' holds NaN or infinite values after training. Lower the learning rate, clip gradients "
                "(gradient_clip_val) or check the data; its update is left out"
            )
        update.state = sent
        self.callbacks.event("on_send", client, update)
        private = sorted(set(update.state) - set(message.returns))
        if private:
            raise ValueError(f"'{private[0]}' is in the update, but the server asked only for what is shared: it stays")
        shapes = {name: value.shape for name, value in state.items()} if update.extras else {}
        for callback in self.callbacks:
            extras = update.extras.get(callback.key)
            if extras:
                check_extras(callback.key, extras, callback.wire(client.module).up, shapes)
        if message.work != 0 or message.returns:
            client.record.personal = kept
        if message.work != 0 and message.client != POOLED:
            update.evaluations = yield from self._evaluations(client, "L2", evaluate)
        return update, client.record

    def _train(self, client: Client, message: Message, loader: Any) -> Generator[Fit, Any, None]:
        owner = self.callbacks.role("local_phases")
        phases = [Phase()] if owner is None else owner.local_phases(client)
        for phase in phases:
            client.phase = phase
            before = client.model_state() if phase.keep_as is not None else None
            if phase.start is not None:
                load_state(client.module, phase.start)
            fitted: Fitted = yield Fit(client, message, phase, self._work(message, phase), loader)
            loader = None  # each of the other phases begins with a new one
            if phase.keep_as is not None:
                phase.keep_as(client)
                assert before is not None
                load_state(client.module, before)
            if phase.federated:
                client.steps += fitted.steps
                client.skipped += fitted.attempts - fitted.steps
                for name, lr_sum in fitted.lr_sums.items():
                    client.lr_sums[name] = client.lr_sums.get(name, 0.0) + lr_sum
        client.lr_sum = max(client.lr_sums.values(), default=0.0)

    def _work(self, message: Message, phase: Phase) -> int:
        return next(work for work in (phase.work, message.work, self.settings.work) if work is not None)

    def start_fit(self, fit: Fit, loader: Any, offset: int = 0, rank: int = 0, world_size: int = 1) -> None:
        """Address the batch order of a fit on its ``loader``."""
        own = address_of(fit.phase)
        purpose = "" if own == "fit" else f"phase-{own}"
        self.start_sampler(loader, fit.message, purpose, epoch_offset=offset, rank=rank, world_size=world_size)

    def _fit(self, wanted: Fit) -> VisitCallback:
        client, message, phase = wanted.client, wanted.message, wanted.phase
        loader = self.loader(message, "train") if wanted.loader is None else wanted.loader
        kit = self.loop.kit(client.module, loader)
        wants_validation = self.settings.trainer_arguments.get("check_val_every_n_epoch") is not None
        with only_training(client.module, phase.train):
            return local_fit.fit(
                client,
                self.callbacks,
                self.settings,
                loader,
                partial(self.start_fit, wanted, loader),
                phase=phase,
                work=wanted.work,
                val_loader=self.loader(message, "val") if wants_validation else None,
                kit=kit,
            )

    # -- evaluation ------------------------------------------------------------------------------------------------
    def _evaluations(
        self, client: Client, stage: Stage, evaluate: Evaluate
    ) -> Generator[Score, Any, list[tuple[str, str, str, str, float, int]]]:
        """Scores of the client's deployed model: rows (stage, data, split, metric, value, samples)."""
        if not evaluate.splits:
            return []
        module = self.personal_module(client, stage)
        places: list[tuple[str, str]] = []
        wanted: list[Wanted] = []
        for split in evaluate.splits:
            for data in evaluate.data:
                loader = self.loader(client.message, split) if data == "local" else self.data.pooled_dataloader(split)
                if loader is not None and len(loader) > 0:
                    places.append((data, split))
                    seed = (self.settings.seed, client.round, client.id, "score", stage, split, data)
                    wanted.append(Wanted(module, loader, split, seed))
        found: list[dict[str, float]] = (yield Score(client, wanted)) if wanted else []
        rows: list[tuple[str, str, str, str, float, int]] = []
        for (data, split), one, scores in zip(places, wanted, found, strict=True):
            size = len(one.loader.dataset)  # type: ignore[arg-type]
            rows += [(stage, data, split, metric, value, size) for metric, value in scores.items()]
            if data == "local":
                self.callbacks.event("on_client_evaluated", client, stage, split, scores, module)
        return rows

    def _score(self, score: Score) -> list[dict[str, float]]:
        """One after another; what is drawn goes on from the fit's randomness."""
        return [self.scorer.score(one.module, one.loader, one.split) for one in score.wanted]

    def first_batch(self) -> Any:
        """One training batch of the first client that has one; for checks at start."""
        for client in self.data.client_ids:
            loader = self.data.client_dataloader(client, "train")
            if loader is not None and len(loader) > 0:
                dataset, size = loader.dataset, loader.batch_size or 1
                count = min(size, len(dataset))  # type: ignore[arg-type]
                return self.scorer.precision.convert_input(
                    loader.collate_fn([dataset[index] for index in range(count)])
                )
        return None


def _buffers(module: LightningModule) -> State:
    """A copy of the buffers."""
    return {name: value.detach().clone() for name, value in module.named_buffers(remove_duplicate=False)}


def _first_diverged(module: LightningModule, state: State, before: State) -> str | None:
    """The first entry of ``state`` that training has left with a NaN or an infinity.

    Frozen parameters are not training's work, nor buffers that were so ``before``: a mask of infinities may stay one.
    """
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    masks = {name for name in buffers & before.keys() if first_nonfinite({name: before[name]}) is not None}
    return first_nonfinite({name: value for name, value in state.items() if name not in frozen | masks})


def agree(update: Update, record: ClientRecord) -> tuple[Update, ClientRecord]:
    """Under DDP within a client, every rank goes on with what rank 0 has; other ranks never send updates."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return update, record
    if torch.distributed.get_world_size() == 1:
        return update, record
    answer = [(replace(update, cause=None), record)]
    torch.distributed.broadcast_object_list(answer, src=0)
    return answer[0]

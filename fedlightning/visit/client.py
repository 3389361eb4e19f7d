"""The client: a LightningModule, its loaders, and a state that stays with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.compat.attached import detached_copy
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.hooks import Phase
from fedlightning.messages import Message
from fedlightning.seeding import generator
from fedlightning.tensors import State, clone, load_state, module_state
from fedlightning.visit import probes
from fedlightning.visit.record import ClientRecord
from fedlightning.visit.scorer import Scorer
from fedlightning.wrappers.features import FeatureTap


class Surroundings(Protocol):
    """The parts of a :class:`~fedlightning.visit.runner.LocalRunner` that a client uses; see there."""

    blueprint: Blueprint
    data: FederatedDataModule
    scorer: Scorer

    def loader(self, message: Message, split: str) -> DataLoader[Any] | None: ...

    def used_samples(self, loader: DataLoader[Any] | None) -> int: ...

    def start_sampler(self, loader: Any, message: Message, purpose: str = "") -> None: ...


class Client:
    """One client during one visit (or one evaluation, then on a copy of its state).

    What algorithms need is offered here, so that none reaches around it.

    Attributes:
        id: the client's id; round: the present round, from 0.
        module: its LightningModule, merged from what came and what stayed; made when first asked for where an engine
            can do without.
        message: what the server sent.
        record: what the client keeps (see :class:`ClientRecord`).
        received: the model entries as the server sent them, before any callback merged them.
        evaluating: True when the visit only evaluates: nothing written to the state survives then.
        steps, skipped, lr_sum: of this visit's federated fits.
        lr_sums: per parameter name, the sum of its learning rate over the real steps.
        metrics: what the module logged in training.
        scratch: what a callback keeps for the time of the visit only.
        phase: the fit that runs, for Lightning hooks that should act in federated phases only.
    """

    def __init__(
        self,
        runner: Surroundings,
        message: Message,
        record: ClientRecord,
        module: LightningModule | None = None,
        entries: State | None = None,
    ) -> None:
        self._runner, self._blueprint = runner, runner.blueprint
        self.id = message.client
        self.round = message.round
        self._module = module
        self._entries: State = entries or {}
        self.message = message
        self.record = record
        self.evaluating = False
        self.received: State = {}
        self.steps = 0
        self.skipped = 0
        self.lr_sum = 0.0
        self.lr_sums: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.scratch: dict[str, Any] = {}
        self.phase = Phase()
        self._streams: dict[str, Iterator[Any]] = {}
        self._anchor: dict[tuple[torch.device, str], Tensor] = {}
        self._num_samples: int | None = None  # unknown until somebody asks

    @property
    def module(self) -> LightningModule:
        """The client's LightningModule, built on first access."""
        if self._module is None:
            self._module = self._blueprint.build_around(self._entries)
        return self._module

    @property
    def is_unbuilt(self) -> bool:
        """Whether the module has not been built yet: the client is its :attr:`entries`."""
        return self._module is None

    @property
    def entries(self) -> State:
        """The present tensors of the module's state, not copied. Not to be edited."""
        return self._entries if self._module is None else module_state(self._module)

    def set_entries(self, entries: State) -> None:
        """Take over the entries that a stack has trained (the module may have been built meanwhile)."""
        self._entries = entries
        if self._module is not None:
            load_state(self._module, entries)

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """Per callback key, what lives from visit to visit: tensors (replace them, never edit in place) and values."""
        return self.record.state

    @property
    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """Per callback key, selected models; the one thing that evaluation may write."""
        return self.record.checkpoints

    @property
    def num_samples(self) -> int:
        """Training samples that an epoch of this job really uses."""
        if self._num_samples is None:
            self._num_samples = self._runner.used_samples(self._runner.loader(self.message, "train"))
        return self._num_samples

    @num_samples.setter
    def num_samples(self, count: int) -> None:
        self._num_samples = count

    @property
    def class_counts(self) -> list[int] | None:
        """Training samples per class, or `None` where the data has no labels."""
        return self._runner.data.class_counts(self.id)

    @property
    def precision(self) -> Any:
        """Lightning's precision plugin of the running fit (for autocast and unscaling)."""
        trainer = self.scratch.get("trainer")
        return trainer.precision_plugin if trainer is not None else self._blueprint.precision

    @property
    def device(self) -> torch.device:
        """Where the run computes. Outside a fit the module itself is on the CPU."""
        return self._blueprint.device

    def rng(self, purpose: str) -> torch.Generator:
        """A generator addressed by (seed, round, client, purpose)."""
        return generator(self._blueprint.settings.seed, self.round, self.id, purpose)

    def loader(self, split: str = "train") -> DataLoader[Any] | None:
        """The client's loader; the pooled one on a pooled job."""
        return self._runner.loader(self.message, split)

    def anchor(self, name: str, device: torch.device) -> Tensor | None:
        """The server's value of `name` as it was sent, in fp32 at least, on `device`; `None` if it stays home."""
        if name not in self.received:
            return None
        if (device, name) not in self._anchor:
            sent = self.received[name]
            self._anchor[device, name] = sent.to(device, torch.promote_types(sent.dtype, torch.float32))
        return self._anchor[device, name]

    def loss(self, state: Mapping[str, Tensor] | None = None, split: str = "train") -> float:
        """Mean training loss over `split` at `state` (default: the present model); eval mode, no gradient."""
        with self._at(state) as module:
            return probes.mean_loss(module, self._batches(split), self.precision, *self._address("loss", split))

    def gradient(self, state: Mapping[str, Tensor] | None = None, split: str = "train") -> State:
        """Sample-weighted mean gradient over `split` at `state`, by parameter name, on the CPU."""
        with self._at(state) as module:
            seed = self._address("gradient", split)
            return clone(probes.mean_gradient(module, self._batches(split), self.precision, *seed), "cpu")

    def batch_gradient(
        self,
        batch: Any,
        module: LightningModule | None = None,
        update_buffers: bool = False,
        repeat: bool = False,
        batch_idx: int = 0,
    ) -> tuple[Tensor, State]:
        """Loss and gradient of one batch on the device, at the present parameters of `module`; leaves no trace.

        Args:
            batch: as a hook of Lightning gives it.
            module: another module than the client's own (a personal twin).
            update_buffers: let the running statistics of `module` move, because it really trains.
            repeat: draw the same random numbers (dropout) as the probe before: for differences of gradients.
            batch_idx: what `training_step` is told of the batch's place in its epoch.
        """
        module = self.module if module is None else module
        self.scratch["probes"] = self.scratch.get("probes", 0) + (not repeat)
        seed = self._address("probe", self.scratch["probes"])
        return probes.batch_gradient(
            module, batch, self.precision, *seed, update_buffers=update_buffers, batch_idx=batch_idx
        )

    def probing(self, module: LightningModule, update_buffers: bool = False) -> AbstractContextManager[None]:
        """A block in which `module` may be run without a trace: muted, autocast as in training, randomness addressed.

        Args:
            module: the client's own or one that trains beside it.
            update_buffers: let the running statistics of `module` move.
        """
        self.scratch["probes"] = self.scratch.get("probes", 0) + 1
        seed = self._address("probe", self.scratch["probes"])
        return probes.probing(module, self.precision, *seed, update_buffers=update_buffers)

    def next_probe(self) -> tuple[object, ...]:
        """The address of the randomness of one more probe."""
        self.scratch["probes"] = self.scratch.get("probes", 0) + 1
        return self._address("probe", self.scratch["probes"])

    @property
    def loss_scale(self) -> float:
        """What the run's gradient scaler multiplies losses with before a backward pass; 1 outside fp16."""
        return probes.loss_scale(self.precision)

    def evaluate(self, state: Mapping[str, Tensor] | None = None, split: str = "val") -> dict[str, float]:
        """What the module logs on the client's own `split` at `state` (default: the present model)."""
        loader = self.loader(split)
        if loader is None:
            return {}
        with self._at(state) as module:
            return self._runner.scorer.score(module, loader, split)

    def next_batch(self, stream: str = "extra", module: LightningModule | None = None) -> Any:
        """The next training batch of an endless stream of the client's own; each name is an independent stream.

        Args:
            stream: which stream.
            module: the batch goes where this one is; by default the client's own, which is on the device in a fit.
        """
        if stream not in self._streams:
            self._streams[stream] = self._endless(stream)
        batch = self.precision.convert_input(next(self._streams[stream]))
        return probes.move_batch(self.module if module is None else module, batch)

    def model_state(self) -> State:
        """A CPU copy of the module's present state."""
        return clone(self.entries, "cpu")

    def initial_module(self) -> LightningModule:
        """A fresh module as the federation began: the same bits on every client and on the server."""
        return self._blueprint.build(self.id)

    def frozen_copy(self, state: Mapping[str, Tensor] | None = None) -> LightningModule:
        """A teacher: a copy of the module at `state` (default: as it is) on its device, in eval mode, without gradients."""
        teacher = self.copy_module()
        if state is not None:
            load_state(teacher, state)
        return teacher.to(self.module.device).eval().requires_grad_(False)

    def features(self, module: LightningModule, batch: Any, taps: Mapping[str, FeatureTap]) -> dict[str, Tensor]:
        """What `taps` (made on `module`) catch when it runs its step on `batch`; no gradient, no trace."""
        with torch.no_grad(), self.probing(module), ExitStack() as stack:
            for tap in taps.values():
                stack.enter_context(tap)
            probes.training_loss(module, batch)
            return {label: tap.features for label, tap in taps.items()}

    def feature_pass(
        self, taps: Callable[[LightningModule], Mapping[str, FeatureTap]], split: str = "train"
    ) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        """One pass of the present model over `split` in eval mode: each batch and what `taps(module)` catch."""
        with self._at(None) as module:
            was_training = module.training
            module.eval()
            try:
                for batch in self._batches(split):
                    batch = probes.move_batch(module, self.precision.convert_input(batch))
                    yield batch, self.features(module, batch, taps(module))
            finally:
                module.train(was_training)

    def normalisation_statistics(self, split: str = "train") -> tuple[State, int]:
        """Means over the batches of `split` of BatchNorm layers' batch statistics, and how many batches; no trace."""
        with self._at(None) as module:
            seed = self._address("statistics", split)
            return probes.normalisation_statistics(module, self._batches(split), self.precision, *seed)

    @property
    def keeps_optimizers(self) -> bool:
        """Whether optimizers go on from visit to visit (`optimizer_state="keep"`)."""
        return self._blueprint.settings.optimizer_state == "keep"

    def copy_module(self) -> LightningModule:
        """A deep copy of the module, detached from any trainer."""
        return detached_copy(self.module)

    # -- helpers ---------------------------------------------------------------------------------------------------
    def _address(self, *purpose: object) -> tuple[object, ...]:
        return (self._blueprint.settings.seed, self.round, self.id, *purpose)

    def _batches(self, split: str) -> Iterator[Any]:
        loader = self.loader(split)
        self._runner.start_sampler(loader, self.message, purpose=f"probe-{split}")
        yield from loader if loader is not None else ()

    def _endless(self, stream: str) -> Iterator[Any]:
        loader = self.loader("train")
        assert loader is not None
        lap = 0
        while True:
            count, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
            order = torch.randperm(count, generator=self.rng(f"{stream}-{lap}"))
            if not getattr(loader.sampler, "shuffle", True):
                order = torch.arange(count)
            for start in range(0, count - size + 1 if loader.drop_last else count, size):
                picked = [loader.dataset[int(index)] for index in order[start : start + size]]
                yield loader.collate_fn(picked)
            lap += 1

    def _at(self, state: Mapping[str, Tensor] | None) -> _AtState:
        return _AtState(self.module, state, self.device)


class _AtState:
    """The module on the run's device with `state` loaded; as it was afterwards."""

    def __init__(self, module: LightningModule, state: Mapping[str, Tensor] | None, device: torch.device) -> None:
        self.module, self.state, self.device = module, state, device

    def __enter__(self) -> LightningModule:
        self.home = self.module.device
        self.module.to(self.device)
        if self.state is not None:
            self.before = clone({name: module_state(self.module)[name] for name in self.state})
            load_state(self.module, self.state)
        return self.module

    def __exit__(self, *exception: object) -> None:
        if self.state is not None:
            load_state(self.module, self.before)
        self.module.to(self.home)

"""One client during a visit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.client import probes
from fedlightning.client.data_summary import count_used_samples, start_sampler
from fedlightning.client.probes import outputs
from fedlightning.client.record import ClientRecord, VisitWork
from fedlightning.compat.lightning_runs import detached_copy
from fedlightning.contract import POOLED, Phase, Protection, SumCodec
from fedlightning.contract.messages import ClientLog, Message
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.datamodules.public import addressable, has_positions, public_loader, size_of
from fedlightning.datamodules.sampling import each_once, gives_batches
from fedlightning.datamodules.views import samples_at
from fedlightning.seeding import generator
from fedlightning.tensors import State, clone, load_state, module_state
from fedlightning.wrappers.features import FeatureTap
from fedlightning.wrappers.muting import evaluating

if TYPE_CHECKING:
    from fedlightning.client.runtime import ClientRuntime


class Client:
    """One client during one visit or one evaluation: a LightningModule, its loaders, and a state that stays with it.

    It offers all that algorithms need, so that none of them reaches for the engine or the data module.

    Attributes:
        id: The client's id.
        round: The present round, counted from 0.
        visit: Number in the addresses of this visit's randomness: the round, unless the client trains more than once in it.
        message: The message from the server.
        record: What the client keeps (see :class:`~fedlightning.client.record.ClientRecord`).
        received: Model entries as the server sent them, before any callback merged them.
        built_otherwise: Frozen parameters with which callbacks have built this client's module, and not everybody's.
        evaluating: Whether the visit only evaluates. Then nothing that is written to :attr:`state` is kept.
        metrics: Values that the module logged in training.
        logs: What was logged in training, if the client's logs are kept.
        scratch: Values that a callback keeps for the duration of the visit.
        work: What it has done in this visit.
        phase: The fit that runs. Lightning hooks that act in federated phases only read it.
        covered_means: Means by class that :attr:`protection` has made in this visit; no others leave beside it.
    """

    def __init__(
        self,
        runner: ClientRuntime,
        message: Message,
        record: ClientRecord,
        module: LightningModule | None = None,
        entries: State | None = None,
    ) -> None:
        self._runner, self._blueprint = runner, runner.blueprint
        self.id = message.client
        self.round = message.round
        self.visit = message.visit
        self._module = module
        self._entries: State = entries or {}
        self.message = message
        self.record = record
        self.evaluating = False
        self.received: State = {}
        self.built_otherwise: frozenset[str] = frozenset()
        self.work = VisitWork()
        self.metrics: dict[str, float] = {}
        self.logs: list[ClientLog] = []
        self.scratch: dict[str, Any] = {}
        self.phase = Phase()
        self._streams: dict[str, Iterator[Any]] = {}
        self._anchor: dict[tuple[torch.device, str], Tensor] = {}
        self._num_samples: int | None = None  # counted on first access
        self._withheld = ""
        self.covered_means: Mapping[int, Tensor] = {}

    def __repr__(self) -> str:
        """Return id, round and what it has kept."""
        kept = f", state of {', '.join(self.state)}" if self.state else ""
        return f"<Client {self.id!r}, round {self.round + 1}, {self.record.visits} earlier visits{kept}>"

    @property
    def contributed(self) -> bool | None:
        """Whether it counts: see :attr:`~fedlightning.client.record.VisitWork.contributed`."""
        return self.work.contributed

    @property
    def steps(self) -> int:
        """Steps of the first optimizer in the visit's federated fits."""
        return self.work.steps

    @property
    def lr_sum(self) -> float:
        """Largest of :attr:`lr_sums`."""
        return self.work.lr_sum

    @property
    def lr_sums(self) -> Mapping[str, float]:
        """By parameter name, the sum of its learning rate over these steps."""
        return self.work.lr_sums

    @property
    def gradient_weights(self) -> Mapping[str, float]:
        """By parameter name, the sum of the weights of its gradients: see :class:`~fedlightning.client.record.VisitWork`."""
        return self.work.gradient_weights

    @property
    def module(self) -> LightningModule:
        """The client's LightningModule, built on first access."""
        if self._module is None:
            self._module = self._blueprint.build_around(self._entries, self.id)
        return self._module

    @property
    def is_unbuilt(self) -> bool:
        """Whether the module has not been built yet: the client is its :attr:`entries`."""
        return self._module is None

    @property
    def entries(self) -> State:
        """Tensors of the module's present state, by name. Neither copied nor to be edited."""
        return self._entries if self._module is None else module_state(self._module)

    def set_entries(self, entries: State) -> None:
        """Take over entries that were trained in a stack, also into the module if it has been built meanwhile."""
        self._entries = entries
        if self._module is not None:
            load_state(self._module, entries)

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """By callback key, what stays from visit to visit: tensors (replace them, never edit in place) and values."""
        return self.record.state

    @property
    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """By callback key, selected models. They are all that an evaluation may write."""
        return self.record.checkpoints

    @property
    def num_samples(self) -> int:
        """Training samples that one epoch of this job uses."""
        if self._num_samples is None:
            self._num_samples = count_used_samples(self._runner, self._runner.loader(self.message, "train"))
        return self._num_samples

    @num_samples.setter
    def num_samples(self, count: int) -> None:
        self._num_samples = count

    @property
    def class_counts(self) -> list[int] | None:
        """Training samples by class, or `None` if the data have no labels."""
        self.refuse_withheld()
        return self._runner.data.at_round(self.round).class_counts(self.id)

    @property
    def sample_groups(self) -> np.ndarray | None:
        """Group (a patient) of each training sample, in the order of the samples; `None` if nobody knows groups."""
        data, holders = self._runner.data.at_round(self.round), self._holders()
        groups = [data.sample_groups(client) for client in holders if client in data.client_ids]
        of_all = [part for part in groups if part is not None]
        return np.concatenate(of_all) if len(of_all) == len(holders) else None

    @property
    def training_extras(self) -> dict[str, dict[str, Any]]:
        """Extras of the message that training may depend on: all but those that agree on how a sum of updates is sent."""
        codec = self._runner.callbacks.find(SumCodec)
        return {key: extras for key, extras in self.message.extras.items() if codec is None or key != codec.key}

    @property
    def training_state(self) -> list[dict[str, dict[str, Any]]]:
        """What the client keeps that training may depend on: of all callbacks but that one, and of Lightning, by phase."""
        codec, record = self._runner.callbacks.find(SumCodec), self.record
        callbacks = {key: state for key, state in record.state.items() if codec is None or key != codec.key}
        return [callbacks, record.lightning]

    @property
    def protection(self) -> Protection | None:
        """The callback that makes means by class of this client's samples, where one answers for them."""
        return self._runner.callbacks.answering(Protection, "class_means")

    @property
    def folder(self) -> Path | None:
        """Folder of the run for what is written inside this client's training; `None` if the run writes nothing."""
        folder = self._blueprint.settings.folder_of(self.id)
        return None if folder is None else Path(folder)

    @property
    def precision(self) -> Any:
        """Lightning's precision plugin of the running fit (for autocast and unscaling)."""
        trainer = self.scratch.get("trainer")
        return trainer.precision_plugin if trainer is not None else self._blueprint.precision

    @property
    def device(self) -> torch.device:
        """Device of the run. Outside a fit the module itself is on the CPU."""
        return self._blueprint.device

    @property
    def seed(self) -> int:
        """The run's seed, for addresses of randomness that server and client share."""
        return self._blueprint.settings.seed

    @property
    def max_rounds(self) -> int:
        """Rounds of the federation, as the trainer was told."""
        return self._blueprint.settings.max_rounds

    def rng(self, purpose: str) -> torch.Generator:
        """Return a generator addressed by (seed, visit, client, purpose)."""
        return generator(self._blueprint.settings.seed, self.visit, self.id, purpose)

    def loader(self, split: str = "train") -> DataLoader[Any] | None:
        """Return the loader of a split: the client's own, or the pooled one in a pooled job."""
        self.refuse_withheld()
        return self._runner.loader(self.message, split)

    def withhold_data(self, owner: str) -> None:
        """Let callbacks read the client's samples in this visit no more; the batches of its fits go on.

        Args:
            owner: Key of the callback that covers these; empty: samples may be read.
        """
        self._withheld = owner

    def refuse_withheld(self) -> None:
        """Raise ValueError if samples are for the steps of training only (:meth:`withhold_data`)."""
        if self._withheld:
            raise ValueError(
                f"Client '{self.id}' gives its samples to the steps of training only, which {self._withheld} covers with "
                f"noise. Remove {self._withheld}, or what reads samples otherwise; steps are counted in "
                "trainer.estimated_stepping_batches."
            )

    def size(self, split: str = "train") -> int:
        """Return the number of samples in a split of the client's data; of all clients' data in a pooled job."""
        return sum(self._runner.described.num_samples(client, split, self.round) for client in self._holders())

    def _holders(self) -> list[str]:
        """Return the clients whose samples this job reads, in the order of its loader."""
        pooled = POOLED in (self.message.data, self.message.client)
        return sort_clients(self._runner.described.client_ids) if pooled else [self.id]

    def anchor(self, name: str, device: torch.device) -> Tensor | None:
        """Return the value of one entry as the server sent it."""
        if name not in self.received:
            return None
        if (device, name) not in self._anchor:
            sent = self.received[name]
            self._anchor[device, name] = sent.to(device, torch.promote_types(sent.dtype, torch.float32))
        return self._anchor[device, name]

    def next_probe(self) -> tuple[object, ...]:
        """Return the address of the randomness of one more probe."""
        self.scratch["probes"] = self.scratch.get("probes", 0) + 1
        return self._address("probe", self.scratch["probes"])

    def model_state(self) -> State:
        """Return a CPU copy of the module's present state."""
        return clone(self.entries, "cpu")

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the federation's architectures, in the server's order; ``("",)`` where everybody has the same."""
        return self._blueprint.architectures

    def module_of(self, architecture: str) -> LightningModule:
        """Build a module of an architecture as the federation began: the same bits on every client and on the server."""
        return self._blueprint.build(self.id, architecture)

    def initial_module(self) -> LightningModule:
        """Build a module as the federation began: the same bits on every client and on the server.

        Where a callback gives the client's module a shape of its own (`on_build`), it is of that shape.
        """
        module = self._blueprint.build(self.id)
        if any(callback.claims("on_build") for callback in self._blueprint.callbacks):
            current, self._module = self._module, module
            try:
                self._blueprint.callbacks.event("on_build", self, self.message)
            finally:
                self._module = current
        return module

    def frozen_copy(self, state: Mapping[str, Tensor] | None = None) -> LightningModule:
        """Return a teacher: a copy of the module on its device, in eval mode, without gradients."""
        teacher = self.copy_module()
        if state is not None:
            load_state(teacher, state)
        return teacher.to(self.module.device).eval().requires_grad_(False)

    @property
    def is_at_site(self) -> bool:
        """Whether it is at a site, which has its own clients only and answers a server elsewhere."""
        return not self._runner.together

    @property
    def keeps_optimizers(self) -> bool:
        """Whether optimizers continue from visit to visit (`optimizer_state="keep"`)."""
        return self._blueprint.settings.optimizer_state == "keep"

    def copy_module(self) -> LightningModule:
        """Return a deep copy of the module, detached from any trainer."""
        return detached_copy(self.module)

    def _address(self, *purpose: object) -> tuple[object, ...]:
        return (self._blueprint.settings.seed, self.visit, self.id, *purpose)

    # -- what it reads beside the batches of its training ----------------------------------------------------------------
    def next_batch(self, stream: str = "extra", module: LightningModule | None = None) -> Any:
        """Return the next training batch of an endless stream of the client's own."""
        if stream not in self._streams:
            self._streams[stream] = self._endless(stream)
        batch = self.precision.convert_input(next(self._streams[stream]))
        return probes.move_batch(self.module if module is None else module, batch)

    def public_batches(self, ratio: float = 1.0, stream: str = "public") -> Iterator[Any]:
        """Yield batches of public data without end, from a random subset that is drawn once for this visit.

        Batches are on the CPU, as the loader makes them; :func:`~fedlightning.client.probes.move_batch` moves them.
        """
        return self._public_draws(addressable(*self._public()), ratio, stream)

    def _public_draws(self, loader: DataLoader[Any], ratio: float, stream: str) -> Iterator[Any]:
        dataset: Any = loader.dataset
        size = min(loader.batch_size or 1, len(dataset))
        count = min(max(size, round(ratio * self.num_samples)), len(dataset))
        subset = torch.randperm(len(dataset), generator=self.rng(stream))[:count]
        for lap in itertools.count():
            order = subset[torch.randperm(count, generator=self.rng(f"{stream}-{lap}"))].tolist()
            for start in range(0, count - size + 1, size):
                yield loader.collate_fn(samples_at(dataset, order[start : start + size]))

    def _public(self) -> tuple[Any, str]:
        """Return the data module's loader of public data, or `None`, and the data module's name."""
        data = self._runner.data
        return data.public_dataloader(), type(data).__name__

    @property
    def public_size(self) -> int:
        """Number of public samples; 0 without any."""
        return size_of(*self._public())

    def public(
        self,
        ids: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
    ) -> DataLoader[Any]:
        """Return a loader of public samples, for a :class:`Phase` or :meth:`outputs`."""
        loader = public_loader(
            *self._public(), ids, targets=targets, batch_size=batch_size, shuffle=shuffle, reader=f"public of {self.id}"
        )
        start_sampler(self._runner, loader, self.message, purpose="public")
        return loader

    def samples(
        self,
        targets: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        training: bool | None = None,
        split: str = "train",
    ) -> DataLoader[Any]:
        """Return a loader of the client's own samples, each with its number, for a :class:`Phase` or :meth:`outputs`.

        Sample `i` is the `i`-th of the split's dataset, in every round: what is found out about it can be kept by its number.
        """
        loader = self.loader(split)
        if loader is None or not has_positions(loader):
            what = (
                "no samples"
                if loader is None
                else f"samples without a number ({type(getattr(loader, 'dataset', loader)).__name__})"
            )
            raise ValueError(
                f"client.samples(split='{split}'): client '{self.id}' has {what}. Use a map-style dataset of samples, "
                "and a batch_size."
            )
        training = targets is not None if training is None else training
        samples_loader = public_loader(
            loader,
            f"client '{self.id}'",
            ids,
            targets=targets,
            shuffle=training and bool(getattr(loader.sampler, "shuffle", True)),
            reader=f"samples of {self.id}",
            drop_last=training and bool(loader.drop_last),
        )
        start_sampler(self._runner, samples_loader, self.message, purpose=f"samples-{split}")
        return samples_loader

    def one_pass(self, split: str = "train") -> Iterable[Any]:
        """Return batches with every sample of a split, for :meth:`outputs`; a tail that training leaves out too."""
        loader = self.loader(split)
        return self.samples(training=False, split=split) if has_positions(loader) else loader or ()

    def outputs(
        self,
        loader: Iterable[Any],
        forward: Callable[[LightningModule, Any], Tensor],
        module: LightningModule | None = None,
    ) -> Tensor:
        """Return what a function of module and batch gives over a loader, in eval mode, without gradients or a trace."""
        module = self.module if module is None else module
        return outputs(module, loader, forward, self.device, self.precision, *self.next_probe())

    def _batches(self, split: str) -> Iterator[Any]:
        loader = self.loader(split)
        self.work.selections += split == "val"
        if split == "train" and loader is not None and self.protection is not None:  # its means count each sample once
            loader = each_once(loader)
        start_sampler(self._runner, loader, self.message, purpose=f"probe-{split}")
        yield from loader if loader is not None else ()

    def _endless(self, stream: str) -> Iterator[Any]:
        loader = self.loader("train")
        assert loader is not None
        lap = 0
        while isinstance(loader.dataset, IterableDataset):  # without positions that could be drawn
            start_sampler(self._runner, loader, self.message, purpose=f"{stream}-{lap}")
            empty = True
            for batch in loader:
                empty = False
                yield batch
            if empty:
                return
            lap += 1
        while True:
            count, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
            order = torch.randperm(count, generator=self.rng(f"{stream}-{lap}"))
            if not getattr(loader.sampler, "shuffle", True):
                order = torch.arange(count)
            for start in range(0, count - size + 1 if loader.drop_last else count, size):
                picked = order[start : start + size].tolist()
                samples = loader.dataset[picked[0]] if gives_batches(loader) else samples_at(loader.dataset, picked)
                yield loader.collate_fn(samples)
            lap += 1

    # -- what it works out on its data -----------------------------------------------------------------------------------
    def loss(self, state: Mapping[str, Tensor] | None = None, split: str = "train") -> float:
        """Return the mean training loss over a split, in eval mode and without gradients.

        Args:
            state: Entries to evaluate at. `None`: the present model.
            split: Split to average over.
        """
        with self._at(state) as module:
            return probes.mean_loss(module, self._batches(split), self.precision, *self._address("loss", split))

    def losses(self, state: Mapping[str, Tensor] | None = None, split: str = "train") -> Tensor:
        """Return the training loss of every sample of a split, in eval mode and without gradients.

        Args:
            state: Entries to evaluate at. `None`: the present model.
            split: Split to pass over once.

        Returns:
            fp64 tensor of shape `(num_samples,)` on the CPU, in the order in which the loader gives the samples; that
            is the same for every `state` within a visit. NaN for a sample that the step skips.
        """
        address = self._address("loss", split)
        with self._at(state) as module:
            return probes.sample_losses(module, self._batches(split), self.precision, *address, gaps=True)

    def gradient(self, state: Mapping[str, Tensor] | None = None, split: str = "train") -> State:
        """Return the sample-weighted mean gradient over a split, by parameter name, on the CPU.

        Args:
            state: Entries to evaluate at. `None`: the present model.
            split: Split to average over.
        """
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
        full_precision: bool = False,
    ) -> tuple[Tensor, State]:
        """Return loss and gradient of one batch at the present parameters of `module`. Nothing is changed.

        Args:
            batch: Batch on the device, as a Lightning hook gets it.
            module: A module other than the client's own, such as a personal model.
            update_buffers: Let the running statistics of `module` move, because it trains on this batch.
            repeat: Draw the same random numbers (dropout) as the probe before, for differences of gradients.
            batch_idx: Index of the batch that `training_step` is given.
            full_precision: Do without autocast, in the parameters' own precision, for differences of gradients.
        """
        plain = full_precision and isinstance(self.precision, MixedPrecision)
        precision = Precision() if plain else self.precision
        module = self.module if module is None else module
        self.scratch["probes"] = self.scratch.get("probes", 0) + (not repeat)
        seed = self._address("probe", self.scratch["probes"])
        return probes.batch_gradient(
            module, batch, precision, *seed, update_buffers=update_buffers, batch_idx=batch_idx
        )

    def probing(self, module: LightningModule, update_buffers: bool = False) -> AbstractContextManager[None]:
        """Return a context in which `module` may run without a trace.

        It is muted, autocast is that of training, and its randomness is addressed.

        Args:
            module: The client's own module, or one that trains beside it.
            update_buffers: Let the running statistics of `module` move.
        """
        self.scratch["probes"] = self.scratch.get("probes", 0) + 1
        seed = self._address("probe", self.scratch["probes"])
        return probes.probing(module, self.precision, *seed, update_buffers=update_buffers)

    @property
    def loss_scale(self) -> float:
        """Loss scale of the gradient scaler (1.0 unless precision is 16-mixed)."""
        return probes.loss_scale(self.precision)

    def evaluate(self, state: Mapping[str, Tensor] | None = None, split: str = "val") -> dict[str, float]:
        """Return what the module logs on the client's own data.

        Args:
            state: Entries to evaluate at. `None`: the present model.
            split: Split to evaluate on. Without a loader for it the result is empty.
        """
        loader = self.loader(split)
        if loader is None:
            return {}
        self.work.selections += split == "val"
        self._runner.scorer.client = self.id
        with self._at(state) as module:
            return self._runner.scorer.score(module, loader, split)

    def features(self, module: LightningModule, batch: Any, taps: Mapping[str, FeatureTap]) -> dict[str, Tensor]:
        """Return features that a module computes for a batch, without a gradient and without a trace.

        Args:
            module: Runs its training step.
            batch: Batch on the device of `module`.
            taps: By label, the taps on `module` that collect the features.
        """
        with torch.no_grad(), self.probing(module), ExitStack() as stack:
            for tap in taps.values():
                stack.enter_context(tap)
            probes.training_loss(module, batch)
            return {label: tap.features for label, tap in taps.items()}

    def feature_pass(
        self, taps: Callable[[LightningModule], Mapping[str, FeatureTap]], split: str = "train"
    ) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        """Yield each batch of a split and the features of the present model for it, in eval mode.

        Args:
            taps: Function that makes the taps on a module, by label.
            split: Split to pass over once.
        """
        with self._at(None) as module:
            with evaluating(module):
                for batch in self._batches(split):
                    batch = probes.move_batch(module, self.precision.convert_input(batch))
                    yield batch, self.features(module, batch, taps(module))

    def normalisation_statistics(self, split: str = "train") -> tuple[State, int]:
        """Return means over a split of BatchNorm layers' batch statistics, and the number of batches; no trace."""
        with self._at(None) as module:
            seed = self._address("statistics", split)
            return probes.normalisation_statistics(module, self._batches(split), self.precision, *seed)

    def _at(self, state: Mapping[str, Tensor] | None) -> AbstractContextManager[LightningModule]:
        return probes.at_state(self.module, state, self.device)

"""What a client is during a visit: its module, its state, its addresses: :class:`ClientBase`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.compat.attached import detached_copy
from fedlightning.hooks import POOLED, Phase, Protection, SumCodec
from fedlightning.messages import ClientLog, Message
from fedlightning.seeding import generator
from fedlightning.tensors import State, clone, load_state, module_state
from fedlightning.visit.record import ClientRecord

if TYPE_CHECKING:
    from fedlightning.visit.runner import LocalRunner


class ClientBase:
    """A LightningModule with its loaders and a state that stays; see :class:`~fedlightning.visit.client.Client`."""

    def __init__(
        self,
        runner: LocalRunner,
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
        self.contributed: bool | None = None
        self.steps = 0
        self.skipped = 0
        self.own_steps = 0
        self.selections = 0
        self.lr_sum = 0.0
        self.lr_sums: dict[str, float] = {}
        self.gradient_weights: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.logs: list[ClientLog] = []
        self.scratch: dict[str, Any] = {}
        self.phase = Phase()
        self._streams: dict[str, Iterator[Any]] = {}
        self._anchor: dict[tuple[torch.device, str], Tensor] = {}
        self._num_samples: int | None = None  # counted on first access
        self._withheld = ""

    def __repr__(self) -> str:
        """Return id, round and what it has kept."""
        kept = f", state of {', '.join(self.state)}" if self.state else ""
        return f"<Client {self.id!r}, round {self.round + 1}, {self.record.visits} earlier visits{kept}>"

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
            self._num_samples = self._runner.used_samples(self._runner.loader(self.message, "train"))
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
        data = self._runner.data.at_round(self.round)
        return data.sample_groups(self.id) if self.id in data.client_ids else None

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

    def withhold_data(self, why: str) -> None:
        """Let callbacks read the client's samples in this visit no more; the batches of its fits go on.

        Args:
            why: The sentence that those who ask get.
        """
        self._withheld = why

    def refuse_withheld(self) -> None:
        """Raise ValueError if samples are for the steps of training only (:meth:`withhold_data`)."""
        if self._withheld:
            raise ValueError(self._withheld)

    def size(self, split: str = "train") -> int:
        """Return the number of samples in a split of the client's data; of all clients' data in a pooled job."""
        known = self._runner.described
        ids = known.client_ids if POOLED in (self.message.data, self.message.client) else [self.id]
        return sum(known.num_samples(client, split, self.round) for client in ids)

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
            own, self._module = self._module, module
            try:
                self._blueprint.callbacks.event("on_build", self, self.message)
            finally:
                self._module = own
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

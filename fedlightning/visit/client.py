"""One client during a visit: :class:`Client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from fedlightning.tensors import State, clone, load_state, module_state
from fedlightning.visit import probes
from fedlightning.visit.client_data import ReadsData
from fedlightning.wrappers.features import FeatureTap


class Client(ReadsData):
    """One client during one visit or one evaluation: a LightningModule, its loaders, and a state that stays with it.

    It offers all that algorithms need, so that none of them reaches for the engine or the data module.

    Attributes:
        id: The client's id.
        round: The present round, counted from 0.
        visit: Number in the addresses of this visit's randomness: the round, unless the client trains more than once in it.
        message: The message from the server.
        record: What the client keeps (see :class:`~fedlightning.visit.record.ClientRecord`).
        received: Model entries as the server sent them, before any callback merged them.
        evaluating: Whether the visit only evaluates. Then nothing that is written to :attr:`state` is kept.
        contributed: Whether an optimizer has stepped in this visit's federated fits, or trainable entries have moved: whether
            the client counts. `None`: there was no such fit.
        steps: Steps of the first optimizer in these fits.
        skipped: Steps of these fits that the gradient scaler skipped.
        own_steps: Optimizer steps of the other fits.
        selections: Passes over validation data that callbacks asked for in this visit.
        lr_sum: Largest of :attr:`lr_sums`.
        lr_sums: By parameter name, the sum of its learning rate over these steps.
        gradient_weights: By parameter name, the sum of the weights with which SGD has added up the gradients of these
            steps: the distance it would have moved had every gradient been 1. With momentum this is more than
            :attr:`lr_sums`. A parameter that another optimizer moves has none: its movement is no sum of gradients.
        metrics: Values that the module logged in training.
        logs: What was logged in training, if the client's logs are kept.
        scratch: Values that a callback keeps for the duration of the visit.
        phase: The fit that runs. Lightning hooks that act in federated phases only read it.
    """

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
        self.selections += split == "val"
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
            was_training = module.training
            module.eval()
            try:
                for batch in self._batches(split):
                    batch = probes.move_batch(module, self.precision.convert_input(batch))
                    yield batch, self.features(module, batch, taps(module))
            finally:
                module.train(was_training)

    def normalisation_statistics(self, split: str = "train") -> tuple[State, int]:
        """Return means over a split of BatchNorm layers' batch statistics, and the number of batches; no trace."""
        with self._at(None) as module:
            seed = self._address("statistics", split)
            return probes.normalisation_statistics(module, self._batches(split), self.precision, *seed)

    def _at(self, state: Mapping[str, Tensor] | None) -> _AtState:
        return _AtState(self.module, state, self.device)


class _AtState:
    """Context: the module on the run's device with `state` loaded. Afterwards the module is as before."""

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

"""A second model that trains beside a client's module, on the same batches, by an optimizer of its own."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from fedlightning.algorithm import Client, Setup, State, probes
from fedlightning.tensors import clone, first_nonfinite, load_state, module_state
from fedlightning.tensors.entries import optimizers_in
from fedlightning.wrappers import user_class


class SecondModel:
    """A client's own model, which makes a step whenever the module makes one; the module does not notice.

    Args:
        client: The client, whose state holds the model from its last visit.
        key: Key of the state.
        twin: The module that holds the second model, as it begins where the client has none.

    Attributes:
        entry: Name under which the client's state holds it.
        saved: What the client's state holds.
        gradients: Gradients by name, summed over the batches of the present step.
    """

    entry = "v"

    def __init__(self, client: Client, key: str, twin: LightningModule) -> None:
        self.client, self.key, self.twin = client, key, twin
        self.saved: dict[str, Any] = client.state.get(key, {})
        if self.entry in self.saved:
            load_state(self.twin, self.saved[self.entry])
        self.gradients: State = {}
        self._before: tuple[State, State] = {}, {}
        self._has_stepped = False

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Move it to the device, make its optimizer, and follow the optimizer of the module."""
        self.trainer, self.module = trainer, module
        self.twin.to(module.device)
        self.twin.trainer = trainer
        self.optimizer = optimizers_in(self.twin.configure_optimizers())[0]
        if self.client.keeps_optimizers and self.saved.get("optimizer") is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.saved["optimizer"]))  # which does not copy the tensors
        self.parameters = {n: p for n, p in self.twin.named_parameters() if p.requires_grad}
        self.handle = trainer.optimizers[0].register_step_post_hook(lambda *_: self.step())
        self._before = probes.followers(module), probes.followers(self.twin)

    def stop(self) -> None:
        """Let go of the trainer.

        Raises:
            ValueError: If hooks of the module have moved frozen parameters, which this model has where they were.
        """
        module = self.module
        self.handle.remove()
        self.twin.trainer = None
        del self.trainer, self.module
        (before, own_before), self._before = self._before, ({}, {})
        standing = sorted((_moved(module, before) & own_before.keys()) - _moved(self.twin, own_before))
        if standing and self._has_stepped:
            raise ValueError(
                f"Training moves '{standing[0]}' of {user_class(module).__name__}, a frozen parameter, in a hook such as "
                f"on_train_batch_end. {self.key} trains a second model beside the module, and Lightning calls no hooks of "
                "that one, so that it would train with what nothing moves. Move it in training_step, or use Ditto"
            )

    @torch.no_grad()
    def accumulate(self, batch: Any, batch_idx: int) -> None:
        """Add this batch's part of the gradient."""
        window = self.trainer.accumulate_grad_batches
        if batch_idx % window == 0:
            self.gradients = {}
        try:
            gradients = self.gradients_of(batch, batch_idx)
        except probes.NoLossError:
            return  # the step skips this batch, for the module too
        for name, gradient in gradients.items():
            share = gradient / window
            self.gradients[name] = self.gradients[name] + share if name in self.gradients else share

    def gradients_of(self, batch: Any, batch_idx: int) -> State:
        """Return the gradient of one batch by name."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Make a step right after that of the module.

        A step of the module that the gradient scaler skipped is not a step here either. Where only the scaled gradients of
        the second model overflow, it alone stays.
        """
        reduce = self.trainer.strategy.reduce  # over the ranks of one client, under DDP
        gradients = {name: reduce(gradient, reduce_op="mean") for name, gradient in self.gradients.items()}
        scaled = self.client.loss_scale != 1.0
        overflow = scaled and not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        if gradients and not overflow:
            for name, parameter in self.parameters.items():
                parameter.grad = gradients.get(name)
            clip, how = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
            self.twin.configure_gradient_clipping(self.optimizer, clip, how)
            self.follow_schedule(self.trainer.optimizers[0])
            self.optimizer.step()
            self._has_stepped = True
        self.gradients = {}

    def follow_schedule(self, main: Optimizer) -> None:
        """Take over the learning rates of the module's optimizer, and whatever else a scheduler moves."""
        for own_group, group in zip(self.optimizer.param_groups, main.param_groups, strict=False):
            own_group.update({name: value for name, value in group.items() if name not in ("params", "param_names")})

    def state(self) -> dict[str, Any]:
        """Return what the client keeps: the model and, where optimizers go on, the optimizer's state.

        Raises:
            FloatingPointError: If the model holds NaN or infinite values.
        """
        entries = clone(module_state(self.twin), "cpu")
        bad = first_nonfinite({name: entries[name] for name in self.parameters})
        if bad is not None:
            raise FloatingPointError(
                f"'{bad}' of the personal model holds NaN or infinite values after training. Lower the learning rate "
                "or clip gradients (gradient_clip_val)"
            )
        kept: dict[str, Any] = {self.entry: entries}
        if self.client.keeps_optimizers:
            kept["optimizer"] = move_data_to_device(self.optimizer.state_dict(), "cpu")
        return kept


def _moved(module: LightningModule, before: State) -> set[str]:
    return {
        name for name, entry in module.named_parameters() if name in before and not torch.equal(entry, before[name])
    }


def refuse_closures(setup: Setup, owner: str) -> None:
    """Refuse optimizers that evaluate the loss again: the second model has one gradient a batch.

    Raises:
        ValueError: With the name of the optimizer.
    """
    for optimizer in setup.optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{owner} trains a second model by a second {type(optimizer).__name__}, whose step evaluates the loss again "
                "by a closure; that model has one gradient a batch. Return SGD, Adam or another optimizer of single steps."
            )

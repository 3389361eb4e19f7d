"""A learning rate of its own for what stays with the clients."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.algorithm import FederatedCallback, Setup
from fedlightning.ranges import Range


class PrivateLR(FederatedCallback):
    """A learning rate of its own for the parameters that stay with a client.

    Beside any method that shares a part of the model (FedPer, LG-FedAvg, FedRep, FENDA, PLayer-FL ...): every step of the
    module's optimizer moves a private parameter by ``factor`` times what it would. For SGD, with or without momentum, Adam
    and AdamW, whose steps are the learning rate times something that does not depend on it, this is a learning rate of
    ``factor * lr``, whatever schedule or ``lr_decay`` it follows, and weight decay scales along. Other optimizers are
    refused. Private is what was not sent to the client in this round; under PLayer-FL that is nothing in round 1, before
    the layers are chosen.

    What travels is not touched. ``engine="vectorized"`` refuses this callback.

    Args:
        factor: The private learning rate over that of the module: 0.1 for 1e-3 beside 1e-2. 0 freezes the private part.

    Raises:
        ValueError: If ``factor`` is negative.

    Example:
        >>> from fedlightning.callbacks import PrivateLR
        >>> PrivateLR(factor=0.1).hyperparameters()
        {'factor': 0.1}
    """

    def __init__(self, factor: Annotated[float, Range("[0, inf)", "1 changes nothing.")]) -> None:
        self.factor = factor

    def check(self, setup: Setup) -> None:
        """Refuse methods without a private part, and optimizers whose steps are not proportional to the learning rate.

        Raises:
            ValueError: If there is no private part, or an optimizer is none of SGD, Adam and AdamW.
        """
        if not any(other.claims("shared_names") for other in setup.callbacks):
            raise ValueError(
                "PrivateLR sets the learning rate of what stays with the clients, but no callback keeps a part of the model "
                "there. Add FedPer() or another method that shares a part, or remove PrivateLR."
            )
        for optimizer in setup.optimizers:
            if type(optimizer) not in PROPORTIONAL:
                proportional_kinds = ", ".join(kind.__name__ for kind in PROPORTIONAL)
                raise ValueError(
                    f"PrivateLR scales the steps of {proportional_kinds}; those of {type(optimizer).__name__} may not be "
                    "proportional to the learning rate. Use one of these, or give the module's optimizer parameter groups."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale the steps of this fit."""
        if self.factor == 1.0:
            return
        client = self.client
        private = {id(p) for name, p in pl_module.named_parameters() if p.requires_grad and name not in client.received}
        scaled = [_ScaledSteps(optimizer, private, self.factor) for optimizer in trainer.optimizers] if private else []
        client.scratch[self.key] = scaled

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizers as they were."""
        for steps in self.client.scratch.pop(self.key, []):
            steps.remove()


class _ScaledSteps:
    """Steps of one optimizer, of which some parameters take a part only."""

    def __init__(self, optimizer: Optimizer, chosen: set[int], factor: float) -> None:
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in chosen]
        self.factor = factor
        self.before: list[Tensor] = []
        self.handles = [optimizer.register_step_pre_hook(self._note), optimizer.register_step_post_hook(self._scale)]

    @torch.no_grad()
    def _note(self, *ignored: Any) -> None:
        self.before = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def _scale(self, *ignored: Any) -> None:
        for parameter, before in zip(self.parameters, self.before, strict=True):
            parameter.copy_(torch.lerp(before, parameter, self.factor))
        self.before = []

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


PROPORTIONAL: tuple[type[Optimizer], ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose every step is the learning rate times something that does not depend on it."""

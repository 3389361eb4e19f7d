"""Clients weighted by the target tokens that they train on."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from fedlightning.algorithm import Client, Extra, FederatedCallback, Server, Setup, Update, Wire


class TokenWeighting(FederatedCallback):
    """Weighs each client in the mean by the target tokens of its training batches, not by its samples.

    For language models, whose loss is a mean over tokens: texts differ in length, and labels of -100 are not targets. Put it
    beside a method that leaves the weighting open (``weighting=None``), such as :class:`FedIT`, or alone, which is
    :class:`FedAvg`. Up: the number of tokens. The module says what a batch holds (``count_tokens``, as ``HFModule`` does).

    Example:
        >>> from fedlightning.callbacks import FedIT, TokenWeighting
        >>> callbacks = [FedIT(r=8), TokenWeighting()]
    """

    def weighting(self, server: Server, update: Update) -> float:
        """Return the tokens that a client has trained on."""
        return float(update.extras.get(self.key, {}).get("tokens", 0))

    def wire(self, module: nn.Module) -> Wire:
        """Declare the number of tokens."""
        return Wire(up={"tokens": Extra("scalar", whole=True, low=0, due=("",))})

    def check(self, setup: Setup) -> None:
        """Refuse a module that does not say how many tokens a batch holds."""
        if not callable(getattr(setup.module, "count_tokens", None)):
            raise ValueError(
                f"TokenWeighting asks the module how many target tokens a batch holds, and {type(setup.template).__name__} "
                "has no count_tokens(batch). Define it, use HFModule, or leave TokenWeighting out."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count a batch's tokens, where what is trained is what the mean is of: not a client's own model."""
        if not self.client.phase.federated:
            return
        tokens: int = pl_module.count_tokens(batch)  # type: ignore[operator]
        self.client.scratch[self.key] = self.client.scratch.get(self.key, 0) + tokens

    def on_send(self, client: Client, update: Update) -> None:
        """Send the sum."""
        if client.message.work != 0:
            update.extras[self.key] = {"tokens": client.scratch.get(self.key, 0)}

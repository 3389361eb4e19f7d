"""Attacks on what is sent that each bad client makes alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlightning.algorithm import Client
from fedlightning.callbacks.attacks.base import Attack, Positive


class SignFlip(Attack):
    """Bad clients send the opposite of their change: ``-scale (w_i - w)``.

    Args:
        clients: The bad clients' ids.
        scale: How much longer than the honest change it is. Default 1.

    Example:
        >>> SignFlip(clients=[3], scale=2.0).attacked(None, torch.ones(1), "w")
        tensor([-2.])
    """

    def __init__(self, clients: Sequence[str | int], scale: Positive = 1.0) -> None:
        super().__init__(clients)
        self.scale = scale

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return the opposite."""
        return -self.scale * change


class GaussianAttack(Attack):
    """Bad clients send Gaussian noise in the place of their change.

    Args:
        clients: The bad clients' ids.
        std: Its standard deviation, for every number. Default 1.
    """

    def __init__(self, clients: Sequence[str | int], std: Positive = 1.0) -> None:
        super().__init__(clients)
        self.std = std

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return noise from an address of its own, so that a resumed run attacks alike."""
        draws = client.rng(f"attack {name}")
        return self.std * torch.randn(change.shape, generator=draws, dtype=torch.float64)

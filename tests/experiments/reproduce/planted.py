"""A wrong implementation of FedAvg."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fedlightning  # noqa: F401  before lightning
from fedlightning.callbacks import FedAvg


class Still(FedAvg):
    """Clients take their steps along nothing."""

    def correct_gradient(self, ctx: Any, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        return 0.0 * gradient

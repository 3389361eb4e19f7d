"""FedProx."""

from __future__ import annotations

from torch import Tensor

from fedlightning.algorithm import FederatedCallback, GradientContext, WeightingName


class FedProx(FederatedCallback):
    """FedAvg with a proximal term that holds each client near the server's model.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020.

    Down: ``w^t``. Up: ``w_i``. Each participant minimises ``F_i(w) + (mu/2) ||w - w^t||^2``: every step's gradient is
    ``g + mu (w - w^t)``, on trainable parameters that travel. The anchor ``w^t`` is fixed for the whole round. The
    logged loss stays the task's. Under Adam the pull is rescaled by the preconditioner; with SGD ``eta mu < 2`` is
    needed.

    Args:
        mu: strength; the paper tunes it in {0.001, 0.01, 0.1, 1}. Default 0.1 (the PLayer-FL comparison).
        weighting: ``"samples"`` (the authors' code) or ``"uniform"`` (the paper, which then samples clients by size).
    """

    def __init__(self, mu: float = 0.1, weighting: WeightingName | None = None) -> None:
        if mu < 0:
            raise ValueError(f"FedProx got mu={mu}; a proximal strength cannot be negative. Use 0 for FedAvg.")
        self.mu = mu
        self.weighting = weighting

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """``g + mu (w - w^t)``."""
        if name not in ctx.anchor or self.mu == 0.0:
            return gradient
        return gradient + self.mu * (parameter - ctx.anchor[name])

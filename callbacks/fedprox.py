"""FedProx."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from fedlightning.algorithm import Facts, FederatedCallback, GradientContext, WeightingName
from fedlightning.callbacks.shared.steps import SeveralSteps
from fedlightning.ranges import Range


class FedProx(FederatedCallback):
    """FedAvg with a proximal term that holds each client near the server's model.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020.

    * Client: minimise ``F_i(w) + (mu/2) ||w - w^t||^2``. Every step's gradient is ``g + mu (w - w^t)``, on trainable
      parameters that travel. The anchor ``w^t`` is fixed for the whole round.
    * Server: the weighted mean, as in FedAvg.
    * Down: ``w^t``. Up: ``w_i``. State: none.
    * Deployed: the global model ``w``.

    The first step is taken at ``w^t``, where the pull is 0: with one local step it is FedAvg, and a warning says so.
    The logged loss stays the task's. Under Adam the pull is rescaled by the preconditioner; SGD needs ``eta mu < 2``.

    Args:
        mu: Strength of the pull. Default 0.1 (the PLayer-FL comparison); the paper tunes it in {0.001, 0.01, 0.1, 1}.
        weighting: ``"samples"`` (the authors' code, default) or ``"uniform"`` (the paper, which then samples clients by
            size).

    Raises:
        ValueError: If ``mu`` is negative.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import GradientContext
        >>> from fedlightning.callbacks import FedProx
        >>> sent = {"w": torch.zeros(2)}
        >>> ctx = GradientContext(anchor=sent, payload={}, state={}, client="0", num_samples=8, lr=0.1)
        >>> w, g = torch.tensor([1.0, -2.0]), torch.zeros(2)
        >>> FedProx(mu=0.5).correct_gradient(ctx, "w", w, g)
        tensor([ 0.5000, -1.0000])
    """

    facts = Facts(requires=[SeveralSteps(of="mu")], mixes_architectures=True)

    def __init__(
        self, mu: Annotated[float, Range("[0, inf)", "0 is FedAvg.")] = 0.1, weighting: WeightingName | None = None
    ) -> None:
        self.mu = mu
        self.weighting = weighting

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return ``g + mu (w - w^t)``."""
        if name not in ctx.anchor or self.mu == 0.0:
            return gradient
        return gradient + self.mu * (parameter - ctx.anchor[name])

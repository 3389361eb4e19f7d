"""HeurFedAMP."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from fedlightning.algorithm import Server, Setup, State
from fedlightning.callbacks.fedamp import FLAT, PAPER_ALPHA, FedAMP
from fedlightning.callbacks.shared.server_models import parameter_names
from fedlightning.ranges import NonNegativeFloat, Share
from fedlightning.tensors import to_row

ROUNDING = 1e-14
"""What ``1 - cos`` of a vector with itself may be in float64."""


class HeurFedAMP(FedAMP):
    """FedAMP with attention by angles, for deep networks, whose distances say little.

    Huang et al., AAAI 2021 (see :class:`FedAMP`). ``xi_ij = (1 - xi_ii) softmax_{j != i}(sigma cos(w_i, w_j))`` with a
    fixed ``xi_ii``. All else is FedAMP's: the client's part, what travels, what is kept and what is deployed.

    Models that start from one initialisation have cosines near 1 whose differences are small, and the softmax of small
    differences is flat. By default ``sigma`` is therefore observed, as in FedAMP: 1 / the mean of ``1 - cos`` over all pairs.

    Args:
        lam: Strength of the pull. Default 1.
        alpha: ``alpha_k`` of the first round, which only scales the pull ``lam / alpha_k`` here. Default 1e4 (paper).
        sigma: Sharpness of the softmax. ``None`` (default): observed. 0 counts all others alike. The paper tunes it.
        xi_self: ``xi_ii`` in [0, 1]. ``None`` (default) is ``1 / N`` (ours: the paper tunes it). 1 is Local with a pull
            to itself.
        alpha_decay: Factor on ``alpha`` per round, in (0, 1]. Default 1.
        start: Where local training starts: ``"cloud"`` (``u_i``, default) or ``"own"`` (``w_i``).

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import HeurFedAMP
        >>> module, kinds = torch.nn.Linear(2, 1, bias=False), {"weight": "trainable"}
        >>> server = SimpleNamespace(module=module, kinds=kinds, state={})
        >>> vectors = {"a": [1.0, 0.0], "b": [9.0, 0.0], "c": [0.0, 1.0]}  # b points where a does
        >>> models = {client: {"weight": torch.tensor([w])} for client, w in vectors.items()}
        >>> xi = HeurFedAMP(sigma=1.0, xi_self=0.2).attention(server, "a", models)
        >>> {client: round(weight, 3) for client, weight in xi.items()}
        {'a': 0.2, 'b': 0.585, 'c': 0.215}
    """

    def __init__(
        self,
        lam: float = 1.0,
        alpha: float = PAPER_ALPHA,
        sigma: NonNegativeFloat | None = None,
        xi_self: Share | None = None,
        alpha_decay: float = 1.0,
        start: Literal["cloud", "own"] = "cloud",
    ) -> None:
        super().__init__(lam, alpha, sigma or None, alpha_decay, start)
        self.sigma = sigma
        self.xi_self = xi_self

    def check(self, setup: Setup) -> None:
        """Accept any: no weight is negative here."""

    def unlikeness(self, server: Server, a: State, b: State) -> float:
        """Return ``1 - cos(a, b)`` over trainable parameters."""
        names = parameter_names(server, a)
        unlike = 1.0 - float(torch.cosine_similarity(to_row(a, names), to_row(b, names), dim=0))
        return unlike if unlike > ROUNDING else 0.0

    def _warn_of_attention(self, pairs: list[float]) -> None:
        """Warn where the clients' models differ, but the softmax counts them alike."""
        if pairs and self.sigma and 0 < self.sigma * (max(pairs) - min(pairs)) < FLAT:
            warnings.warn(
                f"HeurFedAMP(sigma={self.sigma:g}) counts all clients alike: the cosines between their models are "
                f"{1 - max(pairs):.6g} to {1 - min(pairs):.6g} after the first round. Leave sigma out to have it follow "
                "them.",
                stacklevel=2,
            )

    def attention(self, server: Server, client: str, models: dict[str, State]) -> dict[str, float]:
        """Return row i of ``xi``: a softmax of cosines."""
        others = [j for j in models if j != client]
        if not others:
            return {client: 1.0}
        itself = 1.0 / len(models) if self.xi_self is None else self.xi_self
        sharpness = 1.0 / self.observed(server, models)["sigma"] if self.sigma is None else self.sigma
        unlike = [self.unlikeness(server, models[client], models[j]) for j in others]
        weights = (1.0 - itself) * torch.softmax(-sharpness * torch.tensor(unlike, dtype=torch.float64), dim=0)
        return {j: dict(zip(others, weights.tolist(), strict=True)).get(j, itself) for j in models}

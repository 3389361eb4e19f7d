"""FedAMP and HeurFedAMP."""

from __future__ import annotations

import math
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    Client,
    GradientContext,
    Job,
    Message,
    Server,
    Setup,
    Stage,
    State,
    Update,
    Wire,
    clone,
    distance,
    load_state,
    module_state,
    select,
)
from fedlightning.callbacks.shared.server_models import ClientModels, combine, parameter_names


class FedAMP(ClientModels):
    r"""Attentive message passing: each client is pulled to its own mixture of all models, most to those like its own.

    Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

    Objective: ``sum_i f_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2)`` with ``A(x) = 1 - exp(-x / sigma)``. In round k:

    * server: ``xi_ij = alpha_k A'(||w_i - w_j||^2)`` with ``A'(x) = exp(-x / sigma) / sigma`` for j other than i,
      ``xi_ii = 1 - sum_j xi_ij``, ``u_i = sum_j xi_ij w_j``;
    * client: ``w_i = argmin f_i(w) + lam / (2 alpha_k) ||w - u_i||^2``: local training, each gradient plus ``(lam /
      alpha_k) (w - u_i)``.

    Down: ``u_i`` and one number. Up: ``w_i``. State: all ``w_j`` at the server (O(N * model) memory), ``w_i`` at each
    client, which is the model it deploys, at every stage. An absent client keeps its ``w_i``, and counts with the last
    one it sent. Distances are over trainable parameters, in float64; float buffers are mixed like parameters, integers
    are the client's own.

    ``xi_ii`` must not go negative: ``alpha (N - 1) <= sigma`` is checked. With ``sigma`` far below the squared
    distances of the models nobody hears of anybody (Local with a pull to itself); far above, all models count alike.

    Args:
        lam: strength of the collaboration (paper: 1).
        alpha: step size ``alpha_k`` of the first round; ``None``: ``sigma / N``, so that models which coincide are
            averaged evenly (for 100 clients, the 1e4 of the paper at its ``sigma``).
        sigma: scale of squared distances (paper: 1e6).
        alpha_decay: factor on ``alpha`` per round; the paper's analysis wants ``alpha_k`` to fall. Default: none.
        start: local training starts from ``"cloud"``: ``u_i``; or ``"own"``: ``w_i``, which only the pull then moves to
            ``u_i`` (with ``lam = 0``: Local).
    """

    def __init__(
        self,
        lam: float = 1.0,
        alpha: float | None = None,
        sigma: float = 1e6,
        alpha_decay: float = 1.0,
        start: Literal["cloud", "own"] = "cloud",
    ) -> None:
        positive = {"alpha": 1.0 if alpha is None else alpha, "sigma": sigma, "alpha_decay": alpha_decay}
        for name, value in positive.items():
            if not value > 0 or not math.isfinite(value):
                raise ValueError(f"{self.key} got {name}={value}; it must be a positive number.")
        if lam < 0:
            raise ValueError(f"{self.key} got lam={lam}; a strength cannot be negative. Use 0 for no pull.")
        if alpha_decay > 1:
            raise ValueError(f"{self.key} got alpha_decay={alpha_decay}; alpha must not grow. Use a factor in (0, 1].")
        if start not in ("cloud", "own"):
            raise ValueError(f"{self.key} got start={start!r}. Use 'cloud' (from u_i) or 'own' (from w_i).")
        self.lam = lam
        self.alpha = alpha
        self.sigma = sigma
        self.alpha_decay = alpha_decay
        self.start = start

    def check(self, setup: Setup) -> None:
        """Refuse weights that could be negative."""
        super().check(setup)
        others = len(setup.clients) - 1
        if self.alpha is not None and self.alpha * others > self.sigma:
            raise ValueError(
                f"{self.key} got alpha={self.alpha} and sigma={self.sigma} for {others + 1} clients: xi_ii could fall "
                f"to {1 - self.alpha * others / self.sigma:.3g}. Keep alpha (N - 1) <= sigma, or leave alpha out."
            )

    def wire(self, module: nn.Module) -> Wire:
        """``lam / alpha_k``, with the cloud model in the place of the global one."""
        return Wire(down={"pull": "scalar"})

    # -- server --------------------------------------------------------------------------------------------------------
    def step_size(self, server: Server) -> float:
        """``alpha_k``."""
        first = self.sigma / len(server.clients) if self.alpha is None else self.alpha
        return first * self.alpha_decay**server.round

    def attention(self, server: Server, client: str, models: dict[str, State]) -> dict[str, float]:
        """Row i of ``xi``, in client order."""
        own = select(models[client], parameter_names(server, models[client]))
        step = self.step_size(server) / self.sigma
        row = {j: step * math.exp(-(distance(w, own) ** 2) / self.sigma) for j, w in models.items() if j != client}
        return {j: 1.0 - sum(row.values()) if j == client else row[j] for j in models}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """``u_i`` in the place of the global model."""
        message.extras[self.key] = {"pull": self.lam / self.step_size(server)}
        if job.client in server.clients:
            models = {client: select(state, message.state) for client, state in self.models(server).items()}
            row = self.attention(server, job.client, models)
            message.state = combine(models[job.client], [(max(row[j], 0.0), models[j]) for j in models])

    # -- client --------------------------------------------------------------------------------------------------------
    def _own(self, client: Client) -> State:
        own: State = client.state.get(self.key, {}).get("w", {})
        return own

    def on_receive(self, client: Client, message: Message) -> None:
        """``start="own"``: the anchor is ``u_i``, the start is not."""
        if self.start == "own":
            message.state = message.state | select(self._own(client), message.state)

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """``g + (lam / alpha_k) (w - u_i)``."""
        if name not in ctx.anchor or self.lam == 0.0:
            return gradient
        return gradient + ctx.payload["pull"] * (parameter - ctx.anchor[name])

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``w_i``: what a client sends does not stay by itself."""
        if client.steps:
            client.state[self.key] = {"w": clone(module_state(client.module, client.received), "cpu")}

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """``w_i``: the cloud model is where training starts, not what is deployed."""
        if stage == "L2" or not self._own(client):
            return client.module
        module = client.copy_module()
        load_state(module, self._own(client))
        return module


class HeurFedAMP(FedAMP):
    """FedAMP with attention by angles, for deep networks, whose distances say little. See :class:`FedAMP`.

    ``xi_ij = (1 - xi_ii) softmax_{j != i}(sigma cos(w_i, w_j))`` with a fixed ``xi_ii``; the client's part is FedAMP's.

    Args:
        lam: strength of the pull.
        alpha: ``alpha_k`` of the first round, which only scales the pull ``lam / alpha_k`` here. Default 1e4 (paper).
        sigma: sharpness of the softmax: 0 counts all others alike. Default 10 (ours: the paper tunes it).
        xi_self: ``xi_ii`` in [0, 1]; ``None``: ``1 / N`` (ours: the paper tunes it). 1 is Local with a pull to itself.
        alpha_decay: factor on ``alpha`` per round.
        start: ``"cloud"`` or ``"own"``.
    """

    def __init__(
        self,
        lam: float = 1.0,
        alpha: float = 1e4,
        sigma: float = 10.0,
        xi_self: float | None = None,
        alpha_decay: float = 1.0,
        start: Literal["cloud", "own"] = "cloud",
    ) -> None:
        if xi_self is not None and not 0.0 <= xi_self <= 1.0:
            raise ValueError(f"HeurFedAMP got xi_self={xi_self}; a client's weight on itself must be in [0, 1].")
        if not 0 <= sigma < math.inf:
            raise ValueError(f"HeurFedAMP got sigma={sigma}; the sharpness of the softmax cannot be negative.")
        super().__init__(lam, alpha, sigma or 1.0, alpha_decay, start)
        self.sigma = sigma
        self.xi_self = xi_self

    def check(self, setup: Setup) -> None:
        """Weights are never negative here."""
        ClientModels.check(self, setup)

    def attention(self, server: Server, client: str, models: dict[str, State]) -> dict[str, float]:
        """Row i of ``xi``: softmax of cosines."""
        others = [j for j in models if j != client]
        if not others:
            return {client: 1.0}
        itself = 1.0 / len(models) if self.xi_self is None else self.xi_self
        vectors = {j: flat(w, parameter_names(server, w)) for j, w in models.items()}
        cosines = [float(torch.cosine_similarity(vectors[client], vectors[j], dim=0)) for j in others]
        weights = (1.0 - itself) * torch.softmax(self.sigma * torch.tensor(cosines, dtype=torch.float64), dim=0)
        return {j: dict(zip(others, weights.tolist(), strict=True)).get(j, itself) for j in models}


def flat(state: State, names: list[str]) -> Tensor:
    """The entries under ``names`` as one vector in float64."""
    return torch.cat([state[name].double().flatten() for name in names])

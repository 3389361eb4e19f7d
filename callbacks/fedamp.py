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
    """Attentive message passing: each client is pulled to its own mixture of all models, most to those like its own.

    Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

    Objective: ``sum_i f_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2)`` with ``A(x) = 1 - exp(-x / sigma)``. In round k

    * the server mixes ``u_i = sum_j xi_ij w_j`` with ``xi_ij = alpha_k A'(||w_i - w_j||^2)`` for j other than i,
      ``A'(x) = exp(-x / sigma) / sigma`` and ``xi_ii = 1 - sum_j xi_ij`` (:meth:`attention`);
    * the client solves ``w_i = argmin f_i(w) + lam / (2 alpha_k) ||w - u_i||^2`` by local training, each gradient plus
      ``(lam / alpha_k) (w - u_i)``.

    What travels and what is kept:

    * Down: ``u_i`` and one number. Up: ``w_i``.
    * State: all ``w_j`` at the server (O(N * model) memory), ``w_i`` at each client. An absent client keeps its
      ``w_i``, and counts with the last one it sent.
    * Deployed: ``w_i``, at every stage. There is no global model.

    Distances are over trainable parameters, in float64. Float buffers are mixed like parameters; integers are the
    client's own.

    ``xi_ii`` must not be negative: ``alpha (N - 1) <= sigma`` is checked. If ``sigma`` is far below the models' squared
    distances, each client trains alone, pulled to its own model. If it is far above, all models count alike.

    Args:
        lam: Strength of the collaboration. Default 1 (paper).
        alpha: Step size ``alpha_k`` of the first round. ``None`` (default) is ``sigma / N``, so that models which
            coincide are averaged evenly (for 100 clients, the 1e4 of the paper at its ``sigma``).
        sigma: Scale of squared distances. Default 1e6 (paper).
        alpha_decay: Factor on ``alpha`` per round, in (0, 1]. Default 1; the paper's analysis needs ``alpha_k`` to
            fall.
        start: Where local training starts. ``"cloud"`` (default): from ``u_i``. ``"own"``: from ``w_i``, which only the
            pull then moves to ``u_i`` (with ``lam = 0``: Local).

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        Client a listens to b, which is near, and hardly to c, which is far.

        >>> import torch
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import FedAMP
        >>> module, kinds = torch.nn.Linear(1, 1, bias=False), {"weight": "trainable"}
        >>> server = SimpleNamespace(clients=["a", "b", "c"], round=0, module=module, kinds=kinds)
        >>> models = {client: {"weight": torch.tensor([[w]])} for client, w in (("a", 0.0), ("b", 0.5), ("c", 3.0))}
        >>> {client: round(xi, 3) for client, xi in FedAMP(sigma=1.0).attention(server, "a", models).items()}
        {'a': 0.74, 'b': 0.26, 'c': 0.0}
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
        self.merges = start == "own"

    def check(self, setup: Setup) -> None:
        """Refuse callbacks that work on a global model, and weights that could be negative.

        Raises:
            ValueError: If a callback changes one global model, or ``alpha (N - 1) > sigma``.
        """
        super().check(setup)
        others = len(setup.clients) - 1
        if self.alpha is not None and self.alpha * others > self.sigma:
            raise ValueError(
                f"{self.key} got alpha={self.alpha} and sigma={self.sigma} for {others + 1} clients: xi_ii could fall "
                f"to {1 - self.alpha * others / self.sigma:.3g}. Keep alpha (N - 1) <= sigma, or leave alpha out."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare ``lam / alpha_k`` down."""
        return Wire(down={"pull": "scalar"})

    # -- server --------------------------------------------------------------------------------------------------------
    def step_size(self, server: Server) -> float:
        """Return ``alpha_k`` of the present round."""
        first = self.sigma / len(server.clients) if self.alpha is None else self.alpha
        return first * self.alpha_decay**server.round

    def attention(self, server: Server, client: str, models: dict[str, State]) -> dict[str, float]:
        """Return row i of ``xi``, in client order.

        Args:
            server: The server; its round gives ``alpha_k``.
            client: Client i.
            models: Each client's model ``w_j``.
        """
        own = select(models[client], parameter_names(server, models[client]))
        step = self.step_size(server) / self.sigma
        row = {j: step * math.exp(-(distance(w, own) ** 2) / self.sigma) for j, w in models.items() if j != client}
        return {j: 1.0 - sum(row.values()) if j == client else row[j] for j in models}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ``u_i`` in the place of a global model, and the strength of the pull."""
        message.extras[self.key] = {"pull": self.lam / self.step_size(server)}
        if job.client in server.clients:
            models = {client: select(state, message.state) for client, state in self.models(server).items()}
            row = self.attention(server, job.client, models)
            message.state = combine(models[job.client], [(max(row[j], 0.0), models[j]) for j in models])

    # -- client --------------------------------------------------------------------------------------------------------
    def _own(self, client: Client) -> State:
        """Return ``w_i`` as the client keeps it; empty before its first visit."""
        own: State = client.state.get(self.key, {}).get("w", {})
        return own

    def on_receive(self, client: Client, message: Message) -> None:
        """Start from ``w_i`` where ``start="own"``. The anchor stays ``u_i``."""
        if self.start == "own":
            message.state = message.state | select(self._own(client), message.state)

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return ``g + (lam / alpha_k) (w - u_i)``."""
        if name not in ctx.anchor or self.lam == 0.0:
            return gradient
        return gradient + ctx.payload["pull"] * (parameter - ctx.anchor[name])

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``w_i``: the core does not keep what a client sends."""
        if client.steps:
            client.state[self.key] = {"w": clone(module_state(client.module, client.received), "cpu")}

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return ``w_i``. The mixture ``u_i`` is where training starts, not what is deployed."""
        if stage == "L2" or not self._own(client):
            return client.module
        module = client.copy_module()
        load_state(module, self._own(client))
        return module


class HeurFedAMP(FedAMP):
    """FedAMP with attention by angles, for deep networks, whose distances say little.

    Huang et al., AAAI 2021 (see :class:`FedAMP`). ``xi_ij = (1 - xi_ii) softmax_{j != i}(sigma cos(w_i, w_j))`` with a
    fixed ``xi_ii``. All else is FedAMP's: the client's part, what travels, what is kept and what is deployed.

    Args:
        lam: Strength of the pull. Default 1.
        alpha: ``alpha_k`` of the first round, which only scales the pull ``lam / alpha_k`` here. Default 1e4 (paper).
        sigma: Sharpness of the softmax. Default 10 (ours: the paper tunes it). 0 counts all others alike.
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
        >>> server = SimpleNamespace(module=module, kinds=kinds)
        >>> vectors = {"a": [1.0, 0.0], "b": [9.0, 0.0], "c": [0.0, 1.0]}  # b points where a does
        >>> models = {client: {"weight": torch.tensor([w])} for client, w in vectors.items()}
        >>> xi = HeurFedAMP(sigma=1.0, xi_self=0.2).attention(server, "a", models)
        >>> {client: round(weight, 3) for client, weight in xi.items()}
        {'a': 0.2, 'b': 0.585, 'c': 0.215}
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
        """Refuse callbacks that work on a global model. Weights are never negative here.

        Raises:
            ValueError: If a callback changes one global model.
        """
        ClientModels.check(self, setup)

    def attention(self, server: Server, client: str, models: dict[str, State]) -> dict[str, float]:
        """Return row i of ``xi``: a softmax of cosines."""
        others = [j for j in models if j != client]
        if not others:
            return {client: 1.0}
        itself = 1.0 / len(models) if self.xi_self is None else self.xi_self
        vectors = {j: flat(w, parameter_names(server, w)) for j, w in models.items()}
        cosines = [float(torch.cosine_similarity(vectors[client], vectors[j], dim=0)) for j in others]
        weights = (1.0 - itself) * torch.softmax(self.sigma * torch.tensor(cosines, dtype=torch.float64), dim=0)
        return {j: dict(zip(others, weights.tolist(), strict=True)).get(j, itself) for j in models}


def flat(state: State, names: list[str]) -> Tensor:
    """Return the entries under ``names`` as one vector ``(numbers,)`` in float64."""
    return torch.cat([state[name].double().flatten() for name in names])

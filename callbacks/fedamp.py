"""FedAMP and HeurFedAMP."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    GradientContext,
    Job,
    Message,
    Server,
    Setup,
    Stage,
    State,
    Update,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.server_models import KeepsClientModels, combine, parameter_names
from fedlightning.ranges import PositiveFloat, Range, make_init
from fedlightning.tensors import clone, distance, load_state, module_state, select

PAPER_ALPHA = 1e4
"""``alpha_k`` that the paper reports."""
FLAT = 0.01
"""Exponents of attention below this count all clients alike."""
GONE = 20.0
"""Exponents of attention above this count no other client."""
NEAR_TWO = 1.8
"""Share of the way to ``u_i`` in one step from which a warning is due: SGD diverges at 2."""
ALIKE = requires.Advice(
    "is for clients some of whom have data alike. Where the data of all differ, as under label skew by Dirichlet, it is "
    "about as good as training alone: compare it with Local."
)


@make_init
class FedAMP(KeepsClientModels):
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

    It is for clients some of whom have data alike; where the data of all differ, it is a tie with Local. Validation accuracy
    on digits (a CNN) and FashionMNIST (an MLP) over ten clients by Dirichlet(0.5), ten rounds, three seeds: 0.807 and 0.753,
    with ``alpha_decay=0.8`` 0.777 and 0.779 (Local: 0.787 and 0.797).

    Distances are over trainable parameters, in float64. Float buffers are mixed like parameters; integers are the
    client's own.

    ``sigma`` only means something beside the squared distances, which depend on the network and on the learning rate: far
    below them each client trains alone, far above them (1e6, the paper's, for all networks here) all models count alike.
    So by default it is observed after every round, as the mean of ``||w_i - w_j||^2`` over all pairs of clients, and
    ``alpha_k`` of the mixture is the largest with which every ``xi_ii`` is ``1 / N`` or more: ``xi_ij`` is ``exp(-||w_i -
    w_j||^2 / sigma)`` times ``(1 - 1 / N) / max_i sum_{j != i} exp(-||w_i - w_j||^2 / sigma)``. This does not change when
    all parameters are scaled. A warning tells of a ``sigma`` of your own that leaves attention flat, or nothing of it.

    ``xi_ii`` must not be negative: ``alpha (N - 1) <= sigma`` is checked.

    Args:
        lam: Strength of the collaboration. Default 1 (paper).
        alpha: Step size ``alpha_k`` of the first round. ``None`` (default) is ``sigma / N``, so that models which
            coincide are averaged evenly (for 100 clients, the 1e4 of the paper at its ``sigma``). Where ``sigma`` is
            observed, it scales the pull ``lam / alpha_k`` only, and ``None`` is 1e4 (paper).
        sigma: Scale of squared distances. ``None`` (default): observed. The paper's is 1e6.
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

    lam: Annotated[float, Range("[0, inf)", "0 is not a pull.")] = 1.0
    alpha: PositiveFloat | None = None
    sigma: PositiveFloat | None = None
    alpha_decay: Annotated[float, Range("(0, 1]", "alpha must not grow.")] = 1.0
    start: Literal["cloud", "own"] = "cloud"

    @property
    def facts(self) -> Facts:
        """A client keeps its own model, and may train from it."""
        changes = {Change.START} if self.start == "own" else set()
        required = [
            ALIKE,
            requires.NoOvershoot("pulls by lr * lam / alpha", of="lam", pull="_pull", limit=NEAR_TWO, warns=True),
        ]
        return super().facts.extend(changes=changes, requires=required, keeps=True)

    def check(self, setup: Setup) -> None:
        """Refuse weights that could be negative: ``alpha (N - 1) > sigma``."""
        others = len(setup.run.clients) - 1
        if self.alpha is not None and self.sigma is not None and self.alpha * others > self.sigma:
            raise ValueError(
                f"{self.key} got alpha={self.alpha} and sigma={self.sigma} for {others + 1} clients: xi_ii could fall "
                f"to {1 - self.alpha * others / self.sigma:.3g}. Keep alpha (N - 1) <= sigma, or leave alpha out."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare ``lam / alpha_k`` down."""
        return Wire(down={"pull": "scalar"})

    # -- server --------------------------------------------------------------------------------------------------------
    def step_size(self, server: Server) -> float:
        """Return ``alpha_k`` of the present round, which scales the pull."""
        return self._first_step(len(server.clients)) * self.alpha_decay**server.round

    def _first_step(self, count: int) -> float:
        """Return ``alpha_k`` of the first round among ``count`` clients."""
        if self.alpha is None:
            return PAPER_ALPHA if self.sigma is None else self.sigma / count
        return self.alpha

    def _pull(self, sizes: Mapping[str, int]) -> float:
        return self.lam / self._first_step(len(sizes))

    def unlikeness(self, server: Server, a: State, b: State) -> float:
        """Return ``||a - b||^2`` over trainable parameters, which attention falls with."""
        names = parameter_names(server, a)
        return distance(select(a, names), select(b, names)) ** 2

    def observed(self, server: Server, models: dict[str, State]) -> dict[str, float]:
        """Return ``sigma`` and ``alpha_k / sigma`` as the models have them.

        Args:
            server: The server; what it observed after the last round is used where there is something.
            models: Each client's model ``w_j``.
        """
        stored = server.state.get(self.key, {})
        if "sigma" in stored:
            return {name: stored[name] for name in ("sigma", "step")}
        return self._observe(self._pairs(server, models), len(models))

    def _observe(self, pairs: dict[tuple[str, str], float], count: int) -> dict[str, float]:
        """Return ``sigma`` and ``alpha_k / sigma`` of these unlikenesses, among ``count`` clients."""
        sigma = sum(pairs.values()) / len(pairs) if any(pairs.values()) else math.inf  # all the same: all count alike
        heard: dict[str, float] = defaultdict(float)
        for pair, value in pairs.items():
            for client in pair:
                heard[client] += math.exp(-value / sigma)
        return {"sigma": sigma, "step": (1.0 - 1.0 / count) / max(heard.values(), default=1.0)}

    def _pairs(self, server: Server, models: dict[str, State]) -> dict[tuple[str, str], float]:
        """Return the unlikeness of every pair of clients' models."""
        return {(i, j): self.unlikeness(server, models[i], models[j]) for i, j in itertools.combinations(models, 2)}

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Keep the models that came, and observe how far apart they are."""
        super().reduce(server, updates)
        if self.sigma is None:
            server.state[self.key] |= self._observe(self._pairs(server, self.models(server)), len(server.clients))
        elif server.round == 0:
            self._warn_of_attention(list(self._pairs(server, self.models(server)).values()))
        return {}

    def _warn_of_attention(self, pairs: list[float]) -> None:
        """Warn where the clients' models differ, but their weights do not, or are all 0."""
        exponents = [value / self.sigma for value in pairs if value > 0 and self.sigma]
        if not exponents:
            return
        if max(exponents) < FLAT:
            warnings.warn(
                f"{self.key}(sigma={self.sigma:g}) counts all clients alike: their models' squared distances are "
                f"{min(pairs):.3g} to {max(pairs):.3g} after the first round. Leave sigma out to have it follow them.",
                stacklevel=2,
            )
        elif min(exponents) > GONE:
            warnings.warn(
                f"{self.key}(sigma={self.sigma:g}) lets no client listen to another: their models' squared distances are "
                f"{min(pairs):.3g} or more after the first round. Leave sigma out to have it follow them.",
                stacklevel=2,
            )

    def attention(self, server: Server, client: str, models: dict[str, State]) -> dict[str, float]:
        """Return row i of ``xi``, in client order.

        Args:
            server: The server; its round gives ``alpha_k``.
            client: Client i.
            models: Each client's model ``w_j``.
        """
        if self.sigma is None:
            seen = self.observed(server, models)
            sigma, step = seen["sigma"], seen["step"] * self.alpha_decay**server.round
        else:
            sigma, step = self.sigma, self.step_size(server) / self.sigma
        model = models[client]
        row = {j: step * math.exp(-self.unlikeness(server, w, model) / sigma) for j, w in models.items() if j != client}
        return {j: 1.0 - sum(row.values()) if j == client else row[j] for j in models}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ``u_i`` instead of a global model, and the strength of the pull."""
        message.extras[self.key] = {"pull": self.lam / self.step_size(server)}
        if job.client in server.clients:
            models = {client: select(state, message.state) for client, state in self.models(server).items()}
            row = self.attention(server, job.client, models)
            message.state = combine(models[job.client], [(max(row[j], 0.0), models[j]) for j in models])

    # -- client --------------------------------------------------------------------------------------------------------
    def _own(self, client: Client) -> State:
        """Return ``w_i`` as the client keeps it; empty before its first visit."""
        own_model: State = client.state.get(self.key, {}).get("w", {})
        return own_model

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
        if client.contributed:
            client.state[self.key] = {"w": clone(module_state(client.module, client.received), "cpu")}

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return ``w_i``. The mixture ``u_i`` is where training starts, not what is deployed."""
        if stage == "L2" or not self._own(client):
            return client.module
        module = client.copy_module()
        load_state(module, self._own(client))
        return module

"""pFedLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlightning.algorithm import Job, Message, Server, State, Update, isolated
from fedlightning.callbacks.shared.server_models import KeepsClientModels, combine, parameter_names
from fedlightning.layers import partition
from fedlightning.ranges import NonNegativeFloat, PositiveInt, make_init
from fedlightning.tensors import clone, module_state, select, widen


class HyperNetwork(nn.Module):
    """A learned vector, a perceptron, and for every layer of a model a row of weights over the clients; in float64.

    Args:
        embedding: Size of the learned input vector.
        hidden: Width of the perceptron's three layers.
        shape: ``(num_layers, num_clients)`` of the output.
        normalise: ``"softmax"``, or ``"relu"``: rectified and divided by their sum, even where all are zero.

    Example:
        >>> from fedlightning.callbacks.pfedla import HyperNetwork
        >>> alpha = HyperNetwork(4, 8, (2, 3), "softmax")()
        >>> alpha.shape, [round(total, 6) for total in alpha.sum(1).tolist()]
        (torch.Size([2, 3]), [1.0, 1.0])
    """

    def __init__(self, embedding: int, hidden: int, shape: tuple[int, int], normalise: str) -> None:
        super().__init__()
        self.normalise = normalise
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(embedding))
        self.body = nn.Sequential(
            *(nn.Linear(embedding, hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.ReLU()),
        )
        self.heads = nn.Linear(hidden, shape[0] * shape[1])
        if normalise == "relu":
            nn.init.ones_(self.heads.bias)
        self.double()

    def forward(self) -> Tensor:
        """Return weights of shape ``(num_layers, num_clients)`` whose rows sum to 1."""
        scores: Tensor = self.heads(self.body(self.embedding)).view(self.shape)
        if self.normalise == "softmax":
            return scores.softmax(dim=1)
        positive = scores.relu()
        total = positive.sum(dim=1, keepdim=True)
        even = torch.full_like(positive, 1.0 / self.shape[1])
        return torch.where(total > 0, positive / total.clamp_min(torch.finfo(total.dtype).tiny), even)


@make_init
class pFedLA(KeepsClientModels):
    """Layer-wise personalised aggregation whose weights a hypernetwork per client learns at the server.

    Ma, Zhang, Guo, Xu, "Layer-wised model aggregation for personalized federated learning", CVPR 2022.

    The server holds every client's last model ``theta_j`` and, per client i, a hypernetwork ``HN_i(e_i; psi_i)`` that
    gives ``alpha_i[l, j] >= 0`` with ``sum_j alpha_i[l, j] = 1``. In a round

    * the server sends ``thbar_i[l] = sum_j alpha_i[l, j] theta_j[l]`` for every layer l (:meth:`personalised`);
    * the client trains and sends its model, ``theta_i <- thbar_i + D``;
    * the server updates ``(e_i, psi_i) <- (e_i, psi_i) + eta_hn J' D`` with ``J = d thbar_i / d(e_i, psi_i)``
      (:meth:`gradient`).

    ``D`` (after minus before) points to where the client's loss falls, so the step is *added*: public code subtracts
    and ascends. ``J' D`` is the gradient of ``sum_l sum_j alpha_i[l, j] <theta_j[l], D[l]>``, so one number per layer
    and client is all that the hypernetwork needs of the models. Inner products are over trainable parameters, in
    float64. Running statistics are mixed with the weights of the layer they belong to. Integers, and buffers outside
    every layer, are the client's own.

    * Down: ``thbar_i``. Up: ``theta_i``.
    * State, all at the server: ``theta_j`` (O(N * model) memory) and N hypernetworks. Absent clients keep both. A
      client that never took part counts with ``w^0``.
    * Deployed: ``thbar_i`` (stage L1). There is no global model.

    Args:
        hn_lr: Learning rate ``eta_hn`` of the hypernetworks. Default 0.5 (measured). With the unofficial repository's 5e-3
            (PLayer-FL's: 0.01) weights hardly leave ``1/N``: digits over ten clients by Dirichlet(0.5), ten rounds, one
            seed, gave an accuracy of 0.855 against 0.890 (0.863 with 5). 0 keeps the first weights.
        embedding: Size of ``e_i``. Default 100.
        hidden: Width of the three-layer perceptron. Default 100.
        normalise: ``"softmax"`` (PLayer-FL's repository, default) or ``"relu"``: rectified and divided by their sum,
            even where all are zero (unofficial repository). Either way the first weights are near ``1/N``.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        Two layers and three clients: one row of weights per layer, near 1/3 at the start.

        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from fedlightning.callbacks import pFedLA
        >>> module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
        >>> server = SimpleNamespace(module=module, clients=["a", "b", "c"], state={},
        ...                          seed_of=lambda source: 0)
        >>> alpha = pFedLA().weights(server, "a")
        >>> alpha.shape, bool(((alpha - 1 / 3).abs() < 0.05).all())
        (torch.Size([2, 3]), True)
    """

    hn_lr: NonNegativeFloat = 0.5
    embedding: PositiveInt = 100
    hidden: PositiveInt = 100
    normalise: Literal["softmax", "relu"] = "softmax"

    @property
    def key(self) -> str:
        return "PFedLA" if type(self) is pFedLA else super().key  # names its state and addresses its random numbers

    # -- hypernetworks -------------------------------------------------------------------------------------------------
    def network(self, server: Server, client: str) -> HyperNetwork:
        """Return ``HN_i`` as it began: random weights, which differ between clients."""
        with isolated(server.seed_of("initialisation"), self.key, client):
            shape = len(layers_of(server)), len(server.clients)
            return HyperNetwork(self.embedding, self.hidden, shape, self.normalise)

    def psi(self, server: Server, client: str) -> State:
        """Return ``(e_i, psi_i)``."""
        stored: State | None = server.state.get(self.key, {}).get("psi", {}).get(client)
        return clone(module_state(self.network(server, client))) if stored is None else stored

    def weights(self, server: Server, client: str) -> Tensor:
        """Return ``alpha_i``, shape ``(num_layers, num_clients)``."""
        with torch.no_grad():
            return self.alpha(server, client, self.psi(server, client))

    def alpha(self, server: Server, client: str, psi: Mapping[str, Tensor]) -> Tensor:
        """Return ``HN_i(e_i; psi_i)``, shape ``(num_layers, num_clients)``, differentiable in ``psi``."""
        result: Tensor = functional_call(self.network(server, client), dict(psi), ())
        return result

    def rows(self, server: Server, client: str) -> Tensor:
        """Return the weights that make ``thbar_i``, shape ``(num_layers, num_clients)``."""
        return self.weights(server, client)

    # -- server --------------------------------------------------------------------------------------------------------
    def personalised(self, server: Server, client: str, models: Mapping[str, State]) -> State:
        """Return ``thbar_i``.

        Args:
            server: The server.
            client: Client i.
            models: Each client's model ``theta_j``, in client order.
        """
        mixed = dict(models[client])
        for layer, row in zip(layers_of(server), self.rows(server, client).tolist(), strict=True):
            layer_state = select(mixed, layer)
            parts = ((weight, select(model, layer)) for weight, model in zip(row, models.values(), strict=True))
            mixed |= combine(layer_state, parts)
        return mixed

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ``thbar_i`` instead of a global model."""
        if job.client in server.clients:
            message.state = select(self.personalised(server, job.client, self.models(server)), message.state)

    def gradient(self, server: Server, client: str, models: Mapping[str, State], trained: State) -> State:
        """Return ``J' D`` with respect to every entry of ``(e_i, psi_i)``.

        Args:
            server: The server.
            client: Client i.
            models: Each client's model ``theta_j`` at the start of the round, in client order.
            trained: The model that client i sent.
        """
        before = self.personalised(server, client, models)
        names = parameter_names(server, trained)
        change = {name: widen(trained[name]) - widen(before[name]) for name in names}
        layers = [[name for name in layer if name in change] for layer in layers_of(server)]
        inner = torch.tensor(
            [[_inner(w, change, layer) for w in models.values()] for layer in layers], dtype=torch.float64
        )
        psi = {name: value.requires_grad_() for name, value in clone(self.psi(server, client)).items()}
        with torch.enable_grad():
            objective = (self.alpha(server, client, psi) * inner)[self.mixed(server, client)].sum()
            return dict(zip(psi, torch.autograd.grad(objective, list(psi.values())), strict=True))

    def mixed(self, server: Server, client: str) -> list[int]:
        """Return the indices of the layers in which ``thbar_i`` depends on ``alpha_i``."""
        return list(range(len(layers_of(server))))

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Update every participant's hypernetwork from the models at the round's start, then set ``theta_i``."""
        models = self.models(server)
        psi = dict(server.state.get(self.key, {}).get("psi", {}))
        for update in updates:
            if update.contributed and update.state:
                slope = self.gradient(server, update.client, models, update.state)
                old = self.psi(server, update.client)
                psi[update.client] = {name: value + self.hn_lr * slope[name] for name, value in old.items()}
        super().reduce(server, updates)
        server.state[self.key]["psi"] = psi
        return {}


def _inner(model: State, change: State, names: list[str]) -> float:
    """Return the inner product of ``model`` and ``change`` over ``names``."""
    return sum(float((widen(model[name]) * change[name]).sum()) for name in names)


def layers_of(server: Server) -> list[list[str]]:
    """Return the state names of each layer. Names outside every layer are in none."""
    return [names for layer, names in partition(server.module).items() if layer]

"""HetLoRA: adapters of differing ranks, padded with zeros for the mean and truncated for each client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import Change, Client, Facts, Job, Message, Need, Server, State, Update, facts, requires
from fedlightning.callbacks.shared.low_rank import ClientRanks, Rank, truncated
from fedlightning.ranges import NonNegativeFloat, PositiveFloat, Range, ShareBelowOne
from fedlightning.tensors import WeightedMean
from fedlightning.wrappers.adapters import adapted_layers

BOTH_FACTORS = Need("weighs a client by the product of both factors of its adapters", (Change.PARTS,))
PRUNED_ROWS = Need("prunes rows, which must not come back", (Change.START,), "use gamma=1")


class HetLoRA(ClientRanks):
    r"""Low-rank adapters of differing ranks: padded with zeros for the mean, truncated for a client, pruned by clients.

    Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for federated fine-tuning of on-device foundation models", EMNLP 2024.

    * Down: the first `r_i` rows of `A` and columns of `B` (truncation), and the head.
    * Client: `W x + s B_i A_i x` with the frozen network, and *rank self-pruning*: with `k = floor(gamma r_i)` the loss has
      the term `lam ||B_i[:, k:]|| ||A_i[k:]||`, summed over the layers. If that sum of products is smaller after training
      than it was in what came, the client's rank is `k` from now on.
    * Up: `A_i, B_i` at that rank, and the head.
    * Server: pads the factors with zeros to the largest rank and averages each by itself, as :class:`FedIT`, with weights
      proportional to `||B_i A_i||_F` over all layers (where all are zero: uniform).
    * State: the server keeps the ranks of clients that have pruned. A client's module keeps the rank that it began with;
      rows that were pruned are zero, and stay zero in training.
    * Deployed: each client the network with its first `r_i` rows; the server's model has all rows.

    The scale `s = alpha / max r` is one for all clients, so that padding and truncating change no adapter. Adapters need
    `peft` (`pip install peft`).

    Args:
        r: Rank for all, a list dealt to the clients in turn, or a table by client. Default `(16, 8, 4)`.
        alpha: Scale; a layer's change counts `alpha` over the largest rank. Default 16.
        gamma: Share of its rank that a client keeps when it prunes, in (0, 1]. Default 0.99, with which one row goes at a
            time. 1: no pruning.
        lam: Strength of the term on the rows that are to go. Default 0.01.
        dropout: Dropout on the adapters' input. Default 0.05, as :class:`FedIT`.
        target_modules: Paths of `nn.Linear` layers, or ends of paths. `None` (default): every linear layer outside the head.
        head: Names of entries or modules that train in full and travel, such as a new classifier (`"net.fc"`).
        weighting: `"norm"` of the client's change (paper, default), `"samples"`, `"uniform"` or `"log"`.

    Raises:
        ValueError: If a rank is less than 1, `alpha` is not positive, `dropout` is outside [0, 1), `gamma` outside (0, 1] or
            `lam` negative.

    Example:
        >>> from fedlightning.callbacks import HetLoRA
        >>> method = HetLoRA(r=[8, 4], alpha=8)
        >>> method.size(), method.pruned(8), method.pruned(1)
        ((8, 8), 7, 1)
    """

    @property
    def prunes(self) -> bool:
        """Whether clients may lose rows."""
        return self.gamma < 1.0

    @property
    def facts(self) -> Facts:
        """Clients have adapters of their own ranks, which are pruned where gamma is below 1."""
        needs = [facts.WHOLE_MODELS_OF_CLIENTS, BOTH_FACTORS, *([PRUNED_ROWS] if self.prunes else [])]
        fresh = requires.FreshOptimizers("prunes ranks", "Use optimizer_state='reset', or gamma=1.", when="prunes")
        return super().facts.extend(changes={Change.SMALLER}, needs=needs, requires=[fresh])

    def __init__(
        self,
        r: Rank | Sequence[Rank] | dict[str, Rank] = (16, 8, 4),
        alpha: PositiveFloat = 16,
        gamma: Annotated[float, Range("(0, 1]", "1 prunes nothing.")] = 0.99,
        lam: NonNegativeFloat = 0.01,
        dropout: ShareBelowOne = 0.05,
        target_modules: list[str] | None = None,
        head: str | list[str] | None = None,
        weighting: Literal["norm", "samples", "uniform", "log"] = "norm",
    ) -> None:
        self.refuse_empty(r=r)
        super().__init__(r, dropout, target_modules, head, norm_of_change if weighting == "norm" else weighting)
        self.alpha = alpha
        self.gamma = gamma
        self.lam = lam

    def hyperparameters(self) -> dict[str, Any]:
        """Return the arguments, with the weighting by its name."""
        options = super().hyperparameters()
        return {**options, "weighting": "norm" if callable(options["weighting"]) else options["weighting"]}

    def claims(self, name: str) -> bool:
        """Decline the term in the loss where there is none."""
        return super().claims(name) and not (name == "training_loss" and (self.gamma == 1.0 or self.lam == 0.0))

    def size(self) -> tuple[int, float]:
        """Return the largest rank, and alpha."""
        return self.largest, self.alpha

    def pruned(self, rank: int) -> int:
        """Return the rank that is left after pruning: at least 1."""
        return max(1, math.floor(self.gamma * rank))

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Refuse adapters of which one factor travels and the other one stays.

        Raises:
            ValueError: Naming the layer.
        """
        travels = set(server.shared_names())
        for path, layer in adapted_layers(server.module).items():
            if (layer.a in travels) != (layer.b in travels):
                stays = layer.a if layer.b in travels else layer.b
                raise ValueError(
                    f"'{stays}' stays at the clients, but {self.key} cuts, weighs and prunes both factors of '{path}' "
                    f"together. Name the whole layer among what stays ('{path}'), or none of it."
                )

    # -- a round -------------------------------------------------------------------------------------------------------
    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Truncate the adapters to the client's present rank."""
        super().on_broadcast(server, job, message)
        rank = message.extras[self.key]["rank"]
        rank = server.state.get(self.key, {}).get("ranks", {}).get(job.client, rank)
        message.state = truncated(message.state, adapted_layers(server.module).values(), rank)

    def on_receive(self, client: Client, message: Message) -> None:
        """Pad the adapters with zeros to the rank that the client began with."""
        layers = [layer for layer in adapted_layers(client.module).values() if layer.a in message.state]
        if not layers:  # private ones are as the client left them
            return
        client.scratch[self.key] = {"rank": len(message.state[layers[0].a]), "layers": layers}
        now = client.entries
        came = {
            name: padded(message.state[name], now[name])
            for layer in layers
            for name in (*layer.every_a, *layer.every_b)
        }
        message.state |= came
        client.received |= came  # what terms in the gradient, as FedProx's, pull to

    def on_visit_start(self, client: Client) -> None:
        """Measure the rows that pruning would take away."""
        visit = client.scratch.get(self.key)
        if visit is not None:
            visit["norm"] = float(self._tail(visit, client.entries))

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss with `lam` times the norms of the rows that pruning would take away."""
        visit = client.scratch.get(self.key)
        if visit is None:
            return loss
        names = [name for layer in visit["layers"] for name in (layer.a, layer.b)]
        return loss + self.lam * self._tail(visit, {name: module.get_parameter(name) for name in names})

    def _tail(self, visit: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
        """Return `sum ||B[:, k:]|| ||A[k:]||` over the layers."""
        kept, norm = self.pruned(visit["rank"]), torch.linalg.vector_norm
        tails = [(state[layer.b][:, kept:], state[layer.a][kept:]) for layer in visit["layers"]]  # pruned rows are zero
        return torch.stack([norm(b) * norm(a) for b, a in tails]).sum()

    def on_send(self, client: Client, update: Update) -> None:
        """Prune if the rows that would go have become smaller, and send what is left."""
        visit = client.scratch.get(self.key)
        if visit is None or not update.state:
            return
        rank = visit["rank"]
        if client.contributed and float(self._tail(visit, client.entries)) < visit["norm"]:
            rank = self.pruned(rank)
        update.state = truncated(update.state, visit["layers"], rank)

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse factors that do not fit each other."""
        for path, layer in adapted_layers(server.module).items():
            if layer.a in update.state and len(update.state[layer.a]) != update.state[layer.b].shape[1]:
                raise ValueError(f"the two factors of '{path}' have different ranks")

    def on_update(self, server: Server, update: Update) -> None:
        """Note the rank of a client that has pruned."""
        rank = next(
            (len(update.state[x.a]) for x in adapted_layers(server.module).values() if x.a in update.state), None
        )
        if rank is not None and rank < self.rank_of(server, update.client):
            ranks = server.state.get(self.key, {}).get("ranks", {})
            server.state[self.key] = {"ranks": {**ranks, update.client: rank}}

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the weighted mean of the padded factors, and of the head."""
        weights = [server.weight(update) for update in updates]
        if not any(weights):  # no adapter has moved
            weights = [float(bool(update.contributed)) for update in updates]
        mean = WeightedMean()
        for update, weight in zip(updates, weights, strict=True):
            mean.add({name: padded(value, server.model[name]) for name, value in update.state.items()}, weight)
        return mean.result()


def padded(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` with zeros behind it, in the shape of `like`.

    Example:
        >>> padded(torch.ones(1, 2), torch.empty(2, 2))
        tensor([[1., 1.],
                [0., 0.]])
    """
    if value.shape == like.shape:
        return value
    whole = value.new_zeros(like.shape)
    whole[tuple(slice(size) for size in value.shape)] = value
    return whole


def norm_of_change(server: Server, update: Update) -> float:
    """Return `||B_i A_i||_F` over all adapted layers: the root of the sum of `<B'B, AA'>`."""
    total = 0.0
    for layer in adapted_layers(server.module).values():
        if layer.a in update.state:
            a, b = update.state[layer.a].double(), update.state[layer.b].double()
            total += float((b.T @ b * (a @ a.T)).sum())
    return math.sqrt(max(total, 0.0))

"""FedALA."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    Message,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    clone,
    equal,
    head_names,
    load_state,
    module_state,
    select,
)


class FedALA(FederatedCallback):
    r"""Adaptive local aggregation: clients learn, element by element, how much of the global head they take.

    Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: adaptive local aggregation for personalized federated learning",
    AAAI 2023.

    Down: ``Th``. Up: ``w_i``; the server averages as in FedAvg. State at each client: ``th`` (the top layers as it
    trained them last) and ``W`` in [0, 1], of their shape. Before training (stage L1), lower layers are ``Th``'s; for
    the top p layers

    * ``th^ = th + (Th - th) * W``;
    * on batches of a random part of the local data: ``W <- clip(W - eta_W grad_th^ L * (Th - th), 0, 1)``.

    The first time ``W`` is learned until the losses of the last 10 passes have a standard deviation below 0.1, later in
    one pass. A client that has not trained yet, or whose top layers equal ``Th``'s in every element, takes ``Th`` as it
    is. Absent clients keep ``th`` and ``W``. Looking at a client (evaluation) learns ``W`` on a copy. Gradients are
    taken in eval mode: no dropout, running statistics of ``Th``. Buffers are ``Th``'s.

    Args:
        num_layers: p, the top layers that are merged (paper: 1), norms belonging to the layer before them.
        fraction: share of the local batches in one pass (paper: s = 80 %), drawn anew for every pass.
        weight_lr: ``eta_W`` (paper: 1.0). 0 is FedAvg.
        start: where ``W`` begins (paper: 1). With ``weight_lr=0`` and 0, clients keep their top layers.
        max_passes: limit of the first time (ours; the authors have none).
        weighting: ``"samples"`` (paper) or ``"uniform"``.
    """

    def __init__(
        self,
        num_layers: int = 1,
        fraction: float = 0.8,
        weight_lr: float = 1.0,
        start: float = 1.0,
        max_passes: int = 50,
        weighting: WeightingName | None = None,
    ) -> None:
        if num_layers < 1:
            raise ValueError(f"FedALA got num_layers={num_layers}. Merge at least the last layer, or use FedAvg().")
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"FedALA got fraction={fraction}; a share of the local data must be in (0, 1].")
        if weight_lr < 0 or not 0.0 <= start <= 1.0:
            raise ValueError(f"FedALA got weight_lr={weight_lr}, start={start}. Use a rate >= 0 and a start in [0, 1].")
        if max_passes < 1:
            raise ValueError(f"FedALA got max_passes={max_passes}. Learning W needs at least one pass.")
        self.num_layers = num_layers
        self.fraction = fraction
        self.weight_lr = weight_lr
        self.start = start
        self.max_passes = max_passes
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse more layers than there are, and top layers without a trainable parameter."""
        if not self._merged(setup.module):
            raise ValueError(
                f"FedALA merges the last {self.num_layers} layer(s) of {type(setup.template).__name__}, "
                "in which nothing trains. Raise num_layers."
            )

    def on_federation_start(self, server: Server) -> None:
        """Refuse top layers that do not travel: there is nothing to merge with."""
        if not set(self._merged(server.module)) & set(server.shared_names()):
            raise ValueError(
                f"FedALA merges the last {self.num_layers} layer(s), but other callbacks keep them with the clients. "
                "Raise num_layers, or remove one of the two."
            )

    def _merged(self, module: LightningModule) -> list[str]:
        """Trainable parameters of the top p layers, each once."""
        top = set(head_names(module, self.num_layers))
        return [name for name, parameter in module.named_parameters() if name in top and parameter.requires_grad]

    def on_receive(self, client: Client, message: Message) -> None:
        """L1: learn ``W``, merge."""
        kept = client.state.get(self.key)
        if kept is None:
            return
        own = select(kept["th"], message.state)
        sent = select(message.state, own)
        if equal(own, sent):
            return
        learner = _Weights(client, self, message.state, own, kept.get("W"))
        if self.weight_lr > 0:
            learner.learn(self.max_passes if "W" not in kept else 1)
        message.state = message.state | clone(learner.merged(), "cpu")
        client.state[self.key] = {**kept, "W": clone(learner.weights, "cpu")}

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``th`` for the next merge."""
        if client.steps:
            th = module_state(client.module, self._merged(client.module))
            client.state[self.key] = {**client.state.get(self.key, {}), "th": clone(th, "cpu")}


class _Weights:
    """``W`` while it is learned, on the device, in a copy of the client's module."""

    def __init__(self, client: Client, options: FedALA, received: State, own: State, weights: State | None) -> None:
        self.client, self.options = client, options
        self.module = client.copy_module().to(client.device).eval()
        load_state(self.module, received)
        self.own = clone(own, client.device)
        self.sent = clone(select(received, own), client.device)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in own)
        start = {name: torch.full_like(th, options.start, dtype=_wide(th)) for name, th in self.own.items()}
        self.weights = start | clone(weights or {}, client.device)

    def merged(self) -> State:
        """``th + (Th - th) * W``: exactly ``Th`` at 1 and exactly ``th`` at 0."""
        return {
            name: torch.lerp(th.to(_wide(th)), self.sent[name].to(_wide(th)), self.weights[name]).to(th.dtype)
            for name, th in self.own.items()
        }

    def learn(self, passes: int) -> None:
        """Passes over random parts of the data until the loss settles."""
        losses: list[float] = []
        for _ in range(passes):
            losses.append(statistics.fmean(self.one_pass()))
            if len(losses) > PASSES_COMPARED and statistics.pstdev(losses[-PASSES_COMPARED:]) < SETTLED:
                return

    def one_pass(self) -> Iterator[float]:
        """``W <- clip(W - eta_W grad * (Th - th), 0, 1)`` for each batch."""
        loader = self.client.loader("train")
        assert loader is not None
        for _ in range(max(1, round(self.options.fraction * len(loader)))):
            load_state(self.module, self.merged())
            batch = self.client.next_batch(self.options.key, self.module)
            loss, gradients = self.client.batch_gradient(batch, self.module)
            for name, gradient in gradients.items():
                step = gradient.to(_wide(gradient)) * (self.sent[name] - self.own[name])
                self.weights[name] = (self.weights[name] - self.options.weight_lr * step).clamp(0.0, 1.0)
            yield float(loss)


PASSES_COMPARED, SETTLED = 10, 0.1
"""The authors' stopping rule for the first time."""


def _wide(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)

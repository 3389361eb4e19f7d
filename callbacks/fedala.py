"""FedALA."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Annotated

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    FederatedCallback,
    Message,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    requires,
    warn,
)
from fedlightning.layers import head_names
from fedlightning.ranges import NonNegativeFloat, PositiveInt, PositiveShare, Range, Share, make_init
from fedlightning.tensors import as_reals, clone, equal, load_state, module_state, narrow, select


@make_init
class FedALA(FederatedCallback):
    """Adaptive local aggregation: clients learn, element by element, how much of the global head they take.

    Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: adaptive local aggregation for personalized federated learning",
    AAAI 2023.

    Before training (stage L1) the lower layers are those of the global model ``Th``. The top p layers ``th`` are merged
    (:func:`merge`) with learned weights ``W`` in [0, 1]:

    * ``th^ = th + (Th - th) * W``;
    * on batches of a random part of the local data: ``W <- clip(W - eta_W grad_th^ L * (Th - th), 0, 1)``.

    The first time ``W`` is learned until the losses of the last 10 passes have a standard deviation below 0.1, later in
    one pass. Gradients are taken in eval mode, without dropout and at the running statistics of ``Th``.

    * Down: ``Th``. Up: ``w_i``, which the server averages as in FedAvg.
    * State at each client: ``th``, the top layers as it trained them last, and ``W`` of their shape. Absent clients
      keep both.
    * Deployed: the merged model. The global model is ``Th``.

    A client takes ``Th`` as it is if it has not trained yet or its top layers equal ``Th``'s in every element. Buffers
    are ``Th``'s. Evaluation learns ``W`` on a copy.

    Args:
        num_layers: p, the top layers that are merged. Default 1 (paper). Norms belong to the layer before them.
        fraction: Share of the local batches in one pass, drawn anew for every pass. Default 0.8 (paper: s = 80 %).
        weight_lr: ``eta_W``. Default 1.0 (paper). 0 is FedAvg.
        start: Value with which ``W`` begins. Default 1 (paper). With ``weight_lr=0`` and ``start=0`` clients keep their
            top layers.
        max_passes: Limit of the passes in a client's first learning. Default 50 (ours; the authors have none).
        weighting: ``"samples"`` (paper, default) or ``"uniform"``.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks.fedala import merge
        >>> th, sent = {"w": torch.tensor([1.0, 1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0, 3.0])}
        >>> merge(th, sent, {"w": torch.tensor([0.0, 0.5, 1.0])})["w"]
        tensor([1., 2., 3.])
    """

    facts = Facts(
        changes={Change.START, Change.READS},
        requires=[
            requires.AutomaticOptimization(
                "learns W from the loss that training_step returns", "Use automatic optimization, or FLIU."
            )
        ],
    )

    num_layers: Annotated[int, Range("[1, inf)", "FedAvg() merges none.")] = 1
    fraction: PositiveShare = 0.8
    weight_lr: NonNegativeFloat = 1.0
    start: Share = 1.0
    max_passes: PositiveInt = 50
    weighting: WeightingName | None = None

    def check(self, setup: Setup) -> None:
        """Refuse more layers than there are, and top layers without a trainable parameter.

        Raises:
            ValueError: If nothing in the top layers can be merged, or the module optimizes manually.
        """
        if not self._merged(setup.module):
            raise ValueError(
                f"FedALA merges the last {self.num_layers} layer(s) of {type(setup.template).__name__}, "
                "in which nothing trains. Raise num_layers."
            )

    def on_federation_start(self, server: Server) -> None:
        """Refuse top layers that do not travel: there is nothing to merge with.

        Raises:
            ValueError: If other callbacks keep the top layers with the clients.
        """
        if not set(self._merged(server.module)) & set(server.shared_names()):
            raise ValueError(
                f"FedALA merges the last {self.num_layers} layer(s), but other callbacks keep them with the clients. "
                "Raise num_layers, or remove one of the two."
            )

    def on_round_start(self, server: Server) -> None:
        """Warn if the top layers have stopped travelling: round 1 may decide what does."""
        if server.round == 1 and not set(self._merged(server.module)) & set(server.shared_names()):
            warn(
                f"FedALA merges the last {self.num_layers} layer(s), and from round 2 other callbacks keep them with the "
                "clients: it changes nothing. Raise num_layers, or remove one of the two."
            )

    def _merged(self, module: LightningModule) -> list[str]:
        """Return the names of the top layers' trainable parameters, each once."""
        top = set(head_names(module, self.num_layers))
        return [name for name, parameter in module.named_parameters() if name in top and parameter.requires_grad]

    def on_receive(self, client: Client, message: Message) -> None:
        """Learn ``W`` and merge the received top layers with the client's own (stage L1)."""
        kept = client.state.get(self.key)
        if kept is None:
            return
        local = select(kept["th"], message.state)
        sent = select(message.state, local)
        if equal(local, sent):
            return
        learner = _Weights(client, self, message.state, local, kept.get("W"))
        if self.weight_lr > 0:
            learner.learn(self.max_passes if "W" not in kept else 1)
        message.state = message.state | clone(
            merge(learner.local_state, learner.received_state, learner.weights), "cpu"
        )
        client.state[self.key] = {**kept, "W": clone(learner.weights, "cpu")}

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``th`` for the next merge."""
        if client.contributed:
            th = module_state(client.module, self._merged(client.module))
            client.state[self.key] = {**client.state.get(self.key, {}), "th": clone(th, "cpu")}


def merge(local: State, sent: State, weights: State) -> State:
    """Return ``th + (Th - th) * W`` for every entry: exactly ``Th`` at 1 and exactly ``th`` at 0."""
    return {name: narrow(torch.lerp(_wide(th), _wide(sent[name]), weights[name]), th) for name, th in local.items()}


class _Weights:
    """``W`` while it is learned, on the device, in a copy of the client's module."""

    def __init__(self, client: Client, options: FedALA, received: State, local: State, weights: State | None) -> None:
        self.client, self.options = client, options
        self.module = client.copy_module().to(client.device).eval()
        load_state(self.module, received)
        self.local_state = clone(local, client.device)
        self.received_state = clone(select(received, local), client.device)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in local)
        start = {name: torch.full_like(_wide(th), options.start) for name, th in self.local_state.items()}
        self.weights = start | clone(weights or {}, client.device)

    def learn(self, passes: int) -> None:
        """Go over random parts of the data until the loss settles, ``passes`` times at most."""
        losses: list[float] = []
        for _ in range(passes):
            losses.append(statistics.fmean(self.one_pass()))
            if len(losses) > PASSES_COMPARED and statistics.pstdev(losses[-PASSES_COMPARED:]) < SETTLED:
                return

    def one_pass(self) -> Iterator[float]:
        """Update ``W <- clip(W - eta_W grad * (Th - th), 0, 1)`` for each batch, and yield the batch's loss."""
        loader = self.client.loader("train")
        assert loader is not None
        for _ in range(max(1, round(self.options.fraction * len(loader)))):
            load_state(self.module, merge(self.local_state, self.received_state, self.weights))
            batch = self.client.next_batch(self.options.key, self.module)
            loss, gradients = self.client.batch_gradient(batch, self.module)
            for name, gradient in gradients.items():
                step = _wide(gradient) * as_reals(self.received_state[name] - self.local_state[name])
                self.weights[name] = (self.weights[name] - self.options.weight_lr * step).clamp(0.0, 1.0)
            yield float(loss)


PASSES_COMPARED, SETTLED = 10, 0.1
"""The authors' stopping rule for the first time."""


def _wide(value: Tensor) -> Tensor:
    """Return the real numbers of an entry in fp32 at least."""
    numbers = as_reals(value)
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))

"""FedBABU."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import Client, Phase, Server, Setup, WeightingName
from fedlightning.callbacks.local_adaptation import AdaptsAtEnd, Part
from fedlightning.callbacks.partial import other_names, part_names, refuse_no_body


class FedBABU(AdaptsAtEnd):
    """Body aggregation and body update: only the body is trained, under a fixed random head; fine-tuning comes last.

    Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022.

    Up and down: the body ``u``. The head stays at the initial ``v^0``, the same on every client, for the whole
    federation: it gets no gradient, so neither momentum nor weight decay moves it. Server: ``u = mean_i(u_i)``. State:
    none until the end. After the last round each client fine-tunes a copy of ``(u, v^0)``, where there is a
    GlobalCheckpoint the one it selected, and deploys it; the global model is ``(u, v^0)``.

    Args:
        head: names or module prefixes of the head; or
        num_layers: the last K layers are the head; used when ``head`` is ``None``.
        epochs: epochs of fine-tuning after the last round (authors: 5); 0: the global model is deployed.
        part: what is fine-tuned: ``"all"`` (authors), ``"head"`` or ``"body"``.
        lr_factor: factor on the module's learning rate in fine-tuning (authors: 1e-3 after training that began at 0.1).
            Features that grew under a fixed head make the head's gradients large: with 1 fine-tuning can diverge.
        weighting: ``"uniform"`` (authors) or ``"samples"``.
    """

    def __init__(
        self,
        head: list[str] | None = None,
        num_layers: int = 1,
        epochs: int = 5,
        part: Part = "all",
        lr_factor: float = 0.01,
        weighting: WeightingName = "uniform",
    ) -> None:
        self._set(epochs, part, head, num_layers, lr_factor)
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse names that are not there, and a head that is everything."""
        refuse_no_body(self, setup, part_names(setup.module, self.head, self.num_layers))
        super().check(setup)

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """The body."""
        return other_names(module, part_names(module, self.head, self.num_layers))

    def federated_phases(self, client: Client) -> Iterable[Phase]:
        """Train the body only."""
        head = part_names(client.module, self.head, self.num_layers)
        yield Phase(train=tuple(other_names(client.module, head)))

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """``(u, v^0)``; none where other methods keep parts of the body at home."""
        travels = set(server.shared_names(without=self))
        return server.module_with(server.model) if travels >= set(server.kinds) else None

"""FedBABU."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import Client, Phase, Server, ServerModels, WeightingName, requires
from fedlightning.callbacks.local_adaptation import AdaptsAtEnd, Part
from fedlightning.callbacks.partial import Body, other_names, part_names
from fedlightning.ranges import NonNegativeInt, PositiveFloat, PositiveInt, at_most_one, make_init


@at_most_one("head", "num_layers", why="it counts the layers where none are named. Use one of them.")
@make_init
class FedBABU(AdaptsAtEnd, ServerModels):
    """Body aggregation and body update: only the body trains, under a fixed random head; fine-tuning comes last.

    Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022.

    * Client: local training of the body ``u``. The head stays at the initial ``v^0``, the same on every client, for the
      whole federation: it gets no gradient, so neither momentum nor weight decay moves it.
    * Server: ``u = mean_i(u_i)``.
    * After the last round each client fine-tunes a copy of ``(u, v^0)``; where there is a :class:`GlobalCheckpoint`, of
      the model that it selected.
    * Down: ``u``. Up: ``u_i``. State: none until the end, then the fine-tuned copy.
    * Deployed: the fine-tuned copy. The global model is ``(u, v^0)``.

    With few rounds the body stays weak. Validation accuracy on digits (a CNN) and FashionMNIST (an MLP) over ten clients by
    Dirichlet(0.5), ten rounds, three seeds: 0.738 and 0.849 at the defaults, 0.709 and 0.827 with the authors' five epochs
    (Local: 0.787 and 0.797).

    Args:
        head: Name or names of the head's entries or modules. ``None`` (default): the last ``num_layers`` layers.
        num_layers: Number of layers in the head, used where ``head`` is ``None``. Default 1.
        epochs: Epochs of fine-tuning after the last round. Default 20 (measured; authors: 5). 0: the global model
            is deployed.
        part: What is fine-tuned: ``"all"`` (authors, default), ``"head"`` or ``"body"``.
        lr_factor: Factor on the module's learning rate in fine-tuning. Default 0.01 (authors: 1e-3 after training that
            began at 0.1). Features that grew under a fixed head make the head's gradients large, so fine-tuning can
            diverge with more: at 0.03 it did for one of thirty clients.
        weighting: ``"uniform"`` (authors, default) or ``"samples"``.

    Raises:
        ValueError: If ``epochs`` is negative, ``lr_factor`` is not positive or ``part`` is unknown.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedBABU
        >>> FedBABU().shared_names(None, nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)))
        ['0.weight', '0.bias']
    """

    facts = AdaptsAtEnd.facts.extend(
        requires=[
            Body(of="head_names"),
            requires.SomethingTrains("", "Name another head, or use Local().", "body_names"),
        ]
    )

    head: str | list[str] | None = None
    num_layers: PositiveInt = 1
    epochs: NonNegativeInt = 20
    part: Part = "all"
    lr_factor: PositiveFloat = 0.01
    weighting: WeightingName | None = "uniform"

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of the body."""
        return self.body_names(module)

    def head_names(self, module: nn.Module) -> list[str]:
        """Return the names of the head."""
        return part_names(module, self.head, self.num_layers)

    def body_names(self, module: nn.Module) -> list[str]:
        """Return the names of the body."""
        return other_names(module, self.head_names(module))

    def federated_phases(self, client: Client) -> Iterable[Phase]:
        """Train the body only."""
        yield Phase(train=tuple(self.body_names(client.module)))

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return ``(u, v^0)``, or ``None`` where other methods keep parts of the body with the clients."""
        travels = set(server.shared_names(without=self))
        return server.module_with(server.model) if travels >= set(server.kinds) else None

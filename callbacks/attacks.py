"""Attacks of clients, for research on robust aggregation: never beside real sites."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.algorithm import (
    Client,
    Facts,
    FederatedCallback,
    Newcomers,
    Range,
    Server,
    Setup,
    TrainingData,
    Update,
)

Positive = Annotated[float, Range("(0, inf)")]


class Attack(FederatedCallback):
    """Base of attacks: some clients train as all do, and send something else.

    Give one to a trainer beside a rule of aggregation. It changes what travels of the model's trainable entries, and nothing
    else; what the clients keep stays honest. At real sites it is refused.

    Args:
        clients: The bad clients' ids.
    """

    rank = 100  # after everybody else has made the honest update
    facts = Facts(mixes_architectures=True, asynchronous=True, newcomers=Newcomers(join=True))

    def __init__(self, clients: Sequence[str | int]) -> None:
        self.clients = [str(client) for client in clients]

    @abstractmethod
    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return what takes the place of the change of an entry.

        Args:
            client: The bad client.
            change: The honest change, float64.
            name: The entry.
        """

    def check(self, setup: Setup) -> None:
        """Refuse clients that there are not.

        Raises:
            ValueError: Naming one.
        """
        unknown = [client for client in self.clients if client not in set(map(str, setup.clients))]
        if unknown:
            raise ValueError(
                f"{self.key} is to be made by client '{unknown[0]}', who is not among {list(setup.clients)[:20]}."
            )

    def on_federation_start(self, server: Server) -> None:
        """Refuse real sites.

        Raises:
            ValueError: Always, if there are sites.
        """
        if server.sites:
            raise ValueError(f"{self.key} is an attack for simulations, and these clients are at sites. Remove it.")

    def on_round_start(self, server: Server) -> None:
        """Refuse real sites in a run that goes on with another configuration too."""
        self.on_federation_start(server)

    def on_send(self, client: Client, update: Update) -> None:
        """Put the attack in the place of the honest change."""
        if client.id not in self.clients or client.evaluating:
            return
        trainable = {name for name, parameter in client.module.named_parameters() if parameter.requires_grad}
        for name in sorted(trainable & update.state.keys() & client.received.keys()):
            sent, value = client.received[name].double(), update.state[name]
            bad = sent + self.attacked(client, value.double() - sent, name)
            update.state[name] = bad.to(value.dtype)


class SignFlip(Attack):
    """Bad clients send the opposite of their change: ``-scale (w_i - w)``.

    Args:
        clients: The bad clients' ids.
        scale: How much longer than the honest change it is. Default 1.

    Example:
        >>> SignFlip(clients=[3], scale=2.0).attacked(None, torch.ones(1), "w")
        tensor([-2.])
    """

    def __init__(self, clients: Sequence[str | int], scale: Positive = 1.0) -> None:
        super().__init__(clients)
        self.scale = scale

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return the opposite."""
        return -self.scale * change


class ModelReplacement(Attack):
    """Bad clients send ``scale (w_i - w)``, so that a mean over ``scale`` clients becomes their own model.

    Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated learning", AISTATS 2020 (arXiv:1807.00459).

    Args:
        clients: The bad clients' ids.
        scale: Usually the number of participants over the number of bad clients. Default 10.

    Example:
        >>> ModelReplacement(clients=[3], scale=4.0).attacked(None, torch.ones(1), "w")
        tensor([4.])
    """

    def __init__(self, clients: Sequence[str | int], scale: Positive = 10.0) -> None:
        super().__init__(clients)
        self.scale = scale

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return the change, scaled."""
        return self.scale * change


class GaussianAttack(Attack):
    """Bad clients send Gaussian noise in the place of their change.

    Args:
        clients: The bad clients' ids.
        std: Its standard deviation, for every number. Default 1.
    """

    def __init__(self, clients: Sequence[str | int], std: Positive = 1.0) -> None:
        super().__init__(clients)
        self.std = std

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return noise from an address of its own, so that a resumed run attacks alike."""
        draws = client.rng(f"attack {name}")
        return self.std * torch.randn(change.shape, generator=draws, dtype=torch.float64)


class LabelFlip(TrainingData):
    """Bad clients train on wrong labels: class ``y`` as class ``classes - 1 - y``; all else they do as everybody does.

    Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust federated learning", USENIX Security 2020
    (arXiv:1911.11815), section 6. Their own scores are on their true labels.

    Args:
        clients: The bad clients' ids.
        classes: Number of classes.

    Example:
        >>> LabelFlip(clients=[3], classes=10).flipped((torch.zeros(2, 4), torch.tensor([0, 7])))[1]
        tensor([9, 2])
    """

    facts = Facts(mixes_architectures=True, asynchronous=True, newcomers=Newcomers(join=True))
    check, on_federation_start, on_round_start = Attack.check, Attack.on_federation_start, Attack.on_round_start

    def __init__(self, clients: Sequence[str | int], classes: Annotated[int, Range("[2, inf)")]) -> None:
        self.clients = [str(client) for client in clients]
        self.classes = classes

    def flipped(self, batch: Any) -> Any:
        """Return a batch ``(x, y, ...)`` with other labels.

        Raises:
            ValueError: If it has no labels, or others than the classes.
        """
        labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not bool((labels < self.classes).all()):
            raise ValueError(
                f"LabelFlip(classes={self.classes}) needs batches (x, y) with y from 0 to {self.classes - 1}."
            )
        return [batch[0], self.classes - 1 - labels, *batch[2:]]

    def training_batches(self, client: Client, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader of a bad client with other labels, in the same order."""
        if client.id not in self.clients:
            return loader
        bad, collate = copy.copy(loader), loader.collate_fn
        bad.collate_fn = lambda samples: self.flipped(collate(samples))
        return bad

"""The work that all contestants do in the benchmarks, and the hand-written loop that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """McMahan et al.'s MNIST network: two 5x5 convolutions and two linear layers, 1.66 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(7 * 7 * 64, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


def small_cnn() -> nn.Module:
    """Return a network of two 5x5 convolutions and a linear layer, 13 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def mlp() -> nn.Module:
    """Return a network 784-32-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def logistic() -> nn.Module:
    """Return a logistic regression 784-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


@dataclass(frozen=True)
class Work:
    """A federation to be trained by plain SGD.

    Attributes:
        make: Function that makes the network.
        sizes: Number of training samples of each client.
        batch: Number of samples in a step.
        lr: Learning rate.
        participants: Number of clients in a round. `None` takes all.
        shape: Shape of an image.
        epochs: Number of local epochs a round, in `benchmarks.gpu` alone; elsewhere it is one.
    """

    make: Callable[[], nn.Module]
    sizes: tuple[int, ...]
    batch: int = 50
    lr: float = 0.05
    participants: int | None = None
    shape: tuple[int, ...] = (1, 28, 28)
    epochs: int = 1

    @property
    def steps(self) -> int:
        """Number of optimizer steps of a round with all clients."""
        return sum(-(-size // self.batch) for size in self.sizes)

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Return each client's images `(n, *shape)` and labels `(n,)`, the same for every contestant."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(self.sizes), *self.shape, generator=generator)  # clients share images: only time matters
        y = torch.randint(0, 10, (max(self.sizes),), generator=generator)
        return [(x[:size], y[:size]) for size in self.sizes]


def unequal(clients: int, total: int) -> tuple[int, ...]:
    """Return sizes in the ratio 1 : 2 : ... : clients that sum to about `total`."""
    unit = total / (clients * (clients + 1) / 2)
    return tuple(max(1, round(unit * (index + 1))) for index in range(clients))


WORKS: dict[str, Work] = {
    "cnn": Work(CNN, (600,) * 20),
    "mlp": Work(mlp, (600,) * 20),
    "logistic": Work(logistic, (600,) * 100),
    "sampled": Work(mlp, (600,) * 1000, participants=10),
    "device_logistic": Work(logistic, (100,) * 1000, batch=10, participants=10),
    "flute": Work(logistic, (69,) * 1000, batch=10, lr=0.03, participants=10),
    "flute_cnn": Work(small_cnn, (69,) * 1000, batch=10, lr=0.03, participants=10),
    "device_cnn": Work(small_cnn, (100,) * 1000, batch=10, participants=10),
    "unequal": Work(mlp, unequal(20, 12_000)),
    "cnn100": Work(CNN, (100,) * 100),
    "clients10": Work(CNN, (50,) * 10),
    "clients100": Work(CNN, (50,) * 100),
    "clients1000": Work(CNN, (50,) * 1000),
}
"""Name -> work."""


class BareLoop:
    """FedAvg by hand: one model, resident tensors, batches by index slices, a flat float64 mean."""

    def __init__(self, work: Work) -> None:
        self.work, self.data = work, work.data()
        torch.manual_seed(0)
        self.model = work.make()
        self.parameters = list(self.model.parameters())
        self.state = [parameter.detach().clone() for parameter in self.parameters]
        self.steps = self.samples = 0

    def round(self, number: int) -> None:
        """Train every participant for an epoch and average."""
        work = self.work
        generator = torch.Generator().manual_seed(number)
        chosen = range(len(work.sizes))
        if work.participants is not None:
            chosen = torch.randperm(len(work.sizes), generator=generator)[: work.participants].tolist()
        total = sum(work.sizes[client] for client in chosen)
        sums = [torch.zeros_like(value, dtype=torch.float64) for value in self.state]
        for client in chosen:
            self.visit(client, generator)
            with torch.no_grad():
                for accumulated, parameter in zip(sums, self.parameters, strict=True):
                    accumulated.add_(parameter, alpha=work.sizes[client])
        self.state = [(accumulated / total).float() for accumulated in sums]

    def visit(self, client: int, generator: torch.Generator) -> None:
        """Train one client from the global model for an epoch."""
        x, y = self.data[client]
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.state, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.SGD(self.parameters, lr=self.work.lr)
        order = torch.randperm(len(y), generator=generator)
        for start in range(0, len(y), self.work.batch):
            chosen = order[start : start + self.work.batch]
            optimizer.zero_grad()
            F.cross_entropy(self.model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            self.steps, self.samples = self.steps + 1, self.samples + len(chosen)

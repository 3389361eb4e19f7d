"""What tests of several algorithms share: small federations, training by hand in plain torch, and cut runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning import FederatedTrainer
from fedlightning.client.client import Client
from fedlightning.contract import FederatedCallback
from fedlightning.seeding import address
from fedlightning.tensors import State, module_state
from tests.helpers import CLASSES, NormNet, Spy, Toy, ToyData, federate, make_trainer, toy_data

SIZES = {"0": 24, "1": 40, "2": 16}
"""Clients and their training samples: three, five and two batches of 8, so that means by samples are not uniform."""
HEAD = {"net.3.weight", "net.3.bias"}
"""The last layer of ``Toy`` and ``NormNet``."""
NAMES = ("net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias")
"""The entries of ``Toy``."""
MAKES = [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")]
"""Modules whose training shows every difference: random masks and moments; running statistics and momentum."""
A = [[1.0, 2.0, 0.5], [3.0, 0.4, 1.0]]
B = [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5]]
"""Two quadratic clients, ``1/2 sum_j a_j (w_j - b_j)^2``, that disagree in curvature and in minimiser."""


class AdamWDecay(NormNet):
    """Moments and weight decay, which move whatever is stepped: with a gradient, with none, or with one of long ago."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.02, weight_decay=0.5)


class MomentumDecay(NormNet):
    """The same with SGD."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def deployed(trainer: FederatedTrainer, client: str) -> State:
    """The tensors of the model that a client uses in the end."""
    return module_state(trainer.module(client))


# -- by hand -----------------------------------------------------------------------------------------------------------
def batches(
    data: Any, client: str, *, round: int = 0, epochs: int = 1, phase: str = ""
) -> Iterator[tuple[Tensor, Tensor]]:
    """A client's batches in the order in which a visit sees them.

    Args:
        data: the data module; client: its id; round: counted from 0; epochs: of the visit.
        phase: of the visit, if it is not its training ("adapt").
    """
    loader = data.client_dataloader(client, "train")
    seed = address(0, f"phase-{phase}") if phase else 0
    loader.sampler.start(seed=seed, round=round, epochs_per_round=2**31 if phase else epochs)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        yield from loader


def descend(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    over: Iterable[tuple[Tensor, Tensor]],
    penalty: Callable[[], Tensor | float] = lambda: 0.0,
) -> None:
    """Plain torch: a step on the cross entropy and ``penalty()`` for every batch."""
    for x, y in over:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + penalty()).backward()
        optimizer.step()


# -- who is absent, what is cut ----------------------------------------------------------------------------------------
def absent_clients_rest(spy: Spy) -> None:
    """Assert that the record of a client without a visit in a round is the one of the round before."""
    assert len(spy.records) > 1
    for number in range(1, len(spy.records)):
        for client in set(SIZES) - set(spy.of_round(number)):
            before, after = spy.records[number - 1][client], spy.records[number][client]
            assert after is before or not after.visits


def cut_and_resumed(
    tmp_path: Path, module: Any, data: Any, callbacks: Callable[[], Sequence[FederatedCallback]], **options: Any
) -> tuple[FederatedTrainer, FederatedTrainer, FederatedTrainer]:
    """A run that went through, the same one stopped after its first round, and that one resumed."""
    whole = federate(module, data, callbacks(), root=tmp_path / "whole", **options)
    cut = make_trainer(tmp_path / "cut", callbacks(), max_time={"seconds": 0}, **options)
    cut.fit(module, datamodule=data)
    assert cut.rounds_done == 1
    again = make_trainer(tmp_path / "cut", callbacks(), **options)
    again.fit(module, datamodule=data, resume="last")
    return whole, cut, again


# -- whole federations by hand ---------------------------------------------------------------------------------------
def fixed_data(sizes: Sequence[int], *, worlds: int = 1, broken: str | None = None) -> ToyData:
    """Clients in double precision, their batches of 8 in a fixed order.

    Args:
        sizes: Training samples of each client.
        worlds: 2: every second client has its labels the other way round.
        broken: A client whose first sample stops :class:`Breaks`.
    """
    data = toy_data(sizes, val=7, test=3, shuffle=False)
    for number, splits in enumerate(data.tensors.values()):
        for split, (x, y) in splits.items():
            splits[split] = (x.double(), CLASSES - 1 - y if number % worlds else y)  # type: ignore[index]
    if broken is not None:
        data.tensors[broken]["train"][0][0] = 1e4
    return data


class Breaks(Toy):
    """Raises when it trains on the first batch of a broken client."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.training and bool((batch[0] > 1e3).any()):
            raise RuntimeError("broken data")
        return super().training_step(batch, batch_idx)


class FailsOnce(FederatedCallback):
    """A client's visits of one round end with an error.

    Args:
        who: The client; when: the round, counted from 0.
        tag: Only visits with this tag. `None`: all.
    """

    def __init__(self, who: str, when: int, tag: str | None = None) -> None:
        self.who, self.when, self.tag = who, when, tag

    def on_visit_start(self, client: Client) -> None:
        if (client.id, client.round) == (self.who, self.when) and self.tag in (None, client.message.tag):
            raise RuntimeError("the line is cut")


def start_of(kind: type[Toy]) -> Toy:
    """A small module in double precision, always the same one."""
    torch.manual_seed(3)
    return kind(hidden=4).double()  # type: ignore[return-value]


class Plain:
    """The network of ``Toy(hidden=4)`` without Lightning, with the tensors of a state."""

    def __init__(self, state: State) -> None:
        self.leaves = [state[name].detach().clone() for name in NAMES]

    def __call__(self, x: Tensor) -> Tensor:
        first, a, second, b = self.leaves
        return torch.relu(x @ first.T + a) @ second.T + b

    def trained(self, x: Tensor, y: Tensor, pull: Callable[[int, Tensor], Tensor] = lambda place, w: 0 * w) -> State:
        """Steps of 0.1 down the gradient, plus ``pull(place, w)``, over one epoch of batches of 8."""
        for at in range(0, len(x), 8):
            self.leaves = [leaf.requires_grad_() for leaf in self.leaves]
            gradients = torch.autograd.grad(F.cross_entropy(self(x[at : at + 8]), y[at : at + 8]), self.leaves)
            with torch.no_grad():
                pairs = enumerate(zip(self.leaves, gradients, strict=True))
                self.leaves = [w - 0.1 * (g + pull(place, w)) for place, (w, g) in pairs]
        return dict(zip(NAMES, self.leaves, strict=True))


def best_partition(rows: Tensor, count: int) -> tuple[int, ...]:
    """Return the partition that k-means looks for, by trying all of them; groups in the order of their first rows."""

    def squares(labels: tuple[int, ...]) -> float:
        groups = [rows[[i for i, label in enumerate(labels) if label == k]] for k in range(count)]
        return sum(float((group - group.mean(0)).square().sum()) for group in groups)

    partitions = [labels for labels in product(range(count), repeat=len(rows)) if len(set(labels)) == count]
    return min((one for one in partitions if list(dict.fromkeys(one)) == list(range(count))), key=squares)


def flat(state: State) -> Tensor:
    """Return all entries of a state as one row."""
    return torch.cat([value.flatten() for value in state.values()])


def mean_state(parts: Sequence[tuple[float, State]]) -> State:
    """The weighted mean of states."""
    total = sum(weight for weight, _ in parts)
    return {name: sum(weight * state[name] for weight, state in parts) / total for name in parts[0][1]}  # type: ignore[misc]

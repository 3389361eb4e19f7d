"""What tests of several algorithms share: small federations, training by hand in plain torch, and cut runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning import FederatedTrainer
from fedlightning.hooks import FederatedCallback
from fedlightning.seeding import address
from fedlightning.tensors import State, module_state
from tests.helpers import NormNet, Spy, Toy, federate, make_trainer

SIZES = {"0": 24, "1": 40, "2": 16}
"""Clients and their training samples: three, five and two batches of 8, so that means by samples are not uniform."""
HEAD = {"net.3.weight", "net.3.bias"}
"""The last layer of ``Toy`` and ``NormNet``."""
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

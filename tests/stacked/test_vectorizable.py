"""What looks as if it could train in a stack and cannot, and what is only just possible."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import fedlightning  # noqa: F401

# isort: split
from fedlightning.stacked.batches import LoaderSource
from tests.helpers import Toy, close, federate, global_state, make_trainer, toy_data

SIZES = (24, 40, 18, 11)


class Counting(Toy):
    """Its loss depends on how often it was called."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls = self.calls + 1
        return super().training_step(batch, batch_idx) / self.calls


def from_random() -> float:
    return random.random()


def from_numpy() -> float:
    return float(np.random.random())


class Augmenting(Toy):
    """Draws from a generator that no stack has for each client."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x * self.draw())


class Hooked(Toy):
    """Its optimizer does more than step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *given: None)
        return optimizer


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Counting(), "it changes self.calls"),
        (Augmenting(from_random), "Python's random"),
        (Augmenting(from_numpy), "numpy.random"),
        (Hooked(), "hooks around its step"),
    ],
    ids=["an attribute", "random", "numpy", "optimizer hooks"],
)
def test_refused_with_the_cause(module: Toy, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        federate(module, toy_data(SIZES), engine="vectorized")


class Fading(Toy):
    """Weighs a batch by its number, which is then a plain factor of a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 0.5**batch_idx


class Words(Toy):
    """Embeds what it reads; the padding's row never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6, padding_idx=0)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.embedding((x.abs() * 2).long().clamp(max=4)).mean(1))


@pytest.mark.parametrize("module", [Fading(), Words()], ids=["the batch's number as a factor", "padding row"])
def test_as_one_after_another(module: Toy) -> None:
    alone, stacked = (federate(module, toy_data(SIZES), engine=engine) for engine in ("sequential", "vectorized"))
    close(global_state(stacked), global_state(alone), atol=1e-6)


class Measuring(Toy):
    """Updates a metric object while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen(self.logits(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


def test_a_metric_object_is_named() -> None:
    with pytest.raises(ValueError, match=r"self\.seen that it updates"):
        federate(Measuring(), toy_data(SIZES), engine="vectorized")


class Graphs:
    """A batch in an object of its own, whose text tells the sizes only, as that of PyTorch Geometric."""

    def __init__(self, samples: Any) -> None:
        self.x, self.y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    def __repr__(self) -> str:
        return f"Graphs(x={list(self.x.shape)})"


class OnGraphs(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch.x, batch.y) if isinstance(batch, Graphs) else batch, batch_idx)


def test_batches_in_objects_are_refused() -> None:
    samples = [list(zip(*tensors, strict=True)) for tensors in ((torch.randn(8, 6), torch.arange(8) % 3) for _ in "ab")]
    data = {str(place): DataLoader(rows, batch_size=8, collate_fn=Graphs) for place, rows in enumerate(samples)}
    with pytest.raises(ValueError, match="a batch holds a Graphs, which is not made of dicts, lists and tuples"):
        make_trainer(None, engine="vectorized").fit(OnGraphs(), train_dataloaders=data)


def test_batches_of_unknown_content_step_alone() -> None:
    alive = []  # as in a round: a source that is gone may give its id to the next

    def shape(collate: Any, numbers: list[float]) -> Any:
        source = LoaderSource(
            DataLoader(numbers, batch_size=2, collate_fn=collate), lambda batch: batch, lambda e: (e,)
        )
        alive.append(source)
        source.start_epoch(0)
        return source.peek()

    for collate, alike in (
        (
            lambda values: [torch.tensor(values), np.array([0.0] * 1000 + values + [0.0] * 1000)],
            False,
        ),  # numpy's text leaves rows out
        (lambda values: [torch.tensor(values), {"place": values[0]}], False),
        (lambda values: [torch.tensor(values), {"place": "same"}], True),
    ):
        sources = [shape(collate, numbers) for numbers in ([1.0, 2.0], [3.0, 2.0])]
        assert (sources[0] == sources[1]) is alike

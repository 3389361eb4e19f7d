"""Datasets that give whole batches: a client's samples are those in them, in training and in scoring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from fedlightning.callbacks import FedGKT, FedLC, FedType, SampleDP
from fedlightning.datamodules import LoaderDataModule
from fedlightning.datamodules.sampling import samples_in, samples_of
from fedlightning.options import Evaluation
from tests.helpers import Toy, federate, global_state, make_trainer, same, samples, spied

SIZES = {"a": (40, 8), "b": (24, 2)}
"""Samples and samples in a batch of each client."""


class Batches(Dataset[Any]):
    """Gives batch after batch; draws from torch's generator, as an augmentation does."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        torch.rand(1)
        if index >= len(self):
            raise IndexError
        place = slice(index * self.size, (index + 1) * self.size)
        return self.x[place], self.y[place]


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[index] for index in range(len(self)))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))])


class ByLists(Dataset[Any]):
    """Gives the samples of a list of indices, which a sampler of batches makes."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def loader_of(kind: str, client: str, split: str = "train") -> DataLoader[Any]:
    count, size = SIZES[client]
    x, y = samples(client, split, count)
    if kind == "samples":
        return DataLoader(TensorDataset(x, y), batch_size=size)
    if kind == "lists":
        order = BatchSampler(SequentialSampler(range(count)), size, drop_last=False)
        return DataLoader(ByLists(x, y), sampler=order, batch_size=None)
    batches = Batches(x, y, size)
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "workers" else {}
    return DataLoader(Stream(batches) if kind == "stream" else batches, batch_size=None, **workers)


def loaders(kind: str, split: str = "train") -> dict[str, DataLoader[Any]]:
    return {client: loader_of(kind, client, split) for client in SIZES}


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


@pytest.mark.parametrize("kind", ["ready", "stream", "lists", pytest.param("workers", marks=pytest.mark.slow)])
def test_weights_and_scores_are_by_samples(kind: str, tmp_path: Any) -> None:
    options: dict[str, Any] = {"evaluation": Evaluation(data=["local", "pooled"])} if kind == "ready" else {}
    ready, plain = make_trainer(tmp_path / kind, **options), make_trainer(tmp_path / "samples", **options)
    for trainer, of in ((ready, kind), (plain, "samples")):
        trainer.fit(toy(), train_dataloaders=loaders(of), val_dataloaders=loaders(of, "val"))
    same(global_state(ready), global_state(plain))
    assert ready.server.num_samples == {client: count for client, (count, _) in SIZES.items()}
    scores = [
        [(row.client, row.stage, row.data, row.metric, row.num_samples, pytest.approx(row.value)) for row in one.rows]
        for one in (ready, plain)
    ]
    assert scores[0] == scores[1]


def test_counting_draws_no_random_numbers_and_happens_once() -> None:
    loader = loader_of("ready", "a")
    torch.manual_seed(3)
    assert [samples_in(loader), samples_in(loader)] == [40, 40]
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def test_limits_count_samples_too() -> None:
    _, spy = spied(toy(), LoaderDataModule(loaders("ready")), limit_train_batches=2, max_rounds=1)
    assert {update.client: update.num_samples for update in spy.updates} == {"a": 16, "b": 4}


def test_streams_without_a_length_are_refused() -> None:
    with pytest.raises(ValueError, match="does not say how many samples it has"):
        LoaderDataModule({"a": DataLoader(Endless(), batch_size=None)})


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"x": torch.zeros(5, 2), "parts": [torch.zeros(5), torch.zeros(5)], "names": "abc"}, 5),
        ((torch.zeros(5, 2), torch.zeros(5), torch.tensor(0.5)), 5),  # two of three
        ((torch.zeros(7), torch.zeros(3)), 1),  # one sample, with a target of three numbers
        ("text", 1),
    ],
)
def test_a_batch_has_as_many_samples_as_most_of_its_tensors(batch: Any, count: int) -> None:
    assert samples_of(batch) == count


def test_a_step_on_ready_batches_is_tried_before_round_1() -> None:
    class Broken(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="tried before round 1: ValueError: broken"):
        federate(Broken(), LoaderDataModule(loaders("ready")), sanity_check=True)


REFUSED = {
    "FedGKT": (
        FedGKT(head="net.3"),
        "^FedGKT keeps logits of training samples, and those of (Batches|Stream) have no position",
    ),
    "FedType": (
        FedType(imitation=0.1),
        "^FedType calibrates on samples .*, and those of (Batches|Stream) have no position",
    ),
    "SampleDP": (SampleDP(delta=1e-3, noise_multiplier=1.0), r"^SampleDP draws every record .*, (Batches|Stream)\)"),
}


@pytest.mark.parametrize("kind", ["ready", "stream"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_single_samples_is_refused_before_round_1(name: str, kind: str) -> None:
    callback, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        federate(toy(), LoaderDataModule(loaders(kind)), [callback])


@pytest.mark.parametrize("kind", ["ready", "stream"])
def test_classes_are_counted_in_ready_batches(kind: str) -> None:
    """FedLC asked for samples by their numbers."""
    ready, plain = (federate(toy(), LoaderDataModule(loaders(of)), [FedLC(head="net.3")]) for of in (kind, "samples"))
    same(global_state(ready), global_state(plain))

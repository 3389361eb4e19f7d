"""What a stack cannot score right is scored one after another under ``vectorized``: the very values of ``sequential``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedlightning  # noqa: F401  before lightning

# isort: split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fedlightning import FederatedCallback
from fedlightning.callbacks import FedAvg
from fedlightning.client.requests import Evaluate
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.datamodules.views import ArrayDataset, IndexView, collate_rows
from fedlightning.server import evaluation as stages
from fedlightning.stacked import stacked_evaluation
from tests.helpers import CLASSES, FEATURES, Toy, ToyData
from tests.stacked.scored import (
    SIZES,
    TRIALS,
    Federation,
    all_of,
    unequal_data,
)


class BatchHook(Toy):
    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("in_hook", 1.0)


class Transfer(Toy):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]


class Draws(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x + torch.randn_like(x))


class DrawsInPython(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x * random.random() + np.random.rand())


class Branches(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * (2 if x.sum() > 0 else 1)


class Collects(Toy):
    """Keeps outputs in a list until the epoch's end, as people did without metrics."""

    def on_validation_epoch_start(self) -> None:
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.append((self(batch[0]).argmax(1) == batch[1]).float())

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", torch.cat(self.kept).mean())


class Counts(Toy):
    """Keeps a count in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def on_validation_epoch_end(self) -> None:
        self.seen = torch.zeros(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count(len(batch[1]))
        self.log("seen", self.seen, reduce_fx="max")

    def count(self, number: int) -> None:
        self.seen = self.seen + number


class CountsInPlace(Counts):
    """Changes the buffer in place."""

    def count(self, number: int) -> None:
        self.seen += number


class CountsInPython(Toy):
    """Keeps a plain number."""

    seen = 0

    def on_validation_epoch_end(self) -> None:
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[1])
        self.log("seen", float(self.seen), reduce_fx="max")


class Box:
    """An object of the user's own."""

    total = 0


class CountsInAnObject(Toy):
    """Keeps a plain number where no look at the module finds it: only the comparison of both ways does."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Box()

    def on_validation_epoch_start(self) -> None:
        self.box.total = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.box.total += len(batch[1])
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("total", float(self.box.total))


class AsksTheTrainer(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("batches", float(self.trainer.num_val_batches[0]))


class Collection(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.scores = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute())
        self.scores.reset()


ALONE = (
    BatchHook,
    Transfer,
    Draws,
    DrawsInPython,
    Branches,
    Collects,
    Counts,
    CountsInPlace,
    CountsInPython,
    CountsInAnObject,
    AsksTheTrainer,
    Collection,
)


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_what_a_stack_cannot_do_is_scored_one_by_one(kind: type[Toy]) -> None:
    clients = len(SIZES["val"])
    assert Federation(kind()).compare(Evaluate(("val",)), tolerance=0.0) in all_of(clients)


@pytest.mark.parametrize(("own", "shared", "stacked"), [(2000, 2000, 2), (500, 2000, 1), (500, 500, 0)])
def test_steps_that_are_nothing_but_arithmetic(
    own: int, shared: int, stacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of at most 8 samples takes 2 * 8 * (6 * 8 + 8 * 3) = 1152 operations, and more than half of it here."""
    monkeypatch.setattr(stacked_evaluation, "ARITHMETIC", {"own": own, "shared": shared})
    clients = len(SIZES["val"])
    assert Federation(Toy(hidden=8)).compare(Evaluate(("val",))) == 4 + (2 - stacked) * clients


class Gain(FederatedCallback):
    """Each client's model has a plain value of its own."""

    def on_receive(self, client: Any, message: Any) -> None:
        client.module.lr = float(client.id)


class Gained(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.lr


class HookOnClients(FederatedCallback):
    """Odd clients' models have a forward hook."""

    def on_receive(self, client: Any, message: Any) -> None:
        if int(client.id) % 2:
            client.module.net.register_forward_hook(lambda module, args, output: 3 * output)


class OwnTensor(FederatedCallback):
    """Each client's model has a tensor of its own that is neither parameter nor buffer."""

    def on_receive(self, client: Any, message: Any) -> None:
        client.module.shift = torch.full((), float(client.id))


class Shifted(Toy):
    shift: Any = 0.0

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x + self.shift)


@pytest.mark.parametrize(
    ("module", "callback"),
    [(Gained(), Gain()), (Toy(), HookOnClients()), (Shifted(), OwnTensor())],
    ids=lambda value: type(value).__name__,
)
def test_models_that_differ_in_more_than_tensors(module: Toy, callback: FederatedCallback) -> None:
    Federation(module, [FedAvg(), callback]).compare()


class Late(Toy):
    """Its third batch cannot be stacked."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scale = 1.0 if batch_idx < 2 or batch[0].sum() > 0 else 2.0
        self.log("val_loss", scale * F.cross_entropy(self(batch[0]), batch[1]))


def test_a_class_that_fails_late_is_scored_one_by_one_from_then_on() -> None:
    sizes = (10, 16, 20, 20)
    assert Federation(Late(), data=unequal_data(sizes)).compare(Evaluate(("val",)), tolerance=0.0) in all_of(len(sizes))


class DrawsLate(Toy):
    """Draws in the second batch only."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]) * (random.random() if batch_idx else 1.0))


@pytest.mark.parametrize("kind", [Counts, CountsInPlace, CountsInPython, DrawsLate])
def test_what_the_first_two_clients_do_not_show_is_noticed(kind: type[Toy]) -> None:
    """They have one batch each; in a second one, values of another client's batch would be counted."""
    sizes = (8, 8, 16, 11)
    assert Federation(kind(), data=unequal_data(sizes)).compare(Evaluate(("val",)), tolerance=0.0) in all_of(len(sizes))


class Noisy(Dataset[Any]):
    """Samples that are drawn anew whenever they are looked at."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.tensors[0][index] + torch.randn(FEATURES) + random.random(), "y": self.tensors[1][index]}


class OfDicts(Toy):
    """Batches are dicts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx)

    def score(self, batch: Any, split: str) -> None:
        super().score((batch["x"], batch["y"]), split)


def loaders(
    make: Any,
    shuffle: bool = False,
    generator: torch.Generator | None = None,
    sizes: Sequence[int] = SIZES["val"],
) -> LoaderDataModule:
    """The unequal data as ready-made loaders; those for evaluation share a generator."""
    tensors, made = unequal_data(sizes).tensors, {}
    for split in ("train", "val", "test"):
        made[split] = {
            client: DataLoader(
                make(own[split]),
                batch_size=8,
                shuffle=shuffle and split != "train",
                generator=None if split == "train" else generator,
            )
            for client, own in tensors.items()
        }
    return LoaderDataModule(made["train"], made["val"], made["test"])


def test_loaders_that_draw() -> None:
    assert Federation(OfDicts(), data=loaders(Noisy)).compare() <= TRIALS


class LateOfDicts(OfDicts):
    """Its second batch cannot be stacked."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["x"]), batch["y"]) * float(batch_idx == 0 or batch["x"].sum()))


@pytest.mark.parametrize("kind", [OfDicts, LateOfDicts])
def test_a_generator_of_the_loaders_goes_on_as_under_sequential(kind: type[Toy]) -> None:
    shared = torch.Generator()
    data = loaders(Noisy, generator=shared, sizes=(8, 8, 16, 16))
    federation = Federation(kind(), data=data)
    states = []
    for engine in federation.engines():
        shared.manual_seed(5)
        assert stages.score_received_models(federation.server, engine, Evaluate(("val", "test")))
        states.append(shared.get_state())
    assert torch.equal(*states)


def test_loaders_without_an_order_are_iterated_one_by_one() -> None:
    clients = len(SIZES["val"])
    federation = Federation(Toy(), data=loaders(lambda tensors: TensorDataset(*tensors), shuffle=True))
    assert federation.compare(Evaluate(("val",)), tolerance=0.0) == 2 * clients


def test_data_with_a_transform() -> None:
    class Scaled(ToyData):
        def build(self) -> Any:
            clients, splits = super().build()
            for split in splits.values():
                split.dataset = ArrayDataset(*split.dataset.tensors, transform=lambda x: 2 * x + torch.rand(()))
                assert IndexView(split.dataset, split.indices[0]).whole and collate_rows is not None
            return clients, splits

    assert Federation(Toy(), data=Scaled(unequal_data().tensors)).compare() <= TRIALS

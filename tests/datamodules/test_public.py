"""Public data: shares and other data sets, loaders by position, and what is never public."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedlightning.datamodules import (
    ArrayDataset,
    DigitsDataModule,
    IIDPartitioner,
    IndexedFederatedDataModule,
    Partitioned,
    Split,
)
from fedlightning.datamodules.federated_data import SPLITS, FederatedDataModule
from fedlightning.datamodules.groups import content_hash
from fedlightning.datamodules.public import PairedBatch, public_loader
from fedlightning.datamodules.public_from_another import share_of

IID = IIDPartitioner(3)


def made(**how: Any) -> DigitsDataModule:
    data = DigitsDataModule(IID, max_train=120, max_test=40, **how)
    data.setup()
    return data


def inputs_of(loader: Any) -> Tensor:
    return torch.cat([batch[0] if isinstance(batch, list | tuple) else batch for batch in loader])


def held(data: FederatedDataModule, splits: tuple[str, ...] = SPLITS) -> set[bytes]:
    loaders = [data.client_dataloader(client, split) for client in data.client_ids for split in splits]
    return {row.numpy().tobytes() for loader in loaders if loader is not None for x, _ in loader for row in x}


def images(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def digits(train: bool) -> Tensor:
    return DigitsDataModule().load()[0 if train else 1].x


class OnDisk(Dataset[Any]):
    """Samples that are not tensors in memory; `noise` makes every look another one."""

    def __init__(self, x: Tensor, size: int | None = None, noise: float = 0.0) -> None:
        self.x, self.size, self.noise, self.reads = x, size or len(x), noise, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self.x[index % len(self.x)] + self.noise * torch.rand(()), 0


# -- shares ----------------------------------------------------------------------------------------------------------
def test_a_share_is_public_fraction_by_another_name() -> None:
    one, other = made(public=0.25), made(public_fraction=0.25)
    assert torch.equal(inputs_of(one.public_dataloader()), inputs_of(other.public_dataloader()))
    assert one.fingerprint("train") == other.fingerprint("train")
    assert not {row.numpy().tobytes() for row in inputs_of(one.public_dataloader())} & held(one)
    assert one.public_report() == {
        "samples": len(inputs_of(one.public_dataloader())),
        "labels": True,
        "from": "0.25 of every client's training samples",
    }


def test_two_answers_and_no_data_are_refused() -> None:
    with pytest.raises(ValueError, match=r"public=0.1 and public_fraction=0.2; give one"):
        made(public=0.1, public_fraction=0.2)
    for wrong in ("digits", DigitsDataModule, object(), True):
        with pytest.raises(ValueError, match="give a share of every client's training samples"):
            share_of("data", wrong, 0.0)
    with pytest.raises(ValueError, match=r"public=1.0. Use a share of every client.s training samples in \[0, 1\)"):
        made(public=1.0)


# -- other data sets ---------------------------------------------------------------------------------------------------
def test_another_dataset_takes_nothing_from_the_clients() -> None:
    plain, data = made(), made(public=TensorDataset(images(20), torch.zeros(20, dtype=torch.long)))
    assert torch.equal(inputs_of(data.public_dataloader()), images(20))
    for split in SPLITS:
        assert data.fingerprint(split) == plain.fingerprint(split)
    assert data.public_report() == {
        "samples": 20, "labels": True, "from": "TensorDataset", "compared": True, "left_out": {},
    }  # fmt: skip


class Plain(LightningDataModule):
    """Somebody's data module, with batches of 7."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(images(30), torch.ones(30)), batch_size=7, shuffle=True)


def test_a_data_module_gives_its_training_data() -> None:
    loader = made(public=Plain()).public_dataloader()
    assert loader is not None and loader.batch_size == 7
    assert torch.equal(inputs_of(loader), images(30))  # in order: positions are positions
    source = DigitsDataModule(IIDPartitioner(2), max_train=50, max_test=4, seed=3)
    few = made(public=source)
    given = {row.numpy().tobytes() for row in inputs_of(few.public_dataloader())}
    assert given and given <= held(source, ("train",)) and not given & held(few)


@pytest.mark.parametrize("kind", [lambda x: TensorDataset(x, torch.zeros(len(x))), OnDisk], ids=["memory", "disk"])
def test_samples_that_a_client_holds_are_left_out(kind: Any) -> None:
    plain = made()
    test = inputs_of(plain.client_dataloader("1", "test"))[:3]
    val = inputs_of(plain.client_dataloader("0", "val"))[:2]
    train = inputs_of(plain.client_dataloader("2", "train"))[:1]
    with pytest.warns(UserWarning, match=r"6 of the 16 public samples .* left out.*1 of train, 2 of val, 3 of test"):
        data = made(public=kind(torch.cat([images(4), test, images(6, seed=2), val, train])))
    assert torch.equal(inputs_of(data.public_dataloader()), torch.cat([images(4), images(6, seed=2)]))
    assert data.public_report()["left_out"] == {"train": 1, "val": 2, "test": 3}


def test_only_samples_of_clients_are_refused() -> None:
    data = DigitsDataModule(IID)
    with pytest.raises(ValueError, match=r"a client holds every one of its 359 samples \(359 of test\)"):
        DigitsDataModule(IID, public=TensorDataset(digits(train=False))).setup()
    data.setup()
    assert data.public_dataloader() is None


def test_inputs_are_compared_as_the_model_sees_them() -> None:
    x = torch.arange(40, dtype=torch.uint8).view(10, 4)
    data = Partitioned.from_datasets(
        ArrayDataset(x, torch.arange(10) % 2, transform=lambda x: x / 4),
        partitioner=IIDPartitioner(2),
        public=TensorDataset(torch.cat([x[:2] / 4, x[:2].float()])),
    )
    with pytest.warns(UserWarning, match="2 of the 4"):
        data.setup()
    [found] = next(iter(data.public_dataloader()))
    assert torch.equal(found, x[:2].float())


def test_what_is_too_large_to_read_is_not_compared_and_reported() -> None:
    large = OnDisk(images(3), size=50_000)
    report = made(public=large).public_report()
    assert report["compared"] is False and large.reads == 0


class Stream(IterableDataset[Any]):
    """Samples without positions."""

    def __iter__(self) -> Any:
        return iter(images(3))


class Streams(LightningDataModule):
    """A data module of such samples."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=2)


def test_data_without_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="samples have no position"):
        made(public=Streams())


@pytest.mark.parametrize("public", [0.2, TensorDataset(images(9), torch.zeros(9))], ids=["share", "another"])
def test_labels_can_be_taken_off(public: Any) -> None:
    with_labels, without = made(public=public), made(public=public, public_labels=False)
    batch = next(iter(without.public_dataloader()))
    assert isinstance(batch, Tensor)
    assert torch.equal(batch, next(iter(with_labels.public_dataloader()))[0])
    assert without.public_report()["labels"] is False


def test_it_can_be_sent_to_a_worker() -> None:
    data = pickle.loads(pickle.dumps(made(public=TensorDataset(images(9)), public_labels=False)))
    loader = public_loader(data.public_dataloader(), "data", targets=torch.zeros(9, 2))
    assert next(iter(loader)).batch.shape == (9, 1, 8, 8)


# -- loaders -----------------------------------------------------------------------------------------------------------
def test_batches_come_in_the_order_of_the_positions_with_their_targets() -> None:
    public = made(public=0.3).public_dataloader()
    whole, ids = inputs_of(public), torch.tensor([7, 0, 7, 3, 1])
    rows = torch.arange(10.0).view(5, 2)
    for shuffle in (False, True):
        batches = list(public_loader(public, "data", ids, targets=rows, batch_size=2, shuffle=shuffle))
        assert all(isinstance(batch, PairedBatch) for batch in batches)
        found = torch.cat([batch.targets for batch in batches])
        order = (found[:, 0] / 2).long()
        assert torch.equal(torch.cat([batch.batch[0] for batch in batches]), whole[ids][order])
        assert sorted(order.tolist()) == list(range(5)) and (order.tolist() != list(range(5))) == shuffle


def test_workers_load_the_same_pairs() -> None:
    public = DataLoader(OnDisk(images(6)), batch_size=4, num_workers=1)
    here = DataLoader(OnDisk(images(6)), batch_size=4)
    rows = torch.rand(6, 2)
    for one, other in zip(*(public_loader(loader, "d", targets=rows) for loader in (public, here)), strict=True):
        assert torch.equal(one.batch[0], other.batch[0]) and torch.equal(one.targets, other.targets)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"ids": torch.tensor([0, 6])}, "position 6, but data has 6"),
        ({"ids": torch.tensor([-1])}, "position -1"),
        ({"ids": torch.tensor([True, False])}, "int64"),
        ({"ids": torch.tensor([[1]])}, r"shape \(1, 1\)"),
        ({"targets": torch.zeros(5, 2)}, "5 rows for 6"),
        ({"batch_size": 0}, "1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        public_loader(DataLoader(TensorDataset(images(6))), "data", **how)


def test_reading_draws_nothing_from_the_global_generator() -> None:
    public = made(public=0.3).public_dataloader()
    before = torch.get_rng_state()
    list(public_loader(public, "data", shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


# -- content -----------------------------------------------------------------------------------------------------------
def test_content_is_seen_and_noise_is_not() -> None:
    collate = torch.utils.data.default_collate
    for kind in (OnDisk, lambda x: TensorDataset(x)):
        one, same, other = (content_hash(kind(images(80, seed)), collate) for seed in (1, 1, 2))
        assert one == same != other
    noisy = OnDisk(images(5), noise=1.0)
    assert content_hash(noisy, collate) == content_hash(noisy, collate)  # global generators are addressed

    class Restless(OnDisk):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + self.reads

    assert content_hash(Restless(images(5)), collate) is None
    assert np.isfinite(noisy.reads)


def test_what_a_subclass_calls_public_stays_its_own() -> None:
    class Plain(IndexedFederatedDataModule):
        def build(self) -> Any:
            return ["a"], {"train": Split(TensorDataset(torch.arange(8.0)), [[0, 1, 2]])}

    class Hospitals(Plain):
        public_labels = ["healthy", "ill"]

        def __init__(self) -> None:
            super().__init__()
            self.public_places = self.public(0)

        def public(self, index: int) -> str:
            return f"public {index}"

    class Later(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.public = TensorDataset(torch.zeros(4, 2))  # data of its own, which nobody asked to make public

    data = Hospitals()
    data.setup()
    assert data.public(2) == "public 2" and data.public_labels == ["healthy", "ill"]
    later = Later()
    later.setup()
    assert later.public_dataloader() is None

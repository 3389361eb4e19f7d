"""Data without some clients: nobody else's unions hold them, and their own loaders are still there."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.datamodules import (
    DigitsDataModule,
    DriftingDataModule,
    IIDPartitioner,
    LoaderDataModule,
    ShiftedDataModule,
    ValidatedOnTest,
)
from fedlightning.datamodules.held_out import draw_held_out, exclude_clients
from fedlightning.testing.toys import ToyData


def loaders() -> LoaderDataModule:
    given = {name: DataLoader(TensorDataset(torch.full((size, 2), float(size))), 4) for name, size in SIZES.items()}
    return LoaderDataModule(given, given)


SIZES = {"site0": 12, "site1": 7, "site2": 10, "site3": 15}
DATA = {"indexed": lambda: DigitsDataModule(batch_size=16), "loaders": loaders, "a user's own": ToyData}


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_unions_are_those_of_the_clients_that_are_left(make):
    data = make()
    data.prepare_data()
    data.setup("fit")
    out, *left = data.client_ids
    few = exclude_clients(data, [out])
    assert few.client_ids == left and data.client_ids == [out, *left]
    for split in ("train", "val"):
        held = [few.client_dataloader(client, split).dataset for client in left]
        union = few.pooled_dataloader(split).dataset
        assert len(union) == sum(few.num_samples(client, split) for client in left)
        rows = [union[place][0] for place in range(len(union))]
        assert torch.equal(torch.stack(rows), torch.stack([part[i][0] for part in held for i in range(len(part))]))
        assert len(few.client_dataloader(out, split).dataset) == few.num_samples(out, split) > 0
        assert len(data.pooled_dataloader(split).dataset) == len(union) + few.num_samples(out, split)
        assert few.class_counts(out, split) == data.class_counts(out, split)
        assert few.fingerprint(split) != data.fingerprint(split)
    assert few.num_classes == data.num_classes and few.partition_name == data.partition_name


def test_a_union_has_the_batches_that_it_has_without_them():
    """Bit for bit the union of data that never had the client."""
    few, never = exclude_clients(ToyData(), ["site3"]), ToyData(sizes=(12, 7, 10))
    one, other = (list(data.pooled_dataloader("train")) for data in (few, never))
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_nobody_is_left_out():
    data = ToyData()
    assert exclude_clients(data, []) is data


def test_shares_and_numbers():
    names = [f"site{number}" for number in range(10)]
    assert len(draw_held_out(names, 0.2, 0)) == len(draw_held_out(names, 2, 0)) == 2
    assert draw_held_out(names, 0.2, 0) == draw_held_out(names[::-1], 2, 0)
    assert len(draw_held_out(names, 0.01, 0)) == 1 and draw_held_out(names, 0.0, 0) == draw_held_out(names, 0, 0) == []


class KnowsItsClients(DigitsDataModule):
    """Lists its clients in its own way."""

    @property
    def client_ids(self):
        return [str(place) for place in range(10)]


@pytest.mark.parametrize("kind", [DigitsDataModule, KnowsItsClients])
def test_public_data_are_not_theirs(kind):
    """What clients that are held out would have made public is in nobody's training."""
    data, whole = kind(public_fraction=0.2), DigitsDataModule()
    for one in (data, whole):
        one.setup("fit")
    few = exclude_clients(data, ["0", "1"])
    left = {tuple(x.flatten().tolist()) for client in few.client_ids for x, _ in samples(whole, client)}
    out = {tuple(x.flatten().tolist()) for client in "01" for x, _ in samples(whole, client)} - left
    public = {tuple(x.flatten().tolist()) for x, _ in few.public_dataloader().dataset}
    assert public and public <= left and not public & out
    assert len(data.public_dataloader().dataset) == len(few.public_dataloader().dataset) + sum(
        whole.num_samples(client) - data.num_samples(client) for client in "01"
    )
    assert exclude_clients(data, few.client_ids).public_dataloader() is not None
    assert exclude_clients(whole, ["0"]).public_dataloader() is None


def samples(data, client):
    dataset = data.client_dataloader(client, "train").dataset
    return [dataset[place] for place in range(len(dataset))]


class Ranked(DigitsDataModule):
    """Says of its features what a user's own data module may say of its."""

    coupled_records = "rows are ranked. Give ranks of a public sample."


def test_whoever_wraps_data_says_what_they_say_of_their_records():
    """Else a callback that hides records would let them in."""
    data = Ranked(IIDPartitioner(3))
    data.setup()
    for wrapped in (data, exclude_clients(data, ["0"]), ValidatedOnTest(data), ShiftedDataModule(data, "noise", 0.5)):
        assert wrapped.coupled_records == wrapped.coupling == Ranked.coupled_records, type(wrapped)
    with pytest.raises(ValueError, match=r"rows are ranked.* of later windows, too"):
        DriftingDataModule(data, windows=2).setup()

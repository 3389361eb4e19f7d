import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedlightning.datamodules import (
    ArrayDataset,
    DigitsDataModule,
    EmbeddingPartitioner,
    IIDPartitioner,
    LazyClients,
    Partitioned,
    ShiftedDataModule,
    TabularFederatedDataModule,
)
from fedlightning.datamodules.by_inputs import features_of, input_separation, separation


def clouds(size=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 5)) + 10.0 * np.arange(size)[:, None] % 30
    return ArrayDataset(torch.from_numpy(x).float(), torch.from_numpy(rng.integers(0, 2, size)))


@pytest.mark.parametrize("method", ["kmeans", "pca"])
def test_every_sample_has_one_client_and_test_samples_follow_the_training_fit(method):
    train, test = clouds(), clouds(30, seed=1)
    plan = EmbeddingPartitioner(3, method).plan(train, torch.Generator().manual_seed(0))
    parts, others = plan.split(train), plan.split(test)
    assert sorted(np.concatenate(parts)) == list(range(60)) and sorted(np.concatenate(others)) == list(range(30))
    assert [len(part) for part in parts] == [20, 20, 20] and plan.separation > 0.95
    for part in parts:
        assert len(set(part % 3)) == 1  # sample k is of cloud k mod 3
    train_home = {int(part[0]) % 3: client for client, part in enumerate(parts)}
    assert all(train_home[int(row) % 3] == client for client, part in enumerate(others) for row in part)
    again = EmbeddingPartitioner(3, method).plan(train, torch.Generator().manual_seed(0)).split(train)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_pca_cuts_equal_parts_along_the_first_component():
    data = ArrayDataset(torch.randn(101, 8) * torch.arange(1.0, 9), torch.zeros(101))
    plan = EmbeddingPartitioner(4, "pca").plan(data, torch.Generator())
    parts = plan.split(data)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    last = [data.x[part][:, 7] for part in parts]
    assert all(one.mean() < other.mean() for one, other in itertools.pairwise(last))


def test_a_frozen_network_gives_the_features():
    net = nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.5))
    plan = EmbeddingPartitioner(3, features=net).plan(clouds(), torch.Generator())
    assert plan.centres.shape == (3, 2) and not net.training
    assert np.array_equal(features_of(clouds(), net), features_of(clouds(), net))


def test_separation_is_zero_for_equal_clients_and_small_for_random_ones():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3000, 4))
    assert separation(features, rng.integers(0, 10, 3000)) == pytest.approx(9 / 2999, rel=0.5)
    assert separation(np.tile(features[:10], (2, 1)), np.arange(2).repeat(10)) == pytest.approx(0, abs=1e-12)
    assert separation(np.ones((4, 2)), np.arange(4)) == 0.0


def test_data_modules_hand_their_samples_over():
    data = DigitsDataModule(EmbeddingPartitioner(5, "pca"))
    data.setup()
    sizes = [data.num_samples(c) + data.num_samples(c, "val") for c in data.client_ids]
    assert max(sizes) - min(sizes) <= 1 and "EmbeddingPartitioner(num_clients=5, method='pca')" in data.partition_name
    assert all(data.num_samples(client, "test") for client in data.client_ids)
    other = Partitioned.from_datasets(
        TensorDataset(torch.randn(40, 3), torch.arange(40) % 2), partitioner=EmbeddingPartitioner(2), test_fraction=0.2
    )
    other.setup()
    assert sum(other.num_samples(c, s) for c in other.client_ids for s in ("train", "val", "test")) == 40


class Ragged(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, k):
        return torch.zeros(k + 1), 0


def test_what_cannot_be_divided_is_refused(tmp_path):
    with pytest.raises(ValueError, match="61 clients a sample each out of 60"):
        EmbeddingPartitioner(61).plan(clouds(), torch.Generator())
    with pytest.raises(ValueError, match="too many have the same score"):
        EmbeddingPartitioner(3, "pca").plan(ArrayDataset(torch.ones(9, 2), torch.zeros(9)), torch.Generator())
    with pytest.raises(ValueError, match="tensors of one shape"):
        EmbeddingPartitioner(2).plan(Ragged(), torch.Generator())
    path = tmp_path / "a.csv"
    path.write_text("age,ill\n" + "".join(f"{k},{k % 2}\n" for k in range(20)))
    with pytest.raises(ValueError, match="hands its partitioner no samples"):
        TabularFederatedDataModule(path, "ill", partitioner=EmbeddingPartitioner(2)).setup()
    grouped = Partitioned.from_datasets(
        TensorDataset(torch.randn(40, 3), torch.arange(40) % 2),
        partitioner=EmbeddingPartitioner(2),
        test_fraction=0.2,
        group=np.arange(20).repeat(2),
    )
    with pytest.raises(ValueError, match="cannot keep groups together"):
        grouped.setup()


def test_how_different_inputs_are():
    shares = []
    for partitioner in (IIDPartitioner(5), EmbeddingPartitioner(5)):
        data = DigitsDataModule(partitioner)
        data.setup()
        shares.append(input_separation(data))
    assert shares[0][0] < 2 * shares[0][1] and shares[1][0] > 50 * shares[0][0]
    turned = ShiftedDataModule(DigitsDataModule(IIDPartitioner(5)), features="rotation", strength=90.0)
    turned.setup()
    assert input_separation(turned)[0] > 10 * shares[0][0]
    assert input_separation(LazyClients(3, lambda k: {}, sizes={"train": 1})) is None
    words = Partitioned.from_datasets(
        TensorDataset(torch.zeros(40, 3, dtype=torch.int64), torch.arange(40) % 2),
        partitioner=IIDPartitioner(2),
        test_fraction=0.0,
    )
    words.setup()
    assert input_separation(words) is None

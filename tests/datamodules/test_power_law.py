import numpy as np
import pytest
import torch

from fedlightning.datamodules import ArrayDataset, ArrayFederatedDataModule, PowerLawPartitioner, describe
from fedlightning.datamodules.image_sets import scale_of_pixels

MNIST = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
LABELS = np.repeat(np.arange(10), MNIST)


def split(partitioner, labels=LABELS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return partitioner.plan(labels, draw).split(labels, draw)


def test_fedprox_shares_all_of_mnist_among_1000_devices_of_two_digits():
    parts = split(PowerLawPartitioner(1000))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(70000))
    counts = describe(parts, LABELS).counts
    assert all(
        set(np.flatnonzero(row)) == {client % 10, (client + 1) % 10} and row[row > 0].min() >= 5
        for client, row in enumerate(counts)
    )
    # the paper: mean 69, standard deviation 106 over devices (of 69035 samples)
    assert 60 < counts.sum(axis=1).std() < 250 and np.median(counts.sum(axis=1)) < 60


def test_pfedme_leaves_a_third_out_and_has_the_papers_sizes():
    sizes = []
    for seed in range(10):
        parts = split(PowerLawPartitioner(20, scheme="pfedme"), seed=seed)
        held = np.concatenate(parts)
        assert len(set(held.tolist())) == len(held) and 30000 < len(held) < 65000
        counts = describe(parts, LABELS).counts
        assert ((counts > 0).sum(axis=1) == 2).all() and counts[counts > 0].min() >= 10
        sizes += counts.sum(axis=1).tolist()
    # the paper: from 1165 to 3834 samples
    assert np.quantile(sizes, 0.1) > 600 and np.quantile(sizes, 0.9) < 5000


def test_a_chunk_that_does_not_fit_is_left_out():
    labels = np.repeat(np.arange(10), 1000)  # no class has room for two chunks of 600 and more
    counts = describe(split(PowerLawPartitioner(20, scheme="pfedme"), labels), labels).counts
    assert (counts.sum(axis=0) <= 1000).all() and (counts == 10).sum() >= 20


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_clients": 5, "classes_per_client": 11}, "classes_per_client=11.*at most 10"),
        ({"num_clients": 5, "classes_per_client": 2}, "at least 6, so that no class is lost"),
        ({"num_clients": 15, "scheme": "pfedme"}, "multiple of 10"),
        ({"num_clients": 20, "least": 5000}, "10 classes have fewer samples than 5000.*least=1578"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        split(PowerLawPartitioner(**options))


class Two(ArrayFederatedDataModule):
    def load(self):
        x = torch.arange(60.0).unsqueeze(1)
        return ArrayDataset(x[:40], torch.arange(40) % 2), ArrayDataset(x[40:], torch.arange(20) % 2)


def test_a_test_fraction_joins_both_parts_first():
    data = Two(PowerLawPartitioner(3, classes_per_client=2), val_fraction=0.0, test_fraction=0.25)
    data.setup()
    held = {s: np.concatenate([data.indices(c, s) for c in data.client_ids]) for s in ("train", "test")}
    assert sorted(np.concatenate(list(held.values()))) == list(range(60))
    assert abs(len(held["test"]) - 15) <= 1 and (held["train"] >= 40).any()
    with pytest.raises(ValueError, match=r"test_fraction=0\.2 and max_test=5"):
        Two(test_fraction=0.2, max_test=5)


def test_pixels_are_standardised_one_by_one():
    images = np.random.default_rng(0).integers(0, 255, (50, 1, 3, 3)).astype(np.uint8)
    images[:, 0, 0, 0] = 7  # constant, as the corners of MNIST
    scaled = scale_of_pixels([images[:30], images[30:]])(torch.from_numpy(images))
    expected = (images - images.mean(axis=0)) / (images.std(axis=0) + 0.001)
    assert np.allclose(scaled.numpy(), expected, atol=1e-4)

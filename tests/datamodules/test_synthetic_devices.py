import numpy as np
import pytest
import torch

from fedlightning.datamodules import SyntheticDevicesDataModule
from fedlightning.datamodules.synthetic import draw_devices


def by_device(values, sizes):
    return np.split(values, np.cumsum(sizes)[:-1])


def test_devices_have_the_scripts_sizes_and_points():
    """Sizes are lognormal and at least 50; points have the covariance j^-1.2 around a centre of their own."""
    x, y, sizes = draw_devices(1.0, 1.0, False, 200, seed=0)
    assert len(x) == len(y) == sizes.sum() and sizes.min() >= 50
    logs = np.log(sizes - 50 + 0.5)
    assert abs(np.median(logs) - 4) < 0.6 and 1.5 < logs.std() < 2.5
    largest = int(sizes.argmax())
    points = by_device(x, sizes)[largest]
    assert np.allclose(points.var(axis=0), np.arange(1, 61) ** -1.2, rtol=0.2)
    centres = np.stack([one.mean(axis=0) for one in by_device(x, sizes)])
    assert 0.9 < centres.std(axis=1).mean() < 1.1  # N(B_k, 1) within a device
    assert 0.8 < centres.mean(axis=1).std() < 1.2  # B_k ~ N(0, beta) between devices


def test_a_linear_model_labels_a_device_but_not_all_of_them():
    """A least-squares fit tells W_k apart from another device's; with iid one model labels all."""
    x, y, sizes = draw_devices(0.0, 0.0, True, 6, seed=2)
    assert abs(x.mean()) < 0.05
    ones = np.hstack([x, np.ones((len(x), 1))])
    weights = np.linalg.lstsq(ones, np.eye(10)[y], rcond=None)[0]
    assert ((ones @ weights).argmax(axis=1) == y).mean() > 0.6
    x, y, sizes = draw_devices(0.0, 0.0, False, 6, seed=2)
    first, second = by_device(np.hstack([x, np.ones((len(x), 1))]), sizes)[:2]
    labels = by_device(y, sizes)
    own = np.linalg.lstsq(first, np.eye(10)[labels[0]], rcond=None)[0]
    assert ((first @ own).argmax(axis=1) == labels[0]).mean() > 0.7
    assert ((second @ own).argmax(axis=1) == labels[1]).mean() < 0.5


def test_draws_follow_the_scripts_order():
    """Sizes come first, then u_k, B_k and the centres: the stream of numpy's RandomState, fixed for good."""
    _, _, sizes = draw_devices(1.0, 1.0, False, 3, seed=7)
    rng = np.random.RandomState(7)
    assert (sizes == rng.lognormal(4, 2, 3).astype(int) + 50).all()
    x, y, _ = draw_devices(2.0, 3.0, False, 1, seed=7)
    rng = np.random.RandomState(7)
    size = int(rng.lognormal(4, 2, 1)[0]) + 50
    u, shift = rng.normal(0, 2.0, 1)[0], rng.normal(0, 3.0, 1)[0]
    centre = rng.normal(shift, 1, 60)
    weights, bias = rng.normal(u, 1, (60, 10)), rng.normal(u, 1, 10)
    points = rng.multivariate_normal(centre, np.diag([(j + 1) ** -1.2 for j in range(60)]), size)
    assert np.allclose(points, x) and (np.array([np.argmax(row @ weights + bias) for row in points]) == y).all()


def test_splits_cover_every_sample_once_and_there_is_a_union():
    data = SyntheticDevicesDataModule(1, 1, num_clients=5, seed=3)
    data.setup()
    held = [data.indices(c, split) for c in data.client_ids for split in ("train", "val", "test")]
    total = sum(map(len, held))
    assert sorted(np.concatenate(held)) == list(range(total))
    assert len(data.pooled_dataloader("test").dataset) == sum(data.num_samples(c, "test") for c in data.client_ids)
    x, y = next(iter(data.client_dataloader("0", "train")))
    assert x.shape == (10, 60) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert data.partition_name == "Synthetic(1, 1)"


def test_no_validation_data_as_in_the_script():
    data = SyntheticDevicesDataModule(num_clients=3, val_fraction=0.0)
    data.setup()
    assert data.client_dataloader("0", "val") is None


def test_iid_has_no_alpha():
    with pytest.raises(ValueError, match="both iid=True and alpha=1"):
        SyntheticDevicesDataModule(alpha=1, iid=True)

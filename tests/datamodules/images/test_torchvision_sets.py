import hashlib
import pickle

import numpy as np
import pytest
import torch

from fedlightning.datamodules import CIFAR100DataModule, IIDPartitioner, SVHNDataModule

datasets = pytest.importorskip("torchvision.datasets")


def digest(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def cifar100(tmp_path, monkeypatch):
    """The python version's three pickles, whose checksums torchvision is told."""
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("train", 200), ("test", 100)):
        found = {
            "data": rng.integers(0, 256, (size, 3072)).astype(np.uint8),
            "fine_labels": [k % 100 for k in range(size)],
        }
        (folder / name).write_bytes(pickle.dumps(found))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(k) for k in range(100)]}))
    kind = datasets.CIFAR100
    monkeypatch.setattr(kind, "train_list", [["train", digest(folder / "train")]])
    monkeypatch.setattr(kind, "test_list", [["test", digest(folder / "test")]])
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": digest(folder / "meta")})
    return tmp_path


def test_cifar100(cifar100):
    data = CIFAR100DataModule(str(cifar100), IIDPartitioner(2), normalize=False)
    data.prepare_data()
    data.setup()
    assert data.num_classes == 100 and sum(data.num_samples(c, "test") for c in data.client_ids) == 100
    x, y = data.client_dataloader("0", "test").dataset[0]
    raw = pickle.loads((cifar100 / "cifar-100-python" / "test").read_bytes())
    row = int(data.indices("0", "test")[0])
    assert torch.equal((x * 255).round().to(torch.uint8).flatten(), torch.from_numpy(raw["data"][row]))
    assert int(y) == raw["fine_labels"][row]


def test_svhn(tmp_path, monkeypatch):
    from scipy.io import savemat

    rng = np.random.default_rng(0)
    listed = {}
    for part, size in (("train", 60), ("test", 30)):
        path = tmp_path / f"{part}_32x32.mat"
        savemat(
            path,
            {"X": rng.integers(0, 256, (32, 32, 3, size)).astype(np.uint8), "y": (np.arange(size) % 10 + 1)[:, None]},
        )
        listed[part] = ["", path.name, digest(path)]
    monkeypatch.setattr(datasets.SVHN, "split_list", listed)
    data = SVHNDataModule(str(tmp_path), IIDPartitioner(3))
    data.prepare_data()
    data.setup()
    assert data.num_classes == 10 and data.class_counts("0", "test") == [1] * 10
    assert next(iter(data.client_dataloader("1", "test")))[0].shape == (10, 3, 32, 32)


@pytest.mark.parametrize("kind", [CIFAR100DataModule, SVHNDataModule])
def test_missing_or_damaged_files_are_said_and_nothing_is_downloaded(kind, tmp_path):
    with pytest.raises(FileNotFoundError, match="set download=True, or put them there"):
        kind(str(tmp_path)).prepare_data()

import gzip
import hashlib
import zipfile

import numpy as np
import pytest
import torch

from fedlightning.datamodules import (
    EMNISTDataModule,
    FashionMNISTDataModule,
    IIDPartitioner,
    MNISTDataModule,
    NaturalPartitioner,
    PathologicalPartitioner,
    QuantitySkewPartitioner,
)
from tests.datamodules.images.common import TEST, TRAIN, idx, ready


def write_mnist(folder, packed=False, train_labels=None):
    train_labels = np.arange(60) % 10 if train_labels is None else train_labels
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in {
        "train-images-idx3-ubyte": TRAIN,
        "train-labels-idx1-ubyte": train_labels,
        "t10k-images-idx3-ubyte": TEST,
        "t10k-labels-idx1-ubyte": np.arange(20) % 10,
    }.items():
        data = idx(array)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["", "raw", "MNIST", "MNIST/raw"])
def test_mnist_is_found_in_the_usual_places(tmp_path, packed, place):
    write_mnist(tmp_path / place, packed)
    data = ready(MNISTDataModule(str(tmp_path), IIDPartitioner(2), val_fraction=0.0, normalize=False))
    x, y = next(iter(data.pooled_dataloader("test")))
    assert x.shape == (20, 1, 28, 28) and x.dtype == torch.float32 and y.dtype == torch.int64
    held = np.concatenate([data.indices(client, "test") for client in data.client_ids])
    assert torch.allclose(x[:, 0], torch.from_numpy(TEST[held]).float() / 255) and y.tolist() == (held % 10).tolist()
    assert data.num_samples("0") == data.num_samples("1") == 30 and data.num_classes == 10


def test_pixels_are_kept_as_bytes_and_normalised_by_the_batch(tmp_path):
    write_mnist(tmp_path)
    data = ready(FashionMNISTDataModule(str(tmp_path), IIDPartitioner(2)))
    loader = data.client_dataloader("0", "train")
    assert loader.dataset.dataset.x.dtype == torch.uint8
    x = next(iter(loader))[0]
    chosen = torch.from_numpy(TRAIN[data.indices("0")[list(loader.sampler)]]).float()
    assert torch.allclose(x[:, 0], (chosen / 255 - 0.2860) / 0.3530, atol=1e-5)
    assert not data.coupled_records
    assert "in all images" in FashionMNISTDataModule(str(tmp_path), normalize="pixel").coupled_records


def test_only_some_classes_one_to_a_client(tmp_path):
    write_mnist(tmp_path)
    parts = PathologicalPartitioner(num_clients=3, classes_per_client=1)
    data = ready(FashionMNISTDataModule(str(tmp_path), parts, 50, only=[6, 0, 2], val_fraction=0.0, normalize=False))
    assert data.num_classes == data.classes == 3
    assert sorted(max((n, i) for i, n in enumerate(data.class_counts(c)))[1] for c in data.client_ids) == [0, 1, 2]
    for split, images in (("train", TRAIN), ("test", TEST)):
        for x, y in (next(iter(data.client_dataloader(client, split))) for client in data.client_ids):
            assert len(x) == len(images) // 10
            assert len(set(y.tolist())) == 1
            kept = images[np.arange(len(images)) % 10 == [6, 0, 2][int(y[0])]]
            assert sorted(x.sum((1, 2, 3)).tolist()) == pytest.approx(sorted(kept.sum((1, 2)) / 255))
    for wrong in ([], [3, 3], [0, 10], [-1]):
        with pytest.raises(ValueError, match=r"MNISTDataModule got only=.*from 0 to 9, each once"):
            MNISTDataModule(str(tmp_path), only=wrong)


def test_default_partition_and_limits(tmp_path):
    write_mnist(tmp_path)
    data = ready(MNISTDataModule(str(tmp_path), max_train=40, max_test=10))
    total = sum(data.num_samples(c, split) for c in data.client_ids for split in ("train", "val"))
    assert len(data.client_ids) == 10 and total == 40
    assert sum(data.num_samples(c, "test") for c in data.client_ids) == 10
    sizes = QuantitySkewPartitioner(3, 1.0, stratified=False)
    assert len(ready(MNISTDataModule(str(tmp_path), sizes)).client_ids) == 3
    with pytest.raises(ValueError, match="has no natural groups"):
        MNISTDataModule(str(tmp_path), NaturalPartitioner()).setup()


def test_missing_files_are_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    data = MNISTDataModule(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"t10k-labels-idx1-ubyte under root=.*download: true"):
        data.prepare_data()
    with pytest.raises(FileNotFoundError, match="t10k-images-idx3-ubyte, t10k-labels"):
        data.setup()
    with pytest.raises(FileNotFoundError, match="emnist-letters-train-images"):
        EMNISTDataModule(str(tmp_path), "letters").prepare_data()


def test_download_fetches_only_what_is_missing(tmp_path, monkeypatch):
    mirror, root = tmp_path / "mirror", tmp_path / "root"
    write_mnist(mirror, packed=True)
    sums = {
        name: hashlib.sha256((mirror / f"{name}.gz").read_bytes()).hexdigest() for name in MNISTDataModule.checksums
    }
    monkeypatch.setattr(MNISTDataModule, "mirrors", (mirror.as_uri() + "/",))
    monkeypatch.setattr(MNISTDataModule, "checksums", sums)
    data = ready(MNISTDataModule(str(root), IIDPartitioner(2), download=True))
    assert sum(data.num_samples(c, "test") for c in data.client_ids) == 20
    assert len(list((root / "MNIST" / "raw").iterdir())) == 4
    for file in mirror.iterdir():
        file.unlink()
    ready(MNISTDataModule(str(root), IIDPartitioner(2), download=True))


def test_labels_that_do_not_fit_are_refused(tmp_path):
    write_mnist(tmp_path, train_labels=np.arange(60) % 11)
    with pytest.raises(ValueError, match="labels from 0 to 10, but its classes are 0 to 9"):
        MNISTDataModule(str(tmp_path)).setup()
    write_mnist(tmp_path, train_labels=np.arange(59) % 10)
    with pytest.raises(ValueError, match="60 images and 59 labels"):
        MNISTDataModule(str(tmp_path)).setup()


def emnist_files(split="letters"):
    return {
        f"emnist-{split}-train-images-idx3-ubyte.gz": gzip.compress(idx(TRAIN)),
        f"emnist-{split}-train-labels-idx1-ubyte.gz": gzip.compress(idx(np.arange(60) % 26 + 1)),
        f"emnist-{split}-test-images-idx3-ubyte.gz": gzip.compress(idx(TEST)),
        f"emnist-{split}-test-labels-idx1-ubyte.gz": gzip.compress(idx(np.arange(20) % 26 + 1)),
    }


def test_emnist_is_upright_and_counts_from_zero(tmp_path, monkeypatch):
    archive = tmp_path / "gzip.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in emnist_files().items():
            file.writestr(f"gzip/{name}", content)
        file.writestr("gzip/emnist-digits-train-images-idx3-ubyte.gz", b"not wanted")
    monkeypatch.setattr(EMNISTDataModule, "url", archive.as_uri())
    monkeypatch.setattr(EMNISTDataModule, "checksum", hashlib.sha256(archive.read_bytes()).hexdigest())
    root = tmp_path / "root"
    options = {"partitioner": IIDPartitioner(1), "normalize": False, "val_fraction": 0.0}
    data = ready(EMNISTDataModule(str(root), "letters", download=True, **options))
    assert {path.name for path in (root / "EMNIST" / "raw").iterdir()} == set(emnist_files())
    x, y = next(iter(data.pooled_dataloader("test")))
    assert torch.allclose(x[:, 0], torch.from_numpy(TEST).transpose(1, 2).float() / 255)
    assert y.tolist() == [i % 26 for i in range(20)]
    with pytest.raises(ValueError, match="split='words'"):
        EMNISTDataModule(split="words")

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from fedlightning.datamodules import (
    CIFAR10DataModule,
    EMNISTDataModule,
    FashionMNISTDataModule,
    IIDPartitioner,
    MNISTDataModule,
    NaturalPartitioner,
    QuantitySkewPartitioner,
)
from fedlightning.datamodules.readers import cifar_batches, read_idx

RNG = np.random.default_rng(0)
TRAIN = RNG.integers(0, 256, (60, 28, 28), dtype=np.uint8)
TEST = RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return header + array.astype(np.uint8).tobytes()


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


def ready(data):
    data.prepare_data()
    data.setup()
    return data


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
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py or cifar-10-python"):
        CIFAR10DataModule(str(tmp_path)).prepare_data()
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


def test_damaged_idx_files_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(idx(TEST)[:-5])
    with pytest.raises(ValueError, match="truncated or too long: its header says 20 x 28 x 28 = 15680 bytes"):
        read_idx(path, 3)
    path.write_bytes(idx(np.arange(5)))
    with pytest.raises(ValueError, match="expected 00000803"):
        read_idx(path, 3)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="begins with nothing"):
        read_idx(path, 1)
    path.write_bytes(gzip.compress(idx(TEST))[:-20])
    with pytest.raises(ValueError, match="damaged gzip"):
        read_idx(path, 3)


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


def cifar_batch(count, first):
    data = np.full((count, 3072), first, dtype=np.uint8)
    data[:, 0] = np.arange(count)
    # As Python 2 wrote them: protocol 2, byte strings as keys.
    return pickle.dumps({b"data": data, b"labels": [i % 10 for i in range(count)]}, protocol=2)


def cifar_files():
    return {f"data_batch_{i}": cifar_batch(20, i) for i in range(1, 6)} | {"test_batch": cifar_batch(10, 9)}


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10(tmp_path, packed):
    if packed:
        with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
            for name, content in cifar_files().items():
                member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    else:
        (tmp_path / "cifar-10-batches-py").mkdir()
        for name, content in cifar_files().items():
            (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    data = ready(CIFAR10DataModule(str(tmp_path), IIDPartitioner(1), val_fraction=0.0, normalize=False))
    assert data.num_samples("0") == 100
    x, y = next(iter(data.pooled_dataloader("test")))
    assert x.shape == (10, 3, 32, 32) and y.tolist() == list(range(10))
    assert torch.allclose(x[:, 0, 0, 0] * 255, torch.arange(10.0)) and torch.allclose(x[:, 2] * 255, torch.tensor(9.0))
    scaled = ready(CIFAR10DataModule(str(tmp_path), IIDPartitioner(1), val_fraction=0.0))
    z = next(iter(scaled.pooled_dataloader("test")))[0]
    assert torch.allclose(z[:, 1], (x[:, 1] - 0.4822) / 0.2435, atol=1e-5)


def test_cifar10_pickles_run_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in cifar_files():
        (folder / name).write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(ValueError, match="no place in a CIFAR batch"):
        CIFAR10DataModule(str(tmp_path)).setup()
    (folder / "data_batch_1").unlink()
    with pytest.raises(ValueError, match="cannot be read as CIFAR-10"):
        CIFAR10DataModule(str(tmp_path)).setup()


def test_cifar10_archive_without_a_batch_is_refused(tmp_path):
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match="has no data_batch_1"):
        CIFAR10DataModule(str(tmp_path)).setup()


def peak(function):
    """Return the most memory that Python and numpy held while a function ran, in bytes."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_sizes_in_headers_are_bounded_before_memory_is_taken(tmp_path):
    path = tmp_path / "file"

    def refused(match, **options):
        def read():
            with pytest.raises(ValueError, match=match):
                read_idx(path, 3, **options)

        assert peak(read) < 2_000_000

    header = bytes([0, 0, 8, 3])
    path.write_bytes(gzip.compress(header + struct.pack(">3I", 60_000, 28, 28) + bytes(10)))
    refused(r"47040000 bytes, \d+ bytes of gzip cannot hold them")
    path.write_bytes(gzip.compress(header + struct.pack(">3I", 1000, 1, 1) + bytes(30_000_000)))
    refused("it has more")
    path.write_bytes(gzip.compress(header + struct.pack(">3I", 70_000, 28, 28) + bytes(30_000_000)))
    refused("no file of this data set: .* it can have 60000 x 28 x 28 at most", most=(60_000, 28, 28))
    path.write_bytes(header + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1))
    refused("it can have 1073741824 bytes at most")


def test_a_bomb_for_a_cifar_archive_is_refused(tmp_path):
    path = tmp_path / "cifar-10-python.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        member = tarfile.TarInfo("pax")
        member.type, member.size = tarfile.XHDTYPE, 90_000_000
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(90):
            file.write(bytes(1_000_000))

    def read():
        with pytest.raises(ValueError, match=r"cannot be read as CIFAR-10 \(it asks for 90000384 bytes"):
            cifar_batches(path, ["data_batch_1"])

    assert peak(read) < 2_000_000


@pytest.mark.parametrize(
    "code",
    [
        b"cnumpy\nndarray\n(L1000000000L\nltR.",  # an array of any size
        b"\x80\x02}r\xff\xff\xff\x3f.",  # an object with a number that makes the reader's table large
        b"\x80\x04\x8e\x00\x00\x00\x00\x02\x00\x00\x00.",  # a string that is longer than the file
        b"",
        b"\x80\x02]q\x00.",  # no batch
    ],
)
def test_damaged_cifar_pickles_are_refused(tmp_path, code):
    (tmp_path / "data_batch_1").write_bytes(code)

    def read():
        with pytest.raises(ValueError, match=r"data_batch_1 is damaged .* delete it"):
            cifar_batches(tmp_path, ["data_batch_1"])

    assert peak(read) < 2_000_000

import io
import pickle
import tarfile

import numpy as np
import pytest
import torch

from fedlightning.datamodules import CIFAR10DataModule, IIDPartitioner
from tests.datamodules.images.common import ready


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


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py or cifar-10-python"):
        CIFAR10DataModule(str(tmp_path)).prepare_data()


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

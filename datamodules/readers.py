"""Readers of image files: MNIST's idx format and CIFAR-10's pickled batches, as uint8 arrays."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes (LeCun), gzipped or not.

    Args:
        path: The file. One that begins with gzip's two magic bytes is unpacked.
        dimensions: 3 for images `(samples, rows, columns)`, 1 for labels `(samples,)`.

    Returns:
        A uint8 array.

    Raises:
        ValueError: If it is not such a file, or damaged.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.readers import read_idx
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels")
        ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))  # magic number, size 2, two labels
        ...     read_idx(path, dimensions=1)
        array([7, 9], dtype=uint8)
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError) as error:
            raise ValueError(f"{path} is a damaged gzip file ({error}); delete it and download it again.") from error
    if len(raw) < 4 + 4 * dimensions or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(
            f"{path} is no idx file of unsigned bytes in {dimensions} dimensions (it begins with "
            f"{raw[:4].hex() or 'nothing'}, expected 000008{dimensions:02x}); delete it and download it again."
        )
    shape = tuple(np.frombuffer(raw, ">i4", dimensions, offset=4).tolist())
    expected, got = int(np.prod(shape)), len(raw) - 4 - 4 * dimensions
    if got != expected:
        raise ValueError(
            f"{path} is truncated or too long: its header says {' x '.join(map(str, shape))} = {expected} bytes, it "
            f"has {got}; delete it and download it again."
        )
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


class _ArrayUnpickler(pickle.Unpickler):
    """Opens pickles of plain containers and numpy arrays, and nothing that could run code."""

    _ALLOWED = frozenset(
        {
            (module, name)
            for package in ("numpy.core", "numpy._core")
            for module, name in ((f"{package}.multiarray", "_reconstruct"), (f"{package}.multiarray", "scalar"))
        }
        | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        | {(f"{package}.numeric", "_frombuffer") for package in ("numpy.core", "numpy._core")}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR batch")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def cifar_batches(source: Path, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and labels of CIFAR-10's python batches (Krizhevsky 2009).

    Args:
        source: The folder `cifar-10-batches-py` or the archive `cifar-10-python.tar.gz`.
        names: Batches to read and join, such as `data_batch_1`.

    Returns:
        Uint8 images `(samples, 3, 32, 32)` and int64 labels `(samples,)`.

    Raises:
        ValueError: If a batch is missing or damaged.

    Example:
        >>> import pickle
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.readers import cifar_batches
        >>> with TemporaryDirectory() as folder:
        ...     batch = {b"data": [[0] * 3072] * 2, b"labels": [3, 8]}
        ...     _ = Path(folder, "test_batch").write_bytes(pickle.dumps(batch))
        ...     images, labels = cifar_batches(Path(folder), ["test_batch"])
        >>> images.shape, labels
        ((2, 3, 32, 32), array([3, 8]))
    """
    found: dict[str, bytes] = {}
    try:
        if source.is_dir():
            found = {name: (source / name).read_bytes() for name in names}
        else:
            with tarfile.open(source) as archive:
                for member in archive:
                    name = Path(member.name).name
                    if name in names and (file := archive.extractfile(member)) is not None:
                        found[name] = file.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ValueError(f"{source} cannot be read as CIFAR-10 ({error}); delete it and download it again.") from error
    images, labels = [], []
    for name in names:
        if name not in found:
            raise ValueError(f"{source} has no {name}; delete it and download it again.")
        try:
            batch = _ArrayUnpickler(io.BytesIO(found[name]), encoding="bytes").load()
            images.append(np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
            labels.append(np.asarray(batch[b"labels"], dtype=np.int64))
        except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}: {name} is damaged ({error!r}); delete it and download it again.") from error
    return np.concatenate(images), np.concatenate(labels)


def check_images(name: str, images: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
    """Check that images and labels belong together.

    Args:
        name: Name of the data, for messages.
        images: Images, shape `(samples, ...)`.
        labels: Labels, shape `(samples,)`.
        num_classes: Number of classes.

    Raises:
        ValueError: If their numbers differ, or a label is outside `0 .. num_classes - 1`.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.readers import check_images
        >>> check_images("The test part", np.zeros((2, 1, 8, 8)), np.array([0]), num_classes=10)
        Traceback (most recent call last):
        ValueError: The test part has 2 images and 1 labels; the files do not belong together.
    """
    if len(images) != len(labels):
        raise ValueError(f"{name} has {len(images)} images and {len(labels)} labels; the files do not belong together.")
    if len(labels) and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"{name} has labels from {labels.min()} to {labels.max()}, but its classes are 0 to {num_classes - 1}; the "
            "files belong to another data set or are damaged."
        )

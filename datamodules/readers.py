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
    """An idx file of unsigned bytes (LeCun), gzipped or not.

    Args:
        path: the file; one that begins with gzip's two magic bytes is unpacked.
        dimensions: 3 for images ``(n, rows, columns)``, 1 for labels ``(n,)``.

    Raises:
        ValueError: not such a file, or cut short.
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
    """Images and labels of CIFAR-10's python batches (Krizhevsky 2009).

    Args:
        source: the folder ``cifar-10-batches-py`` or the archive ``cifar-10-python.tar.gz``.
        names: batches to read and join, such as ``data_batch_1``.

    Returns:
        uint8 images ``(n, 3, 32, 32)`` and int64 labels ``(n,)``.

    Raises:
        ValueError: a batch is missing or damaged.
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
    """A ``ValueError`` for images and labels that do not belong together, or labels outside of the classes."""
    if len(images) != len(labels):
        raise ValueError(f"{name} has {len(images)} images and {len(labels)} labels; the files do not belong together.")
    if len(labels) and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"{name} has labels from {labels.min()} to {labels.max()}, but its classes are 0 to {num_classes - 1}; the "
            "files belong to another data set or are damaged."
        )

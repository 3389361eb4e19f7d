"""Readers of image files: MNIST's idx format and CIFAR-10's pickled batches, as uint8 arrays."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

LARGEST_IDX = 2**30
"""Bytes of an idx file's array that are read where the caller knows no better bound; EMNIST's largest has 0.55e9."""
LARGEST_BATCH = 2**26
"""Bytes of a CIFAR batch that are read; the real ones have 31e6."""
LARGEST_ARCHIVE = 2**29
"""Bytes of an unpacked CIFAR archive that are read; the real one has 186e6."""
GZIP_RATIO = 1032
"""The most bytes that one byte of a deflated stream can become."""
_CHUNK = 2**20


def read_idx(path: Path, dimensions: int, most: Sequence[int] | None = None) -> np.ndarray:
    """Read an idx file of unsigned bytes (LeCun), gzipped or not.

    The sizes in the header are compared with `most` and with what the file can hold before memory is taken for them,
    and no more than they say is unpacked.

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
    again = "delete it and download it again"
    begin = 4 + 4 * dimensions
    with path.open("rb") as plain:
        packed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        file: Any = gzip.GzipFile(fileobj=plain) if packed else plain
        try:
            head = file.read(begin)
            if len(head) < begin or head[:4] != bytes([0, 0, 8, dimensions]):
                raise ValueError(
                    f"{path} is not an idx file of unsigned bytes in {dimensions} dimensions (it begins with "
                    f"{head[:4].hex() or 'nothing'}, expected 000008{dimensions:02x}); {again}."
                )
            shape = tuple(np.frombuffer(head, ">u4", dimensions, offset=4).tolist())
            expected, size = math.prod(shape), path.stat().st_size
            header_text = f"its header says {' x '.join(map(str, shape))} = {expected} bytes"
            if any(a > b for a, b in zip(shape, most, strict=True)) if most is not None else expected > LARGEST_IDX:
                bound = " x ".join(map(str, most)) if most is not None else f"{LARGEST_IDX} bytes"
                raise ValueError(
                    f"{path} is not a file of this data set: {header_text}, and it can have {bound} at most; {again}."
                )
            if expected > size * GZIP_RATIO if packed else expected != size - begin:
                has = f"{size} bytes of gzip cannot hold them" if packed else f"it has {size - begin}"
                raise ValueError(f"{path} is truncated or too long: {header_text}, {has}; {again}.")
            array = np.empty(expected, dtype=np.uint8)
            got, room = 0, memoryview(array.data)
            while got < expected and (count := file.readinto(room[got : got + _CHUNK])):
                got += count
            rest = file.read(1)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is a damaged gzip file ({error}); {again}.") from error
    if got < expected or rest:
        raise ValueError(f"{path} is truncated or too long: {header_text}, it has {'more' if rest else got}; {again}.")
    return array.reshape(shape)


class _Bounded:
    """A file that hands out no more than it should, so that a header inside an archive cannot make it take memory."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LARGEST_BATCH or self._file.tell() + size > LARGEST_ARCHIVE:
            raise tarfile.ReadError(f"it asks for {size} bytes, more than CIFAR-10 has there")
        data: bytes = self._file.read(size)
        return data

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or position > LARGEST_ARCHIVE:
            raise tarfile.ReadError(f"it is longer than the {LARGEST_ARCHIVE} bytes that CIFAR-10 may have")
        place: int = self._file.seek(position)
        return place

    def tell(self) -> int:
        place: int = self._file.tell()
        return place


class _Name:
    """Stands for `numpy.ndarray` in a pickle, where only its name has a use: called, it could take any memory."""


def _empty_array(kind: Any, shape: Any, dtype: Any) -> np.ndarray:
    """Return the empty array that the pickle of an array begins with; its content and shape follow."""
    return np.empty(0, dtype=np.uint8)


class _ArrayUnpickler(pickle.Unpickler):
    """Opens pickles of plain containers and numpy arrays, and nothing that could run code or take more memory."""

    _ALLOWED = frozenset(
        {(f"{package}.multiarray", "scalar") for package in ("numpy.core", "numpy._core")}
        | {("numpy", "dtype"), ("_codecs", "encode")}
        | {(f"{package}.numeric", "_frombuffer") for package in ("numpy.core", "numpy._core")}
    )
    _REPLACED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): _Name,
        ("numpy.core.multiarray", "_reconstruct"): _empty_array,
        ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._REPLACED:
            return self._REPLACED[module, name]
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR batch")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _unpickled(data: bytes) -> Any:
    """Return the object of a pickle, after a look at the lengths and places that it claims."""
    for operation, argument, _ in pickletools.genops(data):  # checks that strings are as long as they say
        if "PUT" in operation.name and argument is not None and int(argument) > len(data):
            raise pickle.UnpicklingError(f"it has an object number {argument} in {len(data)} bytes")
    return _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()


def cifar_batches(source: Path, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and labels of CIFAR-10's python batches (Krizhevsky 2009).

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
    content_by_name: dict[str, bytes] = {}
    try:
        if source.is_dir():
            for name in names:
                with (source / name).open("rb") as file:
                    content_by_name[name] = _small(file, source / name)
        else:
            with gzip.open(source) as unpacked, tarfile.open(fileobj=_Bounded(unpacked), mode="r:") as archive:  # type: ignore[call-overload]
                for member in archive:
                    name = Path(member.name).name
                    if name in names and (content := archive.extractfile(member)) is not None:
                        content_by_name[name] = _small(content, member.name)
    except (OSError, EOFError, zlib.error, tarfile.TarError, _TooLarge) as error:
        raise ValueError(f"{source} cannot be read as CIFAR-10 ({error}); delete it and download it again.") from error
    images, labels = [], []
    for name in names:
        if name not in content_by_name:
            raise ValueError(f"{source} has no {name}; delete it and download it again.")
        try:
            batch = _unpickled(content_by_name[name])
            images.append(np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
            labels.append(np.asarray(batch[b"labels"], dtype=np.int64))
        except (*_DAMAGE, KeyError) as error:
            raise ValueError(f"{source}: {name} is damaged ({error!r}); delete it and download it again.") from error
    return np.concatenate(images), np.concatenate(labels)


class _TooLarge(ValueError):
    """A batch is larger than any of CIFAR-10."""


_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    MemoryError,
    ImportError,
)
"""What a damaged pickle can raise."""


def _small(file: Any, name: Any) -> bytes:
    """Return the content of a batch's file."""
    data = bytearray()
    while chunk := file.read(_CHUNK):  # one read() of the limit would take that much memory for any file
        data += chunk
        if len(data) > LARGEST_BATCH:
            raise _TooLarge(f"{name} has more than {LARGEST_BATCH} bytes, a real batch half of that")
    return bytes(data)


def check_images(name: str, images: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
    """Check that images and labels belong together.

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

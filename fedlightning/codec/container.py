"""A text and tensors as bytes, in the layout of safetensors, and back with every bound checked before memory is taken."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlightning.compat.lazy_clones import to_read
from fedlightning.storage.files import UnreadableError

VERSION = "2"
"""Version of the format. A reader takes this one only."""
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""Names of safetensors."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_DIMENSIONS = 64
MOST_ELEMENTS = 2**62


@dataclass(frozen=True)
class Limits:
    """What a reader accepts.

    Attributes:
        num_bytes: Length of a message.
        header_bytes: Length of its header: names, shapes, and all values that are not tensors.
        tensors: Number of its tensors.
        values: Number of its values: each entry of a list or dict counts.
        depth: Levels of lists and dicts in one another.
    """

    num_bytes: int = 2**31
    header_bytes: int = 2**24
    tensors: int = 100_000
    values: int = 2_000_000
    depth: int = 64


UNLIMITED = Limits(*[2**63] * 5)
"""Of a file of a run: nothing is taken that its own length does not hold."""


def layout(text: str, tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a text and tensors as pieces of bytes; no tensor in the memory of the CPU is copied.

    Example:
        >>> data = b"".join(layout("two", [torch.ones(2, dtype=torch.bfloat16), torch.tensor(3)]))
        >>> unpack(data)
        ('two', [tensor([1., 1.], dtype=torch.bfloat16), tensor(3)])
    """
    header: dict[str, Any] = {"__metadata__": {"format": "fedlightning", "version": VERSION, "message": text}}
    end = 0
    # wide dtypes first: so every tensor lies at a multiple of its dtype's size
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
    for number in order:
        tensor = tensors[number]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[str(number)] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    written = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    yield struct.pack("<Q", len(written)) + written
    for number in order:
        yield _bytes_of(to_read(tensors[number].detach().to("cpu").contiguous()))


def unpack(data: bytes | bytearray | memoryview, limits: Limits | None = None) -> tuple[str, list[Tensor]]:
    """Return the text and the tensors that :func:`layout` was given. They are copies: they do not hold on to `data`."""
    view = memoryview(data).cast("B")

    def fill(start: int, target: memoryview) -> None:
        target[:] = view[start : start + len(target)]

    return _unpacked(len(view), fill, limits or Limits())


def unpack_file(path: Path) -> tuple[str, list[Tensor]]:
    """Return the text and the tensors of a file, which are read into their own memory."""
    with path.open("rb") as file:

        def fill(start: int, target: memoryview) -> None:
            file.seek(start)
            if file.readinto(target) != len(target):  # it has become shorter since
                raise UnreadableError("it breaks off")

        return _unpacked(path.stat().st_size, fill, UNLIMITED)


def _unpacked(size: int, fill: Callable[[int, memoryview], None], limits: Limits) -> tuple[str, list[Tensor]]:
    """Read `size` bytes, of which `fill` gives those from a place on."""
    if size > limits.num_bytes:
        raise UnreadableError(f"it has {size} bytes, and at most {limits.num_bytes} are accepted")
    if size < 8:
        raise UnreadableError(f"{size} bytes are not even the length of its header")
    start = bytearray(8)
    fill(0, memoryview(start))
    length = struct.unpack("<Q", start)[0]
    if length > min(limits.header_bytes, size - 8):
        raise UnreadableError(
            f"its header claims {length} bytes; {size - 8} are there and {limits.header_bytes} are accepted"
        )
    written = bytearray(length)
    fill(8, memoryview(written))
    header = _header(written)
    text = _text(header.pop("__metadata__", None))
    if len(header) > limits.tensors:
        raise UnreadableError(f"it has {len(header)} tensors, and at most {limits.tensors} are accepted")
    tensors = []
    for dtype, shape, begin, end in _places(header, size - 8 - length):
        tensor = torch.empty(shape, dtype=dtype)  # torch's own alignment, on which the paths of kernels depend
        if end > begin:
            fill(8 + length + begin, _bytes_of(tensor))
            check_truth(tensor)
        tensors.append(tensor)
    return text, tensors


def _header(written: bytearray) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("a name occurs twice")
        return entries

    try:
        header = json.loads(written.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"its header is not JSON ({' '.join(str(error).split()):.200})") from None
    if not isinstance(header, dict):
        raise UnreadableError("its header holds no entries")
    return header


def _text(metadata: Any) -> str:
    if not isinstance(metadata, dict) or metadata.get("format") != "fedlightning":
        raise UnreadableError("it is not of FedLightning")
    if metadata.get("version") != VERSION:
        raise UnreadableError(
            f"its format has the version {metadata.get('version')!r:.40}, and this FedLightning reads version {VERSION!r}. "
            "Use one version of FedLightning for all"
        )
    if not isinstance(metadata.get("message"), str):
        raise UnreadableError("it says nothing beside its tensors")
    return metadata["message"]


def _places(header: Mapping[str, Any], available: int) -> list[tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Return dtype, shape and place of each tensor, by number; together they must be all bytes that are there."""
    places: dict[int, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    for name, entry in header.items():
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else -1
        if number < 0 or number >= len(header) or str(number) != name:
            raise UnreadableError(f"it has {len(header)} tensors, and one called {name!r:.40}")
        places[number] = _place(name, entry, available)
    end = 0
    for _, _, start, after in sorted(places.values(), key=lambda place: place[2:]):
        if start != end:
            raise UnreadableError("its tensors overlap, or leave gaps")
        end = after
    if end != available:
        raise UnreadableError(f"its tensors are {end} bytes, and {available} came")
    return [places[number] for number in range(len(header))]


def _place(name: str, entry: Any, available: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        whole = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise UnreadableError(f"what it says of tensor {name} is not dtype, shape and place") from None
    if (
        any(type(size) is not int or size < 0 or size >= MOST_ELEMENTS for size in whole)
        or len(shape) > MOST_DIMENSIONS
    ):
        raise UnreadableError(f"shape or place of tensor {name} are not counts")
    # of an empty tensor too: torch multiplies the sizes that are not 0
    if math.prod(size or 1 for size in shape) >= MOST_ELEMENTS:
        raise UnreadableError(f"tensor {name} has no possible shape")
    if end > available or end - start != math.prod(shape) * dtype.itemsize:
        raise UnreadableError(
            f"tensor {name} of shape {tuple(shape)} is said to lie at bytes {start} to {end} of {available}"
        )
    return dtype, tuple(shape), start, end


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def check_truth(tensor: Tensor) -> None:
    """Refuse truth values that are neither 0 nor 1: what is done with them is not defined."""
    if tensor.dtype is torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        raise UnreadableError("a tensor of truth values holds something else")

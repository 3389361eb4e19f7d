"""Tensors and one text as bytes, in the layout of safetensors, and back with every bound checked before memory is taken.

What a field that is read must be: what its annotation says, exactly.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

Check = Callable[[Any], bool]
Whole = Annotated[int, "from -2**63"]
"""An integer that may be below 0; any other `int` of a field is a count."""
LISTS: dict[Any, tuple[type, ...]] = {list: (list,), tuple: (tuple,), Collection: (tuple,), Sequence: (list, tuple)}
"""By the origin of an annotation, the classes of what it stands for."""


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) is float or _whole(value)  # longer integers are no floats, and end whoever adds them up


def check_of(hint: Any) -> Check:
    """Return what tells whether a value is what an annotation says: no subclass, and no number that a file cannot hold.

    Example:
        >>> check_of(dict[str, int | None])({"a": 1, "b": None}), check_of(tuple[int, ...])((1, -1))
        (True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint == Whole:
        return _whole
    if hint is Any:
        return lambda value: True
    if hint in (None, NoneType):
        return lambda value: value is None
    if hint is int:
        return lambda value: _whole(value) and value >= 0
    if hint is float:
        return _number
    if hint is Tensor:
        return lambda value: isinstance(value, Tensor)
    if origin is Literal:
        return lambda value: type(value) is str and value in inner
    if origin is None:
        return lambda value: type(value) is hint
    if origin in (dict, Mapping):
        name, entry = map(check_of, inner)
        return lambda value: isinstance(value, dict) and all(name(key) and entry(one) for key, one in value.items())
    checks = [check_of(one) for one in inner if one is not ...]
    if origin is UnionType:
        return lambda value: any(check(value) for check in checks)
    if origin is tuple and len(checks) == len(inner):
        return lambda value: (
            type(value) is tuple
            and len(value) == len(checks)
            and all(check(one) for check, one in zip(checks, value, strict=True))
        )
    return lambda value: type(value) in LISTS[origin] and all(map(checks[0], value))


VERSION = "1"
"""Version of the format. A reader takes this one only."""
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Names of safetensors."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_DIMENSIONS = 64
MOST_ELEMENTS = 2**62


class WireError(ValueError):
    """Bytes that are no message, or a value that none can hold. The text is a sentence."""


@dataclass(frozen=True)
class Limits:
    """What a reader accepts.

    Attributes:
        num_bytes: Length of a message.
        header_bytes: Length of its header: names, shapes, and all values that are no tensors.
        tensors: Number of its tensors.
        values: Number of its values: each entry of a list or dict counts.
        depth: Levels of lists and dicts in one another.
    """

    num_bytes: int = 2**31
    header_bytes: int = 2**24
    tensors: int = 100_000
    values: int = 2_000_000
    depth: int = 64


def pack(text: str, tensors: Sequence[Tensor]) -> bytes:
    """Lay out a text and tensors.

    Example:
        >>> text, tensors = unpack(pack("two", [torch.ones(2, dtype=torch.bfloat16), torch.tensor(3)]))
        >>> text, tensors[0], tensors[1]
        ('two', tensor([1., 1.], dtype=torch.bfloat16), tensor(3))
    """
    header: dict[str, Any] = {"__metadata__": {"format": "fedlightning", "version": VERSION, "message": text}}
    chunks: list[memoryview] = []
    end = 0
    # wide dtypes first: so every tensor lies at a multiple of its dtype's size
    for number in sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size()):
        tensor = tensors[number]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[str(number)] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        chunks.append(_bytes_of(tensor.detach().to("cpu").contiguous()))
    written = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    return b"".join([struct.pack("<Q", len(written)), written, *chunks])


def unpack(data: bytes | bytearray | memoryview, limits: Limits | None = None) -> tuple[str, list[Tensor]]:
    """Return the text and the tensors that :func:`pack` was given."""
    limits = limits or Limits()
    view = memoryview(data).cast("B")
    if len(view) > limits.num_bytes:
        raise WireError(f"A message of {len(view)} bytes was refused: at most {limits.num_bytes} are accepted.")
    if len(view) < 8:
        raise WireError(f"A message was refused: {len(view)} bytes are not even the length of its header.")
    length = struct.unpack("<Q", view[:8])[0]
    if length > min(limits.header_bytes, len(view) - 8):
        raise WireError(
            f"A message was refused: its header claims {length} bytes; {len(view) - 8} are there and "
            f"{limits.header_bytes} are accepted."
        )
    header = _header(bytes(view[8 : 8 + length]))
    text = _text(header.pop("__metadata__", None))
    if len(header) > limits.tensors:
        raise WireError(f"A message with {len(header)} tensors was refused: at most {limits.tensors} are accepted.")
    places = _places(header, len(view) - 8 - length)
    content = view[8 + length :]
    return text, [_tensor(content[start:end], dtype, shape) for dtype, shape, start, end in places]


def _header(written: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        header = json.loads(written.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise WireError(
            f"A message was refused: its header is no JSON ({' '.join(str(error).split()):.200})."
        ) from None
    if not isinstance(header, dict):
        raise WireError("A message was refused: its header holds no entries.")
    return header


def _text(metadata: Any) -> str:
    if not isinstance(metadata, dict) or metadata.get("format") != "fedlightning":
        raise WireError("A message was refused: it is not of FedLightning.")
    if metadata.get("version") != VERSION:
        raise WireError(
            f"A message of format version {metadata.get('version')!r:.40} was refused: this FedLightning reads version "
            f"{VERSION!r}. Install the same version on both sides."
        )
    if not isinstance(metadata.get("message"), str):
        raise WireError("A message was refused: it says nothing beside its tensors.")
    return metadata["message"]


def _places(header: Mapping[str, Any], available: int) -> list[tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Return dtype, shape and place of each tensor, by number; together they must be all bytes that are there."""
    found: dict[int, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    for name, entry in header.items():
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else -1
        if number < 0 or number >= len(header) or str(number) != name:
            raise WireError(f"A message was refused: it has {len(header)} tensors, and one called {name!r:.40}.")
        found[number] = _place(name, entry, available)
    end = 0
    for _, _, start, after in sorted(found.values(), key=lambda place: place[2:]):
        if start != end:
            raise WireError("A message was refused: its tensors overlap, or leave gaps.")
        end = after
    if end != available:
        raise WireError(f"A message was refused: its tensors are {end} bytes, and {available} came.")
    return [found[number] for number in range(len(header))]


def _place(name: str, entry: Any, available: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        whole = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise WireError(
            f"A message was refused: what it says of tensor {name} is not dtype, shape and place."
        ) from None
    if (
        any(type(size) is not int or size < 0 or size >= MOST_ELEMENTS for size in whole)
        or len(shape) > MOST_DIMENSIONS
    ):
        raise WireError(f"A message was refused: shape or place of tensor {name} are no counts.")
    # of an empty tensor too: torch multiplies the sizes that are not 0
    if math.prod(size or 1 for size in shape) >= MOST_ELEMENTS:
        raise WireError(f"A message was refused: tensor {name} has no possible shape.")
    if end > available or end - start != math.prod(shape) * dtype.itemsize:
        raise WireError(
            f"A message was refused: tensor {name} of shape {tuple(shape)} is said to lie at bytes {start} to {end} of "
            f"{available}."
        )
    return dtype, tuple(shape), start, end


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    made = torch.empty(shape, dtype=dtype)  # torch's own alignment, on which the paths of kernels depend
    if not content.nbytes:
        return made
    if dtype is torch.bool and np.frombuffer(content, np.uint8).max() > 1:
        raise WireError("A message was refused: a tensor of truth values holds something else.")
    _bytes_of(made)[:] = content
    return made

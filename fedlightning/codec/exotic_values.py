"""Values that are not code and that JSON does not hold: their parts, which are plain values and tensors, and the way back.

Keys that are made to be slow: a dict or set of many values with one hash takes quadratic time.
"""

from __future__ import annotations

import argparse
import io
import pickletools
import random
import struct
import types
import uuid
import zipfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict

from fedlightning.codec.allowed import plain_kind
from fedlightning.storage.files import read_tensors

MAX_EQUAL_HASHES = 64
"""Keys of one container that may have one hash. Texts have secret hashes; numbers, and tuples of them, can be chosen to share
one. Honest ones hardly ever do (-1 and -2)."""
MOST_LARGE = 10_000
"""Integers beyond 32 bits in an exported checkpoint."""
MOST_IN_TUPLE = 10_000_000
"""Values in a tuple of such a file, counted as often as they occur in it."""


class Collisions:
    """Counts the hashes of the keys of one container.

    Example:
        >>> collisions = Collisions()
        >>> for number in range(100):
        ...     collisions.add(number * (2**61 - 1))
        Traceback (most recent call last):
            ...
        ValueError: keys are made to be slow: too many of them have one hash
    """

    def __init__(self) -> None:
        self._same: dict[int, int] = {}

    def add(self, key: Hashable) -> None:
        """Count a key, before it is put into the container."""
        if type(key) is not str:
            mark = hash(key)
            self._same[mark] = self._same.get(mark, 0) + 1
            if self._same[mark] > MAX_EQUAL_HASHES:
                raise ValueError("keys are made to be slow: too many of them have one hash")


def slow_keys(path: Path) -> str | None:
    """Return why torch could take for ever to read an archive of `torch.save`; `None` if it could not.

    The keys of a dict do that where many large integers share a hash, and where a tuple holds another twice, which does so
    too, and so on: its hash is computed anew each time. A pickle that breaks off is refused: torch would read what is before.
    """
    count = 0
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.compress_type == zipfile.ZIP_STORED]
            contents = [archive.read(entry) for entry in entries if entry.filename.lower().endswith("data.pkl")]
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile):
        return None
    try:
        for content in contents:
            count += sum(code.name in ("LONG", "LONG1", "LONG4") for code, _, _ in pickletools.genops(content))
            if count > MOST_LARGE:
                return "it holds more large integers than any module: they could be keys that take for ever"
            if _largest_tuple(content) > MOST_IN_TUPLE:
                return "it holds tuples within tuples that could be keys that take for ever"
    except (ValueError, LookupError, TypeError, struct.error) as error:
        return f"its pickle is damaged ({error!s:.100})"
    return None


def _largest_tuple(content: bytes) -> int:
    """Return the number of values in the largest tuple of a pickle, those in its tuples included, as often as they occur."""
    stack: list[int | None] = []  # how much each value holds; None is a mark
    memo: dict[Any, int] = {}
    largest = 0
    for code, argument, _ in pickletools.genops(content):
        place: Any = argument
        if code.name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if code.name == "MEMOIZE" else place] = stack[-1] or 1
            continue
        taken = 0
        for kind in reversed(code.stack_before):
            while kind is pickletools.stackslice and stack[-1] is not None:
                taken += stack.pop() or 1
            if kind is not pickletools.stackslice:
                taken += stack.pop() or 1
        if code.name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[place])
        elif "TUPLE" in code.name:
            stack.append(taken + 1)
            largest = max(largest, taken)
        else:
            stack.extend(None if kind is pickletools.markobject else 1 for kind in code.stack_after)
    return largest


FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@dataclass(frozen=True)
class Leaf:
    """A kind of value.

    Attributes:
        name: Its name in files.
        parts: Takes a value apart into plain ones; raises ValueError for one that cannot be saved.
        whole: Puts it together again.
    """

    name: str
    parts: Callable[[Any], Any]
    whole: Callable[[Any], Any]


def enum_member(path: str, value: Any) -> Enum:
    """Return the member of an enum that is imported already. Enums are not called: `_missing_` may be anybody's code."""
    enum = plain_kind(path, Enum)
    if issubclass(enum, Flag) and type(value) is int and enum._missing_.__func__ is Flag._missing_.__func__:  # type: ignore[attr-defined]
        return enum(value)  # a combination of flags
    for member in enum.__members__.values():
        if type(member.value) is type(value) and member.value == value:
            return cast(Enum, member)
    raise ValueError(f"{value!r:.60} is no {enum.__name__}")


def named_tuple(path: str, values: list[Any]) -> Any:
    """Return a named tuple, of a class that is imported already."""
    cls = plain_kind(path, tuple)
    if not hasattr(cls, "_fields") or len(cls._fields) != len(values):
        raise ValueError(f"{path} is not a named tuple of {len(values)} fields")
    return tuple.__new__(cls, values)


def listed(value: Any, kinds: tuple[type, ...] = (list, tuple)) -> Any:
    """Return a value where values one by one are wanted; a range or a text could stand for any number of them."""
    if type(value) not in kinds:
        raise ValueError(f"a {type(value).__name__} is no {kinds[0].__name__}")
    return value


def named(value: Any) -> dict[Any, Any]:
    """Return a dict, whose keys have been looked at; pairs could be made to be slow."""
    return cast(dict[Any, Any], listed(value, (dict,)))


def _bytes(value: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


def bytes_in(value: Any) -> np.ndarray:
    """Return the bytes that a tensor is; no other value stands for bytes, nor does a view that stands for more than it is."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or not value.is_contiguous():
        raise ValueError("bytes are not stored as bytes")
    return value.numpy()


def _array(value: np.ndarray) -> Any:
    if value.dtype.kind not in "biufcmMSU" or value.dtype.fields is not None:
        raise ValueError(f"is an array of dtype {value.dtype}")
    try:
        plain = value.flags.writeable and min(value.strides, default=0) >= 0
        return torch.from_numpy(value if plain else value.copy("K"))
    except (TypeError, ValueError):  # texts, dates, another order of bytes, odd strides
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        return [value.dtype.str, list(value.shape), order, _bytes(value.tobytes(order))]  # type: ignore[arg-type]


def _from_array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return value.numpy()  # of a dtype that numpy lacks: TypeError
    kind, shape, order, content = value
    dtype = np.dtype(str(kind))
    if dtype.hasobject or dtype.kind not in "biufcmMSU":
        raise ValueError(f"an array of dtype {dtype} has no place here")
    return np.frombuffer(bytes_in(content), dtype=dtype).reshape(tuple(listed(shape)), order=str(order))  # type: ignore[call-overload]


def _archived(value: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return _bytes(file.getvalue())


def _from_archive(content: Any) -> torch.Tensor:
    tensor = read_tensors(io.BytesIO(bytes_in(content).data))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"a {type(tensor).__name__} is not a tensor")
    return cast(torch.Tensor, tensor)


def _factory(value: defaultdict[Any, Any]) -> list[Any]:
    factory = value.default_factory
    if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise ValueError(f"is a defaultdict with the factory {factory!r}")
    return [None if factory is None else factory.__name__, dict(value)]


def _zoned(value: Any) -> str:
    if value.tzinfo is not None and not isinstance(value.tzinfo, timezone):
        raise ValueError(f"is a time in the zone {value.tzinfo}, which is code; use a fixed offset")
    return f"{value.fold}{value.isoformat()}"


def _generator(value: np.random.Generator) -> dict[str, Any]:
    name = type(value.bit_generator).__name__
    if name not in BIT_GENERATORS:
        raise ValueError(f"is a generator over {name}")
    return dict(value.bit_generator.state)


def _from_generator(state: dict[str, Any]) -> np.random.Generator:
    if state["bit_generator"] not in BIT_GENERATORS:
        raise ValueError(f"there is no generator {state['bit_generator']!r}")
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = _within_bounds(state)
    return np.random.Generator(bits)


def _within_bounds(state: dict[str, Any]) -> dict[str, Any]:
    """Refuse a place outside a generator's buffer, which numpy takes, and reads memory that is not its own."""
    for place, most in ((state["state"].get("pos", 0), 624), (state.get("buffer_pos", 0), 4)):
        if type(place) is not int or not 0 <= place <= most:
            raise ValueError(f"a generator's place is {place!r:.40}")
    return state


def _from_random_state(state: Any) -> np.random.RandomState:
    random_state = np.random.RandomState()
    random_state.set_state(_within_bounds(state))
    return random_state


def _from_random(state: Any) -> random.Random:
    generator = random.Random()
    generator.setstate(state)
    return generator


def _from_torch_generator(parts: list[Any]) -> torch.Generator:
    return torch.Generator(device=parts[0]).set_state(parts[1])


def sort_set(value: set[Any] | frozenset[Any]) -> list[Any]:
    """List a set; texts and numbers in an order that does not differ between processes, as hashes of texts do."""
    if not all(type(entry) in (str, int, float, bool, bytes) for entry in value):
        return list(value)
    return sorted(value, key=lambda entry: (type(entry).__name__, repr(entry)))


def _from_fraction(parts: list[Any]) -> Fraction:
    if [type(part) for part in listed(parts)] != [int, int]:  # a text may stand for a number of any length
        raise ValueError("a fraction is of two integers")
    return Fraction(*parts)


def _from_deque(parts: list[Any]) -> deque[Any]:
    return deque(listed(parts[0]), maxlen=parts[1])


def _from_factory(parts: list[Any]) -> defaultdict[Any, Any]:
    return defaultdict(None if parts[0] is None else FACTORIES[parts[0]], named(parts[1]))


CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if type(value) in (torch.dtype, torch.layout, torch.memory_format)
}
"""Torch's own constants by their text; nothing else is looked up in it, since some of its names import more."""


def _constant(kind: type) -> Leaf:
    def whole(text: str) -> Any:
        if type(CONSTANTS[text]) is not kind:
            raise ValueError(f"{text} is no {kind.__name__}")
        return CONSTANTS[text]

    return Leaf(kind.__name__, str, whole)


BY_TYPE: dict[type, Leaf] = {
    bytes: Leaf("bytes", _bytes, lambda value: bytes_in(value).tobytes()),
    bytearray: Leaf("bytearray", _bytes, lambda value: bytearray(bytes_in(value))),
    int: Leaf("int", hex, lambda text: int(text, 16)),  # a long one
    # with half of a surrogate pair, which no UTF-8 holds
    str: Leaf("str", lambda value: [ord(letter) for letter in value], lambda codes: "".join(map(chr, listed(codes)))),
    complex: Leaf("complex", lambda value: [value.real, value.imag], lambda parts: complex(*listed(parts))),
    deque: Leaf("deque", lambda value: [list(value), value.maxlen], _from_deque),
    defaultdict: Leaf("defaultdict", _factory, _from_factory),
    Counter: Leaf("Counter", dict, lambda value: Counter(named(value))),
    types.MappingProxyType: Leaf("mappingproxy", dict, lambda value: types.MappingProxyType(named(value))),
    AttributeDict: Leaf("AttributeDict", dict, lambda value: AttributeDict(named(value))),
    types.SimpleNamespace: Leaf("SimpleNamespace", vars, lambda value: types.SimpleNamespace(**value)),
    argparse.Namespace: Leaf("Namespace", vars, lambda value: argparse.Namespace(**value)),
    range: Leaf("range", lambda value: [value.start, value.stop, value.step], lambda parts: range(*listed(parts))),
    slice: Leaf("slice", lambda value: [value.start, value.stop, value.step], lambda parts: slice(*listed(parts))),
    type(...): Leaf("ellipsis", lambda value: None, lambda value: ...),
    Decimal: Leaf("Decimal", str, Decimal),
    Fraction: Leaf("Fraction", lambda value: [value.numerator, value.denominator], _from_fraction),
    uuid.UUID: Leaf("UUID", str, uuid.UUID),
    datetime: Leaf("datetime", _zoned, lambda text: datetime.fromisoformat(text[1:]).replace(fold=int(text[0]))),
    date: Leaf("date", date.isoformat, date.fromisoformat),
    time: Leaf("time", _zoned, lambda text: time.fromisoformat(text[1:]).replace(fold=int(text[0]))),
    timedelta: Leaf(
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*listed(parts)),
    ),
    type(Path()): Leaf("path", str, Path),
    type(PurePath()): Leaf("purepath", str, PurePath),
    np.ndarray: Leaf("array", _array, _from_array),
    np.random.Generator: Leaf("numpy.Generator", _generator, _from_generator),
    np.random.RandomState: Leaf("numpy.RandomState", lambda value: value.get_state(legacy=False), _from_random_state),
    random.Random: Leaf("Random", random.Random.getstate, _from_random),
    torch.Generator: Leaf("Generator", lambda value: [value.device, value.get_state()], _from_torch_generator),
    **{kind: _constant(kind) for kind in (torch.memory_format, torch.layout, torch.dtype)},
    torch.device: Leaf("device", str, lambda name: torch.device(str(name))),
    torch.Size: Leaf("Size", list, lambda sizes: torch.Size(listed(sizes))),
    torch.Tensor: Leaf("archive", _archived, _from_archive),  # sparse, quantized, nested, without memory
}
"""Kinds by the exact type of a value."""
BY_NAME: dict[str, Leaf] = {leaf.name: leaf for leaf in BY_TYPE.values()}
"""Kinds by their name in files."""

"""Plain trees: what files hold, so that reading one cannot run code.

`torch.load(weights_only=True)` opens tensors, numbers, texts and containers of them, and nothing that names code.
:func:`encode` turns other harmless values (arrays, paths, dates, random generators ...) into trees of these before they are
saved, refuses the rest by name, and :func:`decode` gives back what was put in, bit for bit.

What a checkpoint holds, as tensors and the plain values that a message carries, and back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlightning.codec.allowed import UntrustedError, path_of
from fedlightning.codec.values import BY_NAME, BY_TYPE, enum_member, named_tuple

KIND = "fedlightning:native"
"""Key of a dict that stands for a value that files hold as it is and messages do not."""


def packed(value: Any) -> Any:
    """Return a checkpoint's content in which dtypes, devices, shapes, sets and complex numbers are made of plain values.

    Example:
        >>> packed({"a": torch.float16, "b": [torch.Size([2, 3])]})
        {'a': {'fedlightning:native': 'dtype', 'of': 'float16'}, 'b': [{'fedlightning:native': 'Size', 'of': [2, 3]}]}
        >>> unpacked(packed({"a": torch.float16, "b": [torch.Size([2, 3])], "c": {1}, "d": 2j}))
        {'a': torch.float16, 'b': [torch.Size([2, 3])], 'c': {1}, 'd': 2j}
    """
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {KIND: "device", "of": str(value)}
    if isinstance(value, torch.Size):
        return {KIND: "Size", "of": list(value)}
    if isinstance(value, complex):
        return {KIND: "complex", "of": [value.real, value.imag]}
    if isinstance(value, set):
        return {KIND: "set", "of": [packed(one) for one in value]}
    if isinstance(value, dict):
        return type(value)((packed(key), packed(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value)(packed(one) for one in value)
    return value


def unpacked(value: Any) -> Any:
    """Return what :func:`packed` was given."""
    if isinstance(value, dict):
        if KIND in value:
            return _native(value)
        return type(value)((unpacked(key), unpacked(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value)(unpacked(one) for one in value)
    return value


def _native(value: dict[str, Any]) -> Any:
    kind: Any = value[KIND]
    of: Any = value.get("of")
    try:
        if kind == "dtype" and isinstance(getattr(torch, of, None), torch.dtype):
            return getattr(torch, of)
        if kind == "device":
            return torch.device(of)
        if kind == "Size":
            return torch.Size(of)
        if kind == "complex":
            return complex(*of)
        if kind == "set":
            return {unpacked(one) for one in of}
    except (TypeError, RuntimeError, AttributeError):
        pass
    raise ValueError(f"it holds a {kind!r:.40} that is none")


TAG = "fedlightning:kind"
"""Key of a dict that stands for something else than a dict."""
NATIVE = (type(None), bool, float, str, complex, torch.dtype, torch.device, torch.Size)
"""Types that `torch.load(weights_only=True)` gives back as they are; so it does with ints, and containers of these."""
LONGEST = 2000
"""Bits of an int that its reader takes."""


class NotPlainError(ValueError):
    """A value that no file may hold, since reading it back would need code that the file names."""


class _Refusal(Exception):
    """A refused value, with its place filled in on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.place: list[str] = []


def encode(value: Any, owner: str, encoder: type[Encoder] | None = None) -> Any:
    """Return `value` as a tree that `torch.load(weights_only=True)` opens.

    Example:
        >>> import numpy as np
        >>> tree = encode({"best": np.float32(0.5), "scores": [1, 2.5]}, "the server")
        >>> decode(tree) == {"best": np.float32(0.5), "scores": [1, 2.5]}
        True
        >>> encode({"Mine": {"score": print}}, "client 'a'")
        Traceback (most recent call last):
        fedlightning.codec.plain.NotPlainError: What client 'a' keeps under ['Mine']['score'] is a builtin_function...
    """
    try:
        return (encoder or Encoder)().tree(value)
    except _Refusal as refusal:
        place = "".join(reversed(refusal.place))
        reason = str(refusal)
    except RecursionError:
        place, reason = "", "is nested too deeply"
    raise NotPlainError(
        f"What {owner} keeps{f' under {place}' if place else ''} {reason}, which cannot be saved: a file that is read later "
        "must not be able to run code. Keep tensors, arrays, numbers, texts, None, and lists, tuples, sets and dicts of "
        "them; of an object keep its fields, of a function its name."
    )


def decode(tree: Any) -> Any:
    """Return what :func:`encode` was given."""
    return Decoder().value_of(tree)


def native(value: Any) -> Any:
    """Return `value` as `torch.load(weights_only=True)` and everybody else opens it, without tags of ours.

    Numbers of numpy become Python's, paths texts, and other mappings dicts: for files that Lightning reads too.

    Example:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> native({"lr": np.float64(0.5), "root": Path("data")})
        {'lr': 0.5, 'root': 'data'}
    """
    return encode(value, "a checkpoint", _NativeEncoder)


class Encoder:
    """Turns one value into a plain tree. What occurs twice in the value is one thing in the tree."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # the value is kept, so that its id stays taken

    def tree(self, value: Any) -> Any:
        """Return the tree of a value."""
        kind = type(value)
        if kind in NATIVE or (kind is int and value.bit_length() < LONGEST):
            return value
        if kind in (Tensor, nn.Parameter):
            return self._tensor(value)
        known = self._done.get(id(value))
        if known is None:
            known = self._done[id(value)] = (value, self._new(value, kind))
        return known[1]

    def _new(self, value: Any, kind: type) -> Any:
        if kind in (dict, OrderedDict):
            return self._dict(value)
        if kind is list:
            made: list[Any] = []
            self._done[id(value)] = (value, made)  # it may hold itself
            made.extend(self._at(f"[{index}]", entry) for index, entry in enumerate(value))
            return made
        if kind is tuple:
            return tuple(self._at(f"[{index}]", entry) for index, entry in enumerate(value))
        leaf = BY_TYPE.get(kind)
        if leaf is not None:
            return {TAG: leaf.name, "value": self.tree(self._parts(leaf.parts, value))}
        if isinstance(value, np.generic):
            return {TAG: "scalar", "value": self.tree(self._parts(BY_NAME["array"].parts, np.asarray(value)))}
        if isinstance(value, Enum):
            return {TAG: "enum", "value": [self._parts(path_of, kind), self._at(".value", value.value)]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {TAG: "namedtuple", "value": [self._parts(path_of, kind), self.tree(list(value))]}
        return self.other(value)

    def other(self, value: Any) -> Any:
        """Return the tree of a value that is neither plain nor a container."""
        raise _Refusal(f"is a {_kind_of(value)}")

    def _parts(self, parts: Callable[[Any], Any], value: Any) -> Any:
        try:
            return parts(value)
        except ValueError as error:
            raise _Refusal(str(error)) from None

    def _dict(self, value: dict[Any, Any]) -> Any:
        plain_keys = all(_is_key(key) for key in value) and TAG not in value
        made: Any
        if plain_keys:
            made = type(value)()
            self._done[id(value)] = (value, made)
            for key, entry in value.items():
                made[key] = self._at(f"[{key!r}]", entry)
        else:
            pairs = [
                (self._at(f"{{the key {key!r}}}", key), self._at(f"[{key!r}]", entry)) for key, entry in value.items()
            ]
            made = {TAG: type(value).__name__, "value": pairs}
        if type(value) is not dict and vars(value) and plain_keys:  # the metadata of a state_dict
            vars(made).update(self._at(".__dict__", vars(value)))
        return made

    def _at(self, place: str, value: Any) -> Any:
        try:
            return self.tree(value)
        except _Refusal as refusal:
            refusal.place.append(place)
            raise

    def _tensor(self, value: Tensor) -> Tensor:
        for name, attribute in vars(value).items():  # torch saves them too
            if type(attribute) not in NATIVE and type(attribute) is not int:
                raise _Refusal(f"is a tensor with an attribute '{name}', a {_kind_of(attribute)}")
        return value


class _NativeEncoder(Encoder):
    def _new(self, value: Any, kind: type) -> Any:
        if isinstance(value, np.generic):
            return self.tree(value.item())
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, Mapping) and kind is not OrderedDict:
            value, kind = dict(value), dict
        if kind in (set, bytes, bytearray) and value:
            return value if kind is not set else {self.tree(entry) for entry in value}
        tree = super()._new(value, kind)
        if isinstance(tree, dict) and TAG in tree:
            raise _Refusal(f"is a {_kind_of(value)}")
        return tree


class Decoder:
    """Gives back what an :class:`Encoder` was given."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def value_of(self, tree: Any) -> Any:
        """Return the value of a whole tree."""
        try:
            return self.value(tree)
        except (NotPlainError, UntrustedError):
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise NotPlainError(f"it holds an entry that cannot be read ({error})") from None
        except (RuntimeError, MemoryError, SystemError) as error:
            reason = next(iter(str(error).splitlines()), "more than the memory holds")
            raise NotPlainError(f"it holds an entry that cannot be read ({reason})") from None

    def value(self, tree: Any) -> Any:
        """Return the value of a tree or of a part of it."""
        if type(tree) not in (dict, list, tuple, OrderedDict):
            return tree
        if id(tree) not in self._done:
            made = self._new(tree)
            self._done[id(tree)] = made
        found = self._done[id(tree)]
        if found is _OPEN:
            raise NotPlainError("it holds an entry that is a part of itself")
        return found

    def _new(self, tree: Any) -> Any:
        if type(tree) is list:
            made: Any = []
            self._done[id(tree)] = made
            made.extend(self.value(entry) for entry in tree)
            return made
        self._done[id(tree)] = _OPEN
        if type(tree) is tuple:
            return tuple(self.value(entry) for entry in tree)
        if TAG in tree:
            return self.tagged(tree[TAG], tree)
        made = type(tree)()
        self._done[id(tree)] = made
        made.update((self.value(key), self.value(entry)) for key, entry in tree.items())
        if type(tree) is not dict:
            if any(hasattr(OrderedDict, str(name)) for name in vars(tree)):
                raise NotPlainError("it holds an OrderedDict with an attribute that would hide a method")
            vars(made).update(self.value(dict(vars(tree))))
        return made

    def tagged(self, kind: str, tree: dict[str, Any]) -> Any:
        """Return what a dict with a tag stands for."""
        value = self.value(tree["value"])
        if kind == "enum":
            return enum_member(*value)
        if kind == "namedtuple":
            return named_tuple(*value)
        if kind == "scalar":
            return BY_NAME["array"].whole(value)[()]
        if kind not in BY_NAME:
            raise NotPlainError(f"it holds an entry of the unknown kind {kind!r}")
        return BY_NAME[kind].whole(value)

    def opened(self, tree: Any, made: Any) -> Any:
        """Note what a tree stands for before its parts are known, which may hold it."""
        self._done[id(tree)] = made
        return made


_OPEN = object()


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return type(key) in (str, bool, float, type(None)) or (type(key) is int and key.bit_length() < LONGEST)


def _kind_of(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )

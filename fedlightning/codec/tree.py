"""Values as a text of JSON and tensors, and back, so that reading a file or a message cannot run code.

What JSON has stands for itself; any other value is an object with one entry, its kind and what it is made of. Harmless values
(arrays, paths, dates, random generators ...) are taken apart (:mod:`fedlightning.codec.exotic_values`), the rest is refused
by its place. What was put in comes back bit for bit: types, the order of dimensions in memory, what is one thing in two
places, and memory that several tensors share.

`docs/reference/wire_format.md` describes the format.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fedlightning.codec.allowed import UntrustedError, path_of
from fedlightning.codec.container import NAMES, UNLIMITED, Limits, check_truth, layout, unpack_file
from fedlightning.codec.exotic_values import BY_NAME, BY_TYPE, Collisions, enum_member, named_tuple, sort_set
from fedlightning.storage.files import UnreadableError, replacing, sync

PLAIN = (type(None), bool, float, str, complex, torch.dtype, torch.device, torch.Size)
"""Types that are not code, and that `torch.load(weights_only=True)` gives back as they are; so it does with ints."""
MAX_INT_BITS = 2000
"""Bits of an int that its reader takes."""
HASHED_THROUGH = (tuple, frozenset, slice)
"""Types whose hash is that of all they hold. In keys they are not shared: one that holds another twice, and that another, and
so on, takes for ever."""


HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is not a letter, and in no UTF-8."""
TOO_DEEP = "is a value that is nested too deeply"


class NotPlainError(ValueError):
    """A value that no file may hold, since reading it back would need code that the file names."""


class Refusal(Exception):
    """A refused value, with its place filled in on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.place: list[str] = []


class Writer:
    """Turns values into JSON and tensors. What occurs twice is written once.

    Args:
        owner: Whose the values are, for the sentence of a refusal.

    Attributes:
        kinds: The kinds of values that are written; `None`: all.
        tensors: The tensors, in the order of their numbers, once :meth:`text` was called.
        num_bytes: About how long what was written is.
    """

    kinds: ClassVar[Collection[str] | None] = None

    def __init__(self, owner: str = "") -> None:
        self.owner = owner
        self.tensors: list[Tensor] = []
        self.num_bytes = 0
        self._count = 0
        self._numbers: dict[int, int] = {}  # by id, of lists and objects in the JSON: in the order in which they begin
        self._values: list[Any] = []  # they are kept, so that their ids stay taken
        self._in_key = 0
        self._memories: dict[Any, list[tuple[Tensor, dict[str, Any]]]] = {}  # tensors with one memory, and their nodes

    def node(self, value: Any, place: str = "") -> Any:
        """Return the JSON of a value.

        Raises:
            NotPlainError: With what is not a plain value, and its place.
        """
        try:
            return self._at(place, value)
        except Refusal as refusal:
            place, reason = "".join(reversed(refusal.place)), str(refusal)
        except RecursionError:
            place, reason = "", TOO_DEEP
        raise NotPlainError(self._sentence(place, reason))

    def _sentence(self, place: str, reason: str) -> str:
        return (
            f"What {self.owner} keeps{f' under {place}' if place else ''} {reason}, which cannot be saved: a file that is "
            "read later must not be able to run code. Keep tensors, arrays, numbers, texts, None, and lists, tuples, sets "
            "and dicts of them; of an object keep its fields, of a function its name."
        )

    def text(self, node: Any) -> str:
        """Return JSON as text, once all values are written."""
        for group in self._memories.values():
            self._write_memory(group)
        try:
            return json.dumps(node, allow_nan=False, separators=(",", ":"))
        except RecursionError:
            raise NotPlainError(self._sentence("", TOO_DEEP)) from None

    def _tree(self, value: Any) -> Any:
        kind = type(value)
        self.num_bytes += len(value) if kind is str else 8
        if value is None or kind is bool or (kind is int and value.bit_length() < MAX_INT_BITS):
            return value
        if kind is str and (self.kinds is not None or not HALF.search(value)):  # whoever reads a message refuses it
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        in_place = self._in_key and isinstance(value, HASHED_THROUGH)
        shared = self.kinds is None and not in_place and has_identity(value)
        if shared and id(value) in self._numbers:
            return {"ref": self._numbers[id(value)]}
        number, self._count = self._count, self._count + 1
        if shared and self._may_hold_itself(kind):
            self._numbers[id(value)] = number
        node = self._new(value, kind)
        if self.kinds is not None and type(node) is dict and next(iter(node)) not in self.kinds:
            raise Refusal(f"is a {_kind_of(value)}")
        if shared:
            self._numbers[id(value)] = number
            self._values.append(value)
        return node

    def _may_hold_itself(self, kind: type) -> bool:
        return kind in (list, dict, OrderedDict)

    def _new(self, value: Any, kind: type) -> Any:
        if kind in (list, tuple):
            nodes = [self._at(f"[{index}]", entry) for index, entry in enumerate(value)]
            return nodes if kind is list else {"tuple": nodes}
        if kind in (dict, OrderedDict):
            pairs = [[self._key(key), self._at(f"[{key!r:.60}]", entry)] for key, entry in value.items()]
            if kind is dict or not vars(value) or self.kinds is not None:
                return {kind.__name__: pairs}
            return {"StateDict": [pairs, self._at(".__dict__", dict(vars(value)))]}
        if kind in (set, frozenset):
            return {kind.__name__: [self._key(entry) for entry in sort_set(value)]}
        if kind in (Tensor, nn.Parameter):
            return self._tensor(value)
        leaf = BY_TYPE.get(kind)
        if leaf is not None:
            return {leaf.name: self._tree(self._parts(leaf.parts, value))}
        if isinstance(value, np.generic):
            return {"scalar": self._tree(self._parts(BY_NAME["array"].parts, np.asarray(value)))}
        if isinstance(value, Enum):
            return {"enum": [self._parts(path_of, kind), self._at(".value", value.value)]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"namedtuple": [self._parts(path_of, kind), self._tree(list(value))]}
        return self._other(value)

    def _other(self, value: Any) -> Any:
        """Return the JSON of a value that is neither plain nor a container."""
        raise Refusal(f"is a {_kind_of(value)}")

    def _parts(self, parts: Callable[[Any], Any], value: Any) -> Any:
        try:
            return parts(value)
        except ValueError as error:
            raise Refusal(str(error)) from None

    def _key(self, key: Any) -> Any:
        self._in_key += 1
        node = self._at(f"{{the key {key!r:.60}}}", key)
        self._in_key -= 1
        return node

    def _at(self, place: str, value: Any) -> Any:
        try:
            return self._tree(value)
        except Refusal as refusal:
            refusal.place.append(place)
            raise

    def _tensor(self, value: Tensor) -> Any:
        self._parts(check_attributes, value)
        if not is_strided(value):
            return {"archive": self._tree(self._parts(BY_NAME["archive"].parts, value))}
        # not by its address: to ask for it makes a lazy clone real
        node = self._remember(value.detach(), StorageWeakRef(value.untyped_storage()).cdata if value.numel() else 0)
        if type(value) is Tensor and not value.requires_grad and not vars(value):
            return node
        return {"marked": [node, type(value) is nn.Parameter, value.requires_grad, self._tree(dict(vars(value)))]}

    def _remember(self, tensor: Tensor, memory: int) -> dict[str, Any]:
        """Return a node that is filled when all tensors that share a memory are known; 0 is one of its own."""
        node: dict[str, Any] = {"tensor": None}
        self._memories.setdefault((tensor.device, memory or -len(self._memories)), []).append((tensor, node))
        self.num_bytes += tensor.nbytes
        return node

    def _write_memory(self, group: list[tuple[Tensor, dict[str, Any]]]) -> None:
        tensor, node = group[0]
        if len(group) == 1 and tensor.dtype in NAMES and tensor.stride() == _strides(tensor.shape):
            node["tensor"] = self._number(tensor)
            return
        places = [_place(tensor) for tensor, _ in group]
        low, high = min(place[0] for place in places), max(place[1] for place in places)
        if len(group) > 1:
            low -= low % 16  # all dtypes lie at multiples of their sizes from here
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        number = self._number(empty.set_(tensor.untyped_storage(), low, (high - low,), (1,)))
        for (tensor, node), (start, _) in zip(group, places, strict=True):
            offset = (start - low) // tensor.element_size()
            node.clear()
            node["view"] = [number, str(tensor.dtype), list(tensor.shape), list(tensor.stride()), offset]

    def _number(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def has_identity(value: Any) -> bool:
    """Return True if it matters that a value in two places is one; of numbers, texts, dates and tuples of them it does not.

    Whether these are one differs between processes, and so would files of equal values.
    """
    if isinstance(value, tuple | frozenset):
        return any(map(has_identity, value))
    by_hash: Any = type(value).__hash__  # of what it holds, of what it is, or none
    is_value = type(value) in BY_TYPE and by_hash not in (None, object.__hash__, Tensor.__hash__)
    return not is_value and not isinstance(value, Enum | np.generic | bool | float | None)


def check_attributes(tensor: Tensor) -> None:
    """Refuse a tensor with attributes of its own that are not plain values."""
    for name, attribute in vars(tensor).items():
        if type(attribute) not in (*PLAIN, int):
            raise ValueError(f"is a tensor with an attribute '{name}', a {_kind_of(attribute)}")


def is_strided(tensor: Tensor) -> bool:
    """Return True if a tensor is numbers in a memory."""
    odd = tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not odd


def is_dense(tensor: Tensor) -> bool:
    """Return True if the numbers of a tensor lie side by side, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and 0 not in tensor.shape:
            if stride != expected:
                return False
            expected *= size
    return True


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the one after its last."""
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + reach + 1) * tensor.element_size()


class FileWriter(Writer):
    """Writes named values, one after another, into one file."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 1  # the dict of them all is the first
        self._pairs: list[list[Any]] = []

    def add(self, name: str, value: Any, owner: str, place: str = "") -> None:
        """Add a value.

        Args:
            name: Its name in the file.
            value: The value.
            owner: Whose it is, for the sentence of a refusal.
            place: Where the owner has it.

        Example:
            >>> FileWriter().add("Mine", {"score": print}, "client 'a'", "['Mine']")
            Traceback (most recent call last):
            fedlightning.codec.tree.NotPlainError: What client 'a' keeps under ['Mine']['score'] is a builtin_function...
        """
        self.owner = owner
        self._pairs.append([self._tree(name), self.node(value, place)])

    def write(self, path: Path, lasting: bool = False) -> None:
        """Write the file."""
        text = self.text({"dict": self._pairs})
        with path.open("wb") as file:
            for piece in layout(text, self.tensors):
                file.write(piece)
            if lasting:
                file.flush()
                sync(file.fileno())

    def save(self, path: Path) -> None:
        """Write the file so that it is complete on the disk, or not there.

        It is a secret: states and records of clients hold whatever callbacks keep, secrets of noise among it.
        """
        with replacing(path, secret=True) as temporary:
            self.write(temporary, lasting=True)


def file_of(values: Mapping[str, Any], owner: str) -> FileWriter:
    """Return the file of named values of one owner.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "state"
        >>> file_of({"best": 0.5, "scores": [1, {2.5}]}, "the server").save(path)
        >>> load(path)
        {'best': 0.5, 'scores': [1, {2.5}]}
    """
    writer = FileWriter()
    for name, value in values.items():
        writer.add(name, value, owner, f"[{name!r}]")
    return writer


def load(path: Path) -> dict[str, Any]:
    """Return the named values of a file."""
    try:
        text, tensors = unpack_file(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"it cannot be read ({error.strerror})") from None
    content = Reader(tensors).value(text)
    if type(content) is not dict:
        raise UnreadableError(f"it holds a {type(content).__name__}, not named values")
    return content


_OPEN = object()


class Reader:
    """Gives back what a :class:`Writer` was given.

    Args:
        tensors: The tensors beside the text.
        limits: What is accepted.

    Attributes:
        kinds: The kinds of values that are accepted; `None`: all.
    """

    kinds: ClassVar[Collection[str] | None] = None

    def __init__(self, tensors: list[Tensor], limits: Limits = UNLIMITED) -> None:
        self._tensors = tensors
        self._limits = limits
        self._num_values = self._depth = self._in_key = 0
        self._instances: list[Any] = []  # of each list and object, in the order in which they begin
        self._bytes: dict[int, bytes] = {}  # a message that names its bytes a million times is not a million copies
        self._readers: dict[str, Callable[[Any], Any]] = {
            "tuple": lambda content: tuple(map(self._value, _list(content))),
            "dict": lambda content: self._dict(content, {}),
            "OrderedDict": lambda content: self._dict(content, OrderedDict()),
            "StateDict": self._state_dict,
            "set": lambda content: set(self._keys(_list(content))),
            "frozenset": lambda content: frozenset(self._keys(_list(content))),
            "tensor": self._tensor,
            "view": self._view,
            "marked": self._marked,
            "bytes": self._bytes_of,
            "scalar": self._scalar,
            "enum": lambda content: enum_member(content[0], self._value(content[1])),
            "namedtuple": lambda content: named_tuple(content[0], self._value(content[1])),
        }

    def value(self, text: str) -> Any:
        """Return the value of a text.

        Raises:
            NotPlainError: If it is none; the text is the end of a sentence that begins with what was read.
            UntrustedError: If it names what may be code.
        """
        try:
            return self._value(json.loads(text, parse_constant=_no_constant, object_pairs_hook=_one_kind))
        except (NotPlainError, UntrustedError):
            raise
        except RecursionError:
            raise NotPlainError("its values are nested too deeply") from None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise NotPlainError(
                f"it holds an entry that cannot be read ({' '.join(str(error).split()):.200})"
            ) from None
        except (RuntimeError, MemoryError, SystemError) as error:
            reason = next(iter(str(error).splitlines()), "more than the memory holds")
            raise NotPlainError(f"it holds an entry that cannot be read ({reason:.200})") from None

    def _value(self, tree: Any) -> Any:
        self._num_values += 1
        if self._depth > self._limits.depth or self._num_values > self._limits.values:
            raise NotPlainError("it has too many values, or they are nested too deeply")
        if type(tree) is str and not tree.isascii():
            tree.encode()  # half of a surrogate pair has a kind of its own
        if type(tree) not in (list, tuple):
            return tree
        kind, content = tree if type(tree) is tuple else ("list", tree)
        if self.kinds is not None and kind != "list" and kind not in self.kinds:
            raise NotPlainError(f"it holds an entry of the unknown kind {kind!r:.40}")
        if kind == "float":
            return _float(content)
        if kind == "ref":
            return self._ref(content)
        number = len(self._instances)
        self._instances.append(_OPEN)
        self._depth += 1
        instance = self._new(kind, content)
        self._depth -= 1
        self._instances[number] = instance
        return instance

    def _new(self, kind: str, content: Any) -> Any:
        if kind == "list":
            entries = self._begun([])
            entries.extend(map(self._value, _list(content)))
            return entries
        if kind in self._readers:
            return self._readers[kind](content)
        if kind not in BY_NAME:
            raise NotPlainError(f"it holds an entry of the unknown kind {kind!r:.40}")
        return BY_NAME[kind].whole(self._value(content))

    def _begun(self, container: Any) -> Any:
        """Note what was begun last before its parts are known, which may hold it."""
        self._instances[-1] = container
        return container

    def _ref(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self._instances):
            raise NotPlainError(f"it has no entry {number!r:.40}")
        instance = self._instances[number]
        if instance is _OPEN:
            raise NotPlainError("it holds an entry that is a part of itself")
        if self._in_key and isinstance(instance, HASHED_THROUGH):
            raise NotPlainError("it holds a key with a part that is somewhere else")
        return instance

    def _dict(self, content: Any, mapping: dict[Any, Any]) -> dict[Any, Any]:
        self._begun(mapping)
        pairs = _list(content)
        for key, (_, entry) in zip(self._keys(pair[0] for pair in map(_list, pairs)), pairs, strict=True):
            if key in mapping:
                raise NotPlainError(f"it holds a dict that has the key {key!r:.60} twice")
            mapping[key] = self._value(entry)
        return mapping

    def _keys(self, trees: Any) -> Iterator[Any]:
        collisions = Collisions()
        for tree in trees:
            self._in_key += 1
            key = self._value(tree)
            self._in_key -= 1
            collisions.add(key)
            yield key

    def _state_dict(self, content: Any) -> OrderedDict[Any, Any]:
        pairs, attributes = content
        mapping: OrderedDict[Any, Any] = OrderedDict()
        self._dict(pairs, mapping)
        attributes = self._value(attributes)
        if any(hasattr(OrderedDict, str(name)) for name in attributes):
            raise NotPlainError("it holds an OrderedDict with an attribute that would hide a method")
        vars(mapping).update(attributes)
        return mapping

    def _tensor(self, number: Any) -> Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise NotPlainError(f"it has no tensor {number!r:.40}")
        return self._tensors[number]

    def _view(self, content: Any) -> Tensor:
        number, name, shape, stride, offset = content
        memory, dtype = self._tensor(number), BY_NAME["dtype"].whole(name)
        if memory.dtype is not torch.uint8 or memory.ndim != 1:
            raise NotPlainError(f"its tensor {number} is not memory of others")
        whole = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        view = whole.as_strided(shape, stride, offset)
        if self.kinds is not None and not (is_dense(view) and view.nbytes == memory.nbytes):
            raise NotPlainError(
                f"a tensor of shape {tuple(view.shape)} is said to be other numbers than it is sent with"
            )
        if is_dense(view):
            check_truth(view)
        # the same numbers, and no view for torch's own rules
        return torch.empty(0, dtype=dtype).set_(view)  # type: ignore[call-overload]

    def _marked(self, content: Any) -> Tensor:
        (kind, place), is_parameter, requires_grad, attributes = content
        tensor = self._view(place) if kind == "view" else self._tensor(place)
        marked = nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
        vars(marked).update(self._value(attributes))
        check_attributes(marked)
        return marked

    def _bytes_of(self, content: Any) -> bytes:
        tensor = self._value(content)
        if id(tensor) not in self._bytes:
            self._bytes[id(tensor)] = BY_NAME["bytes"].whole(tensor)
        return self._bytes[id(tensor)]

    def _scalar(self, content: Any) -> np.generic:
        array = BY_NAME["array"].whole(self._value(content))
        if array.ndim:
            raise NotPlainError("it holds a number that has several values")
        scalar: np.generic = array[()]
        return scalar


def _list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise NotPlainError("a list is missing in it")
    return content


def _float(content: Any) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise NotPlainError(f"it holds {content!r:.40}, which is not a number")
    return float(content)


def _one_kind(pairs: list[tuple[str, Any]]) -> tuple[str, Any]:
    """Take a JSON object for what it is here: a value's kind and its content."""
    if len(pairs) != 1:
        raise ValueError(f"an entry has {len(pairs)} kinds")
    return pairs[0]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _kind_of(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )

"""Objects between processes through shared memory: tensors and arrays are laid out flat, everything else is pickled.

An :class:`Arena` is an anonymous file that two processes map. It has no name, so a process that is killed leaves
nothing behind, and no mount point limits its size. Writer and reader take turns; an arena is used again for the next
message and grows when one does not fit.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import traceback
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedlightning.compat.lazy_clones import to_read

ALIGNMENT = 64
"""Bytes. torch aligns its own CPU tensors so; kernels then take the same path on a mapped one."""

Slot = tuple[int, int]
"""Place of an object in an arena: offset and size in bytes."""


class Sink(Protocol):
    """Memory that :func:`pack` writes to."""

    def append(self, data: memoryview) -> Slot:
        """Write `data` behind the present content and return its place."""

    def clear(self) -> None:
        """Start anew at offset 0."""


class Memory(Protocol):
    """Memory that :func:`unpack` reads from."""

    def view(self, slot: Slot) -> memoryview:
        """Return the memory of a slot, without copying."""


class Arena:
    """Shared memory that grows. It lives as long as a process holds its file descriptor.

    Args:
        descriptor: File descriptor of an arena that another process made. `None`: make a new one.
        private: Keep changes in this process (copy on write), for data that many processes map.

    Attributes:
        descriptor: The file descriptor; -1 when closed.
        end: Offset at which the next object is written.
    """

    def __init__(self, descriptor: int | None = None, private: bool = False) -> None:
        self.descriptor = anonymous_file() if descriptor is None else descriptor
        self._access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        self._memory: memoryview = memoryview(bytearray())  # nothing, and it may be written
        self.end = 0

    def append(self, data: memoryview) -> Slot:
        """Write `data` behind the present content and return its place."""
        slot = (self.end, data.nbytes)
        after = self.end + data.nbytes
        if after > len(self._memory):
            if after > os.fstat(self.descriptor).st_size:
                os.ftruncate(self.descriptor, max(after, 2 * len(self._memory), mmap.PAGESIZE))
            self._map()
        self._memory[slot[0] : after] = data
        self.end = -(-after // ALIGNMENT) * ALIGNMENT + (ALIGNMENT if not data.nbytes else 0)
        return slot

    def clear(self) -> None:
        """Start anew at offset 0. Nobody may be reading."""
        self.end = 0

    def view(self, slot: Slot) -> memoryview:
        """Return the memory of a slot, without copying."""
        offset, size = slot
        if offset + size > len(self._memory):
            self._map()
        return self._memory[offset : offset + size]

    def _map(self) -> None:
        # a new mapping; the old one is freed with its last view
        self._memory = memoryview(mmap.mmap(self.descriptor, 0, access=self._access))

    def close(self) -> None:
        """Release this process's hold. The memory is freed when no process holds it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._memory = -1, memoryview(b"")


def anonymous_file() -> int:
    """Return the descriptor of a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedlightning")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


Shared = TypeVar("Shared", bound=Sink)


class Broadcast(Generic[Shared]):
    """Writes each tensor that goes to several receivers only once.

    A tensor that is seen for the second time is taken to be one for several receivers: the model that every message of
    a round carries is one and the same object. What goes to a single client never gets here.

    Args:
        arena: Memory of these tensors.
    """

    def __init__(self, arena: Shared) -> None:
        self.arena = arena
        self._seen: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._written: dict[int, tuple[Tensor, Slot]] = {}  # keeps the tensors, so that no id is given again

    def slot(self, tensor: Tensor) -> Slot | None:
        """Return the place of a tensor in :attr:`arena`; `None` when it is seen for the first time."""
        if id(tensor) in self._written:
            return self._written[id(tensor)][1]
        if self._seen.get(id(tensor)) is not tensor:
            self._seen[id(tensor)] = tensor
            return None
        slot = self.arena.append(_bytes_of(to_read(tensor)))
        self._written[id(tensor)] = (tensor, slot)
        return slot

    def clear(self) -> None:
        """Forget everything. Nobody may be reading."""
        self._seen.clear()
        self._written.clear()
        self.arena.clear()


def pack(value: Any, arena: Sink, broadcast: Broadcast[Any] | None = None, packer: type[Any] | None = None) -> bytes:
    """Lay the tensors and arrays of `value` out in `arena`, over its former content, and pickle the rest."""
    arena.clear()
    file = io.BytesIO()
    slots: list[Slot] = []
    make = _Packer if packer is None else packer
    make(file, arena, broadcast, slots).dump(value)
    return pickle.dumps((file.getvalue(), slots))


def unpack(header: bytes, arena: Memory, broadcast: Memory | None = None, copy: bool = True) -> Any:
    """Return the value that :func:`pack` was given."""
    payload, slots = pickle.loads(header)
    views = [arena.view(slot) for slot in slots]
    buffers = [bytearray(view) if copy else view for view in views]
    return _Unpacker(io.BytesIO(payload), arena, broadcast, copy, buffers).load()


class Packing:
    """The part of a pickler that lays tensors and arrays out in memory; stands before a pickler among its bases."""

    def __init__(self, file: io.BytesIO, arena: Sink, broadcast: Broadcast[Any] | None, slots: list[Slot]) -> None:
        def lay_out(buffer: pickle.PickleBuffer) -> None:
            slots.append(arena.append(buffer.raw()))

        super().__init__(file, protocol=5, buffer_callback=lay_out)  # type: ignore[call-arg]
        self._arena, self._broadcast = arena, broadcast
        self._known: dict[int, tuple[Tensor, Any]] = {}

    def persistent_id(self, value: Any) -> Any:
        """Lay a plain tensor out, and pickle its place."""
        # other tensors (parameters, views with strides, on a device) are left to torch's own pickling
        if type(value) is not Tensor or not _is_plain(value):
            return None
        if id(value) not in self._known:
            slot = None if self._broadcast is None else self._broadcast.slot(value)
            place = ("own", self._arena.append(_bytes_of(to_read(value)))) if slot is None else ("broadcast", slot)
            self._known[id(value)] = (value, (*place, value.dtype, tuple(value.shape)))
        return self._known[id(value)][1]

    def reducer_override(self, value: Any) -> Any:
        """Pickle an exception with its traceback as text; leave everything else to the pickler."""
        if isinstance(value, BaseException):
            return _revive, _exception(value)
        others = getattr(super(), "reducer_override", None)
        return NotImplemented if others is None else others(value)


class _Packer(Packing, pickle.Pickler):
    """Pickles what can be imported by its name."""


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, arena: Memory, broadcast: Memory | None, copy: bool, buffers: list[Any]
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._arenas = {"own": arena, "broadcast": broadcast}
        self._copy = copy
        self._known: dict[tuple[str, Slot], Tensor] = {}

    def persistent_load(self, place: Any) -> Tensor:
        where, slot, dtype, shape = place
        if (where, slot) not in self._known:
            arena = self._arenas[where]
            assert arena is not None
            self._known[where, slot] = _tensor(arena.view(slot), dtype, shape, self._copy)
        return self._known[where, slot]


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not vars(tensor)
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data  # bit patterns of any dtype


def _tensor(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], copy: bool) -> Tensor:
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    if not copy:
        return torch.frombuffer(memory, dtype=dtype).reshape(shape)
    tensor = torch.empty(shape, dtype=dtype)
    _bytes_of(tensor)[:] = memory
    return tensor


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised in another process, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"in another process:\n{text}")


def _exception(error: BaseException) -> tuple[bytes | None, str, str]:
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # fails here if __init__ needs other arguments than `args`
    except Exception:
        return None, f"{type(error).__name__}: {error}", text
    return pickled, "", text


def _revive(pickled: bytes | None, summary: str, text: str) -> BaseException:
    error: BaseException = RuntimeError(summary) if pickled is None else pickle.loads(pickled)
    error.__cause__ = RemoteTraceback(text)
    return error

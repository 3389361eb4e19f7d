"""What runs in a Ray worker, and how objects travel to and from it.

A message is laid out as in :mod:`fedlightning.parallel.arena`, in memory that Ray carries. What is defined in a script or in
a notebook travels by value (Ray's cloudpickle), since a Ray worker does not import the script.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fedlightning.client.runtime import ClientRuntime
from fedlightning.compat.pytorch_lightning import use_lightning_if_possible
from fedlightning.errors import ConfigurationError
from fedlightning.parallel.arena import ALIGNMENT, Arena, Broadcast, Memory, Packing, Slot, pack, unpack
from fedlightning.parallel.worker import READY, Reply, answered, collect_warnings, take_over
from fedlightning.resume.stop_requests import SIGNALS

NOT_SHARED = ("RAY_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Beginnings of the names of variables that are Ray's business."""
EVERYWHERE = ("CUBLAS_", "CUDNN_", "NVIDIA_", "TORCH", "PYTORCH_", "PYTHONHASHSEED", "FEDLIGHTNING_")
"""Beginnings of the names of variables that a worker on another machine is given, too: results may depend on them."""
Message = tuple[bytes, Any]
"""A header, and the bytes of tensors and arrays."""


@cache
def packer() -> type[Any]:
    """Return the class that pickles for Ray."""
    from ray import cloudpickle

    return type("CloudPacker", (Packing, cloudpickle.Pickler), {})


class Buffer:
    """The memory of one message.

    Args:
        content: What somebody else has written; default: nothing yet.

    Attributes:
        end: Offset at which the next object is written.
    """

    def __init__(self, content: memoryview | None = None) -> None:
        self._parts: list[tuple[int, memoryview]] = []
        self._content = content
        self.end = 0

    def append(self, data: memoryview) -> Slot:
        """Note that `data` is to stand behind the present content; return its place."""
        slot = (self.end, data.nbytes)
        self._parts.append((self.end, data))
        self.end += data.nbytes + -data.nbytes % ALIGNMENT + (ALIGNMENT if not data.nbytes else 0)
        return slot

    def clear(self) -> None:
        """Start anew at offset 0."""
        self._parts, self.end = [], 0

    def view(self, slot: Slot) -> memoryview:
        """Return the memory of a slot."""
        assert self._content is not None
        return self._content[slot[0] : slot[0] + slot[1]]

    def content(self) -> Any:
        """Return all of it in one array, which Ray moves without pickling it."""
        content = np.zeros(self.end, np.uint8)
        for start, data in self._parts:
            content.data[start : start + data.nbytes] = data
        return content


class Pieces:
    """Memory that lies in Ray's object store, piece by piece: what several workers are sent in a round."""

    def __init__(self) -> None:
        self._next = Buffer()
        self._start = 0
        self.references: list[tuple[int, Any]] = []

    def append(self, data: memoryview) -> Slot:
        """Write `data` behind the present content and return its place."""
        offset, size = self._next.append(data)
        return self._start + offset, size

    def clear(self) -> None:
        """Start anew. What lies in the object store goes when the last worker has let go of it."""
        self._next.clear()
        self._start, self.references = 0, []

    def put(self) -> list[tuple[int, Any]]:
        """Put what is new into the object store; return offset and reference of all pieces."""
        if self._next.end:
            import ray

            self.references = [*self.references, (self._start, ray.put(self._next.content()))]
            self._start += self._next.end
            self._next.clear()
        return self.references


@dataclass
class Received:
    """Pieces as a worker reads them.

    Attributes:
        starts: Offset of each piece.
        pieces: Their bytes.
    """

    starts: Sequence[int]
    pieces: Sequence[memoryview]

    def view(self, slot: Slot) -> memoryview:
        """Return the memory of a slot."""
        at = bisect_right(self.starts, slot[0]) - 1
        offset = slot[0] - self.starts[at]
        return self.pieces[at][offset : offset + slot[1]]


def packed(value: Any, broadcast: Broadcast[Pieces] | None = None) -> Message:
    """Lay a value out for Ray."""
    buffer = Buffer()
    return pack(value, buffer, broadcast, packer()), buffer.content()


def unpacked(message: Message, broadcast: Memory | None = None) -> Any:
    """Return the value that :func:`packed` was given; nothing of it lies in Ray's memory."""
    header, content = message
    return unpack(header, Buffer(content.data), broadcast)


@dataclass(frozen=True)
class Source:
    """Where the federation's parts are, laid out by :class:`fedlightning.parallel.pool.Setup`.

    Attributes:
        header: Header of the parts.
        process: Process that holds them in an anonymous file, on the same machine; or
        descriptor: its descriptor of that file,
        identity: and the file's number and size, by which a worker knows it.
        content: A reference to a copy in Ray's object store, for a worker on another machine, in a list.
    """

    header: bytes
    process: int = -1
    descriptor: int = -1
    identity: tuple[int, int] = (-1, -1)
    content: tuple[Any, ...] = ()

    def memory(self) -> Arena | None:
        """Return the memory to read from, private to this process; `None` if it cannot be reached from here."""
        if self.content:
            import ray

            arena = Arena()  # a copy: modules and data are written to, and Ray's memory is that of all workers
            arena.append(ray.get(self.content[0]).data)
            return arena
        try:
            file = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDONLY)
        except OSError:
            return None
        status = os.fstat(file)
        if (status.st_ino, status.st_size) != self.identity:
            os.close(file)
            return None
        return Arena(file, private=True)


class Actor:
    """A Ray actor that carries out tasks, for one federation after another."""

    def __init__(self) -> None:
        for number in (*SIGNALS, signal.SIGHUP, signal.SIGINT):  # SIGTERM is Ray's way to end it
            with suppress(ValueError):
                signal.signal(number, signal.SIG_IGN)
        use_lightning_if_possible(asked=False)
        torch.set_num_threads(1)  # Ray's own choice follows num_cpus, and sums would be rounded otherwise
        threadpool_limits(1)
        self._caught = collect_warnings()
        self._runner: ClientRuntime | None = None
        self._pieces: dict[bytes, memoryview] = {}

    def hello(self) -> tuple[int, str, str]:
        """Return process, Ray node and machine."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id(), socket.gethostname()

    def take_over(
        self, source: Source, environment: Mapping[str, str], folder: str, path: Sequence[str], marker: str | None
    ) -> Message | None:
        """Take a federation's parts over, in place of another one's."""
        self._runner = None
        os.environ.update(environment)
        with suppress(OSError):
            os.chdir(folder)
        sys.path += [place for place in path if place not in sys.path]
        memory = source.memory()
        if memory is None:
            return None
        if marker is not None and not os.path.exists(marker):
            text = (
                f"A Ray worker on {socket.gethostname()} does not find the run's folder {os.path.dirname(marker)}, into "
                "which clients write. Put default_root_dir on a file system that all machines of the cluster share."
            )
            return packed(Reply(error=ConfigurationError(text)))
        try:
            self._runner = take_over(*unpack(source.header, memory, copy=False))
        except BaseException as error:
            return packed(Reply(error=error))
        threadpool_limits(1)  # also of libraries that were not loaded at the first time
        return READY, None

    def work(self, task: Message, pieces: Sequence[tuple[int, Any]]) -> Message:
        """Carry out a task and return the reply."""
        import ray

        assert self._runner is not None
        keys = [reference.binary() for _, reference in pieces]
        self._pieces = {
            key: self._pieces[key] if key in self._pieces else ray.get(reference).data
            for key, (_, reference) in zip(keys, pieces, strict=True)
        }
        shared = Received([start for start, _ in pieces], list(self._pieces.values()))
        buffer = Buffer()
        unpack = partial(unpacked, task, shared)
        header = answered(self._runner, unpack, self._caught, buffer, packer())
        return header, buffer.content()


def environment_for(same_machine: bool) -> dict[str, str]:
    """Return the variables of this process that a worker is given."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(NOT_SHARED) and (same_machine or name.startswith(EVERYWHERE))
    }

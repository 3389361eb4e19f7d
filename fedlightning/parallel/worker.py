"""A worker process: it gets the federation's parts once, then does one task after another until it is told to end.

The fork server imports this module before it forks workers, so what is imported here is imported once.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, for a second or two

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.compat.pytorch_lightning import adapt, use_lightning_if_possible
from fedlightning.parallel.arena import Arena, Sink, pack, unpack
from fedlightning.resume.stop_requests import ignore_stop_requests

READY = b"ready"
END = b"end"
OF_DATA = ("data", "left_out", "together", "folder")
"""Parts of a runner besides its blueprint's."""


@dataclass(frozen=True)
class Caught:
    """A warning of a worker, to be issued again in the main process."""

    message: Warning
    category: type[Warning]
    filename: str
    lineno: int


@dataclass(frozen=True)
class Reply:
    """A worker's reply: the task's answer and the client's new record, or the exception that the task raised; and why the
    worker does not train by the first fitter.
    """

    answer: Any = None
    record: Any = None
    error: BaseException | None = None
    caught: tuple[Caught, ...] = ()
    loop: str | None = None


@dataclass(frozen=True)
class Switches:
    """Settings of a whole process on which results depend."""

    dtype: torch.dtype
    matmul: str
    deterministic: bool
    warn_only: bool
    start_method: str

    @classmethod
    def of_this_process(cls) -> Switches:
        """Return the settings of this process."""
        return cls(
            dtype=torch.get_default_dtype(),
            matmul=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            start_method=multiprocessing.get_start_method(),
        )

    def apply(self) -> None:
        """Give this process these settings."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        # for the workers of a DataLoader: they would start as this process did, and import everything anew
        multiprocessing.set_start_method(self.start_method, force=True)


def parts_of(runner: ClientRuntime) -> dict[str, Any]:
    """Return the parts that a runner is made of. Its evaluating Trainer stays; each process makes its own."""
    blueprint = runner.blueprint
    blueprint_parts = {part.name: getattr(blueprint, part.name) for part in fields(blueprint) if part.init}
    return blueprint_parts | {name: getattr(runner, name) for name in OF_DATA}


def work(connection: Connection, environment: Mapping[str, str]) -> None:
    """Run a worker: the target of its process."""
    ignore_stop_requests()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    use_lightning_if_possible(asked=False)
    torch.set_num_threads(1)
    try:
        inbox, outbox, common = (Arena(recv_handle(connection)) for _ in range(3))
        setup = Arena(recv_handle(connection), private=True)
        header = connection.recv_bytes()
    except EOFError:  # the main process has ended it already
        return
    caught = collect_warnings()
    try:
        runner = take_over(*unpack(header, setup, copy=False))
    except BaseException as error:
        connection.send_bytes(pack(Reply(error=error), outbox))
        return
    connection.send_bytes(READY)
    while True:
        try:
            header = connection.recv_bytes()
        except EOFError:
            return
        if header == END:
            return
        connection.send_bytes(answered(runner, partial(unpack, header, inbox, common), caught, outbox))


def collect_warnings() -> list[Caught]:
    """Have this process's warnings kept in a list, which is returned, instead of shown."""
    caught: list[Caught] = []
    warnings.showwarning = lambda message, category, filename, lineno, *_: caught.append(
        Caught(message if isinstance(message, Warning) else category(message), category, filename, lineno)
    )
    return caught


def take_over(switches: Switches, parts: Mapping[str, Any]) -> ClientRuntime:
    """Return the client side of a federation in this process."""
    switches.apply()
    with warnings.catch_warnings():  # the main process has said it
        warnings.simplefilter("ignore")
        adapt(parts["template"], parts["settings"].callbacks, parts["data"], getattr(parts["data"], "datamodule", 0))
    blueprint_parts = {name: part for name, part in parts.items() if name not in OF_DATA}
    for entry in blueprint_parts["template"].parameters():  # in memory of this process, which its models can share
        entry.data = entry.data.clone()
    return ClientRuntime(Blueprint(**blueprint_parts), **{name: parts[name] for name in OF_DATA})


def answered(
    runner: ClientRuntime,
    unpack: Callable[[], tuple[Any, ClientRecord]],
    caught: list[Caught],
    outbox: Sink,
    packer: type[Any] | None = None,
) -> bytes:
    """Carry out a task and lay its reply out in `outbox`; return the header that belongs to it."""
    reply = _do(runner, unpack)
    try:
        reply = replace(reply, caught=tuple(caught), loop=runner.loop.reason)
        return pack(reply, outbox, packer=packer)
    except Exception as error:
        text = f"What a task answered cannot be pickled ({error}). Keep tensors and plain values in states and extras."
        return pack(Reply(error=TypeError(text)), outbox)
    finally:
        caught.clear()


def _do(runner: ClientRuntime, unpack: Callable[[], tuple[Any, ClientRecord]]) -> Reply:
    try:
        task, record = unpack()
        return Reply(*task.run(runner, record))
    except BaseException as error:  # SystemExit too: the main process raises it, as if the task had run there
        return Reply(error=error)


def _end_with_parent() -> None:
    """End at once when the main process is gone, however it ended."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

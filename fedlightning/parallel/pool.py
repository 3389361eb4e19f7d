"""A worker as the main process sees it: start it, give it tasks, notice when it is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import send_handle
from typing import Any

import torch

from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.compat.system import short_sockets
from fedlightning.engines.contract import Task
from fedlightning.parallel import worker
from fedlightning.parallel.arena import Arena, Broadcast, pack, unpack

PRELOADED = ("fedlightning.engines.score_tasks", "fedlightning.callbacks", "fedlightning.datamodules")
"""Modules that workers need besides :mod:`fedlightning.parallel.worker`; the fork server imports them once for all."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


_given: dict[Any, Any] = {}  # warnings of workers that the user has seen


class UnpicklableError(ValueError):
    """A part of the federation cannot be sent to another process."""


class Worker:
    """One worker process and the arenas through which it exchanges objects with this process.

    Args:
        setup: The federation's parts.
        broadcast: Memory for objects that several workers are sent.
        environment: Variables of this worker alone, besides those of this process.

    Attributes:
        ready: Whether it has taken over the federation's parts.
        broadcast: Memory for objects that several workers are sent.
        inbox: Arena of the tasks.
        outbox: Arena of the answers.
        connection: Pipe for headers.
        process: The process.
    """

    def __init__(self, setup: Setup, broadcast: Broadcast[Arena], environment: Mapping[str, str]) -> None:
        self.ready = False
        self.broadcast = broadcast
        self.inbox, self.outbox = Arena(), Arena()
        context = start_context()
        self.connection, theirs = context.Pipe()
        # a daemon could not start the worker processes of a DataLoader
        self.process = context.Process(
            target=worker.work, args=(theirs, {**os.environ, **environment}), name="fedlightning-worker", daemon=False
        )
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        with suppress(OSError):  # a worker that is gone already is noticed when its reply is awaited
            for arena in (self.inbox, self.outbox, broadcast.arena, setup.arena):
                send_handle(self.connection, arena.descriptor, self.process.pid)
            self.connection.send_bytes(setup.header)

    def give(self, task: Task[Any], record: ClientRecord) -> None:
        """Send a task and the record of its client. The worker must be idle."""
        try:
            header = pack((task, record), self.inbox, self.broadcast)
        except Exception as error:
            raise UnpicklableError(str(error)) from error
        self.connection.send_bytes(header)

    def take(self) -> worker.Reply | None:
        """Return the worker's reply; `None` if it only reports that it is ready. Its warnings are issued again here."""
        header = self.connection.recv_bytes()
        if header == worker.READY:
            self.ready = True
            return None
        reply: worker.Reply = unpack(header, self.outbox)
        warn_again(reply)
        return reply

    def has_answered(self) -> bool:
        """Return whether :meth:`take` would not wait."""
        return self.connection.poll()

    def end(self, grace: float) -> str:
        """End the process, after `grace` seconds by force. Return how it ended, for a message."""
        with suppress(OSError):
            self.connection.send_bytes(worker.END)
        self.process.join(grace)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        self.connection.close()
        self.process.close()
        self.inbox.close()
        self.outbox.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def warn_again(reply: worker.Reply) -> None:
    """Issue the warnings of a worker in this process, each once."""
    for caught in reply.caught:
        warnings.warn_explicit(caught.message, caught.category, caught.filename, caught.lineno, registry=_given)


class Setup:
    """The federation's parts, laid out once for all workers. Tensors and arrays of the data are mapped, not copied.

    Args:
        runner: The client side of the federation.
        packer: Class of the pickler; see :func:`fedlightning.parallel.arena.pack`.

    Raises:
        UnpicklableError: If a part cannot be pickled; the message names it.
    """

    def __init__(self, runner: ClientRuntime, packer: type[Any] | None = None) -> None:
        self.arena = Arena()
        parts = worker.parts_of(runner)
        try:
            self.header = pack((worker.Switches.of_this_process(), parts), self.arena, packer=packer)
        except Exception as error:
            self.arena.close()
            name, reason = next(_unpicklable(parts, packer), ("the federation", error))
            raise UnpicklableError(
                f"{name} cannot be sent to a worker process: {reason}. Use classes and functions that can be imported "
                "(no lambdas, no local functions, no open files), or engine='sequential'."
            ) from error


def _unpicklable(parts: Mapping[str, Any], packer: type[Any] | None) -> Iterator[tuple[str, Exception]]:
    settings = parts["settings"]
    named = {
        f"The model {type(parts['template']).__name__}": parts["template"],
        **{f"The callback {callback.key}": callback for callback in parts["callbacks"]},
        **{f"The callback {type(callback).__name__}": callback for callback in settings.callbacks},
        f"The data module {type(parts['data']).__name__}": parts["data"],
        **{f"The trainer's argument {name}": value for name, value in settings.trainer_arguments.items()},
    }
    for name, value in named.items():
        trial = Arena()
        try:
            pack(value, trial, packer=packer)
        except Exception as error:
            yield name, error
        finally:
            trial.close()


def start_context() -> ForkServerContext:
    """Return the context that starts workers: forked from a server process with a single thread and all imports.

    `fork` of this process would copy torch's thread pools and CUDA's context in a broken state. `spawn` would import
    torch and Lightning anew for every worker (seconds, and some 400 MB each). The server is started once for a program,
    so workers start again within a fraction of a second.
    """
    short_sockets()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__, *PRELOADED])
    with one_thread():
        forkserver.ensure_running()
    return context


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, new processes are told to use one thread. BLAS libraries read that when they are loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def own_gpu(index: int, devices: Any) -> dict[str, str]:
    """Return the environment in which a worker sees one of this machine's GPUs, if `devices="auto"` shares them out."""
    count = torch.cuda.device_count() if devices == "auto" else 1
    if count < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[index % count]}


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""The engine `ray`: the same tasks on Ray actors, of this machine or of a cluster, each with one torch thread.

Ray starts the actors, moves messages and finds out that one is gone. Which actor gets which task, and what becomes of a task
whose actor is gone, is as in `processes` (:mod:`fedlightning.parallel.scheduling`).

Ray as this program has it: started here or found, quiet, and the actors that wait for their next federation.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import math
import os
import socket
import sys
import sysconfig
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.contract import ClientRecords, Task
from fedlightning.errors import ConfigurationError, missing_package
from fedlightning.options import Ray
from fedlightning.parallel.arena import Broadcast
from fedlightning.parallel.pool import Setup, UnpicklableError, usable_cores, warn_again
from fedlightning.parallel.ray_start import HERE_ONLY, PATIENT, QUIET, TOKEN, environment, in_a_thread, load_now, start
from fedlightning.parallel.ray_worker import Pieces, Source, environment_for, packed, packer, unpacked
from fedlightning.parallel.scheduling import WorkersEngine
from fedlightning.parallel.worker import READY, Reply

MISSING = (
    missing_package("engine='ray' needs Ray", "ray")
    + " Without it engine='processes' trains on several cores of this machine."
)


@dataclass(eq=False)
class Kept:
    """An actor.

    Attributes:
        handle: Ray's handle.
        needs: CPUs and GPUs that are set aside for it.
        about: Process, Ray node and machine, once it has told.
        holds: What it holds: the mark of a federation's parts.
        owner: The engine that has used it last, as a token.
        born: Time of its start; what has changed on disk since then it may not know.
    """

    handle: Any
    needs: tuple[float, float]
    about: tuple[int, str, str] | None = None
    holds: object = None
    owner: object = None
    born: float = field(default_factory=time.time)

    def end(self) -> None:
        """End the process."""
        import ray

        with suppress(Exception):  # Ray is gone, or the actor is
            ray.kill(self.handle)


_kept: list[Kept] = []  # actors without work, the most recently used last
_own = False  # whether the engine has started Ray
_guarded = False  # whether `ray` was imported with TOKEN


def installed() -> bool:
    """Return whether Ray can be imported."""
    return importlib.util.find_spec("ray") is not None


def load(options: Ray) -> None:
    """Import Ray, quietly."""
    global _guarded
    if not installed():
        raise ConfigurationError(MISSING)
    starts_ray, first = options.address is None, "ray" not in sys.modules
    _guarded = _guarded or (starts_ray and first and not any(name.startswith("RAY_AUTH_") for name in os.environ))
    with environment(QUIET | (HERE_ONLY | PATIENT if starts_ray else {}) | (TOKEN if _guarded else {})):
        import ray

    private: Any = getattr(ray, "_private", None)
    constants: Any = getattr(private, "ray_constants", None)
    if starts_ray and not first and hasattr(constants, "ENABLE_RAY_CLUSTER"):
        constants.ENABLE_RAY_CLUSTER = False  # `ray` was imported before HERE_ONLY was set


def connect(options: Ray, workers: int) -> None:
    """Start Ray, or connect to the cluster of the options, unless the program is connected already."""
    global _own
    load(options)
    if sys.modules["ray"].is_initialized():
        if _own and options.address is not None:
            raise ConfigurationError(
                f"Ray got address={options.address!r}, but this program has started a Ray of its own for an earlier run. "
                "Call ray.shutdown() first, or give every run the same address."
            )
        return
    _kept.clear()
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if options.address is None:
        cpus = max(usable_cores(), math.ceil(workers * options.num_cpus))
        arguments |= {"address": "local", "include_dashboard": False, "num_cpus": cpus}
    else:
        arguments |= {"address": options.address}
        _knock(options.address)
    arguments |= dict(options.init or {})
    try:
        if options.address is None:
            start(arguments, _guarded)
        else:
            in_a_thread(arguments)
    except (ConnectionError, TimeoutError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigurationError(
            f"Ray got address={options.address!r}: no Ray cluster answers there ({reason}). Start one with "
            "`ray start --head`, or leave address out for a Ray of this program's own."
        ) from error
    _own = options.address is None
    atexit.register(_kept.clear)
    _without_messages()


def _knock(address: str) -> None:
    """Refuse an address where nobody listens: `ray.init` would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"Ray got address={address!r}: no Ray cluster answers there ({error}). Start one with `ray start --head`, or "
            "leave address out for a Ray of this program's own."
        ) from error


def is_own() -> bool:
    """Return whether Ray was started for engines of this program, which it ends with."""
    return _own


def _without_messages() -> None:
    """Silence what Ray prints about workers: ends of workers are told by the engine. No public switch turns that off."""
    import ray

    worker = getattr(ray._private, "worker", None)
    if worker is not None and hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


# -- room --------------------------------------------------------------------------------------------------------------
def room() -> tuple[float, float]:
    """Return all CPUs and GPUs of the cluster."""
    import ray

    resources = ray.cluster_resources()
    return float(resources.get("CPU", 0)), float(resources.get("GPU", 0))


def needs_of(options: Ray, workers: int | None, on_gpu: bool) -> tuple[float, float]:
    """Return the CPUs and GPUs of one worker."""
    cpus, gpus = room()
    share = options.num_gpus
    if share is None:
        on_one = math.ceil((workers or gpus) / gpus) if on_gpu and gpus else 0  # workers that share a GPU
        share = _floor(1 / on_one) if on_one else 0.0
    if on_gpu and not share:
        raise ConfigurationError(
            f"Clients train on GPUs here, and Ray's workers would have none (num_gpus={options.num_gpus}; the cluster "
            f"has {gpus:g} GPUs). Give each a share of one, as in Ray(num_gpus=0.5), or set accelerator='cpu'."
        )
    needed = options.num_cpus
    if _own and workers is not None and workers * needed > cpus:
        needed = _floor(cpus / workers)  # our own Ray: CPUs are numbers, and nobody else wants any
    if needed > cpus or share > gpus:
        raise ConfigurationError(
            f"Ray has {cpus:g} CPUs and {gpus:g} GPUs, and each worker is to have {needed:g} and {share:g} (num_cpus, "
            "num_gpus): there is room for none."
        )
    return needed, share


def _floor(share: float) -> float:
    return math.floor(share * 10_000) / 10_000  # as fine as Ray counts


def workers_in(needs: tuple[float, float]) -> int:
    """Return the number of workers that the cluster has room for."""
    cpus, gpus = room()
    return max(1, min(int(cpus / needs[0]), int(gpus / needs[1]) if needs[1] else sys.maxsize))


# -- actors ------------------------------------------------------------------------------------------------------------
def lease(needs: tuple[float, float], mark: object, owner: object) -> Kept:
    """Return an actor: one that waits, if possible one that holds the engine's parts, or else a new one."""
    import ray

    from fedlightning.parallel.ray_worker import Actor

    for kept in sorted(_kept, key=lambda actor: actor.holds is mark, reverse=True):
        _kept.remove(kept)
        if kept.needs == needs and (kept.holds is mark or kept.born > _newest_source()):
            kept.owner = owner
            return kept
        kept.end()  # it would take the room of the new one
    make = ray.remote(Actor).options(num_cpus=needs[0], num_gpus=needs[1], max_restarts=0)
    return Kept(make.remote(), needs, owner=owner)


def keep(kept: Kept) -> None:
    """Let an idle actor wait for the next engine."""
    _kept.append(kept)


def end_kept(owner: object) -> None:
    """End the waiting actors that an engine has used last."""
    for kept in [actor for actor in _kept if actor.owner is owner]:
        _kept.remove(kept)
        kept.end()


def _newest_source() -> float:
    """Return the time of the last change of the sources of imported modules; installed packages do not change."""
    skipped = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    newest = 0.0
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(skipped):
            with suppress(OSError):
                newest = max(newest, Path(file).stat().st_mtime)
    return newest


PATIENCE = 60.0
"""Seconds without any worker after which the user is told what Ray waits for."""
LIMIT = 600.0
"""Seconds without any worker after which the run ends, where nobody else uses the Ray."""
STARTS = 3
"""Workers that may end one after another while they start."""


class Parts:
    """The federation's parts, laid out once for all actors.

    Args:
        runner: The client side of the federation.

    Attributes:
        setup: The parts in an anonymous file, which actors on this machine map, copy on write.
        copies: A reference to a copy in Ray's object store, once an actor is on another machine.
        digest: Tells these parts from others.
        folder: The run's folder.
    """

    def __init__(self, runner: ClientRuntime) -> None:
        self.setup = Setup(runner, packer())
        self.copies: tuple[Any, ...] = ()
        root = runner.settings.trainer_arguments.get("default_root_dir")
        self.folder = None if root is None else Path(root).absolute()
        arena = self.setup.arena
        self.digest = blake2b(arena.view((0, arena.end)), key=blake2b(self.setup.header).digest()).digest()

    def marker(self) -> Any:
        """Return a file in the run's folder, which is gone with the object; `None` where there is no folder."""
        return None if self.folder is None or not self.folder.is_dir() else NamedTemporaryFile(dir=self.folder)

    def source(self, elsewhere: bool) -> Source:
        """Return where an actor finds them."""
        arena = self.setup.arena
        if not elsewhere:
            status = os.fstat(arena.descriptor)
            return Source(self.setup.header, os.getpid(), arena.descriptor, (status.st_ino, status.st_size))
        if not self.copies:
            import numpy as np
            import ray

            self.copies = (ray.put(np.frombuffer(arena.view((0, arena.end)), np.uint8)),)
        return Source(self.setup.header, content=self.copies)


class RayWorker:
    """One actor as the driver sees it: it says where it is, takes the federation over, and then does its tasks.

    Args:
        kept: The actor.
        parts: The federation's parts.
        mark: Mark of the engine.
        broadcast: Memory for objects that several workers are sent.

    Attributes:
        ready: Whether it has taken the federation over.
        pending: The answer to what it was asked for last, if that is still awaited.
    """

    def __init__(self, kept: Kept, parts: Parts, mark: object, broadcast: Broadcast[Pieces]) -> None:
        self.kept, self.parts, self.mark, self.broadcast = kept, parts, mark, broadcast
        self.pending: Future[Any] | None = None  # a Future, for Ray's own waiting ends the program at a signal
        self._marker: Any = None
        self.ready = kept.holds is mark
        if kept.about is None:
            self.pending = kept.handle.hello.remote().future()
        elif not self.ready:
            self._hand_over(elsewhere=False)

    def _hand_over(self, elsewhere: bool) -> None:
        import ray

        assert self.kept.about is not None
        here = self.kept.about[1] == ray.get_runtime_context().get_node_id()
        self.kept.holds = None
        source = self.parts.source(elsewhere or not here)
        self._marker = None if here else self.parts.marker()
        parts = source, environment_for(here), os.getcwd(), sys.path, self._marker and self._marker.name
        self.pending = self.kept.handle.take_over.remote(*parts).future()

    def give(self, task: Task[Any], record: ClientRecord) -> None:
        """Send a task and the record of its client. The worker must be idle."""
        try:
            message = packed((task, record), self.broadcast)
        except Exception as error:
            raise UnpicklableError(str(error)) from error
        self.pending = self.kept.handle.work.remote(message, self.broadcast.arena.put()).future()

    def take(self) -> Reply | None:
        """Return the worker's reply; `None` while it starts. Its warnings are issued again here."""
        import ray

        assert self.pending is not None
        try:
            answer = self.pending.result()
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError) as error:
            raise EOFError(str(error)) from error
        self.pending = self._marker = None
        if self.ready:
            reply: Reply = unpacked(answer)
            warn_again(reply)
            return reply
        if self.kept.about is None:
            self.kept.about = answer
            self._hand_over(elsewhere=False)
        elif answer is None:  # on this machine, but in a container of its own
            self._hand_over(elsewhere=True)
        elif answer[0] != READY:
            return cast(Reply, unpacked(answer))
        else:
            self.ready, self.kept.holds = True, self.mark
        return None

    def has_answered(self) -> bool:
        """Return whether :meth:`take` would not wait."""
        return self.pending is not None and self.pending.done()

    def end(self, grace: float) -> str:
        """End the worker at once. Return which one it was, for a message."""
        self.kept.end()
        return "it had not started" if self.kept.about is None else "process {0} on {2}".format(*self.kept.about)


class RayEngine(WorkersEngine):
    """Carries out tasks on Ray actors, with the results of `sequential` bit for bit.

    The actors hold template, callbacks and data. They start at the first task, wait between `fit` and `test`, and end with
    :meth:`close` or with the program; what waits is handed to the next federation of the program. Records stay here, so an
    actor or a machine that is lost takes nothing with it: its clients are visited again.

    Args:
        runner: The client side of the federation.
        store: The clients' records.
        options: Number of actors, cluster and resources.
    """

    out_of_reach = (
        "Every machine of the cluster needs the same packages, and the modules that the federation is made of: install them "
        "there, or send them with Ray(init={'runtime_env': {'working_dir': '.'}})."
    )

    def __init__(self, runner: ClientRuntime, store: ClientRecords, options: Ray | None = None) -> None:
        self.options = options or Ray()
        super().__init__(runner, store, self.options.workers or usable_cores())
        self._needs = (self.options.num_cpus, self.options.num_gpus or 0.0)
        self._parts: Parts | None = None
        self._broadcast = Broadcast(Pieces())
        self._owner, self._mark, self._digest = object(), object(), b""
        self._starts = 0
        self._since, self._has_warned = 0.0, False

    def beside(self, runner: ClientRuntime) -> RayEngine:
        return RayEngine(runner, ClientRecords(), self.options)

    def check(self) -> None:
        """Refuse a machine without Ray."""
        if not installed():
            raise ConfigurationError(MISSING)

    def _start(self) -> None:
        if self._parts is None:
            load(self.options)
            parts = Parts(self.runner)  # before Ray starts: what cannot be sent is refused at once
            connect(self.options, self.width)
            self._place()
            if parts.digest != self._digest:  # else what the actors hold is what it was before a rest
                self._mark, self._digest = object(), parts.digest
            self._parts = parts
        self._since, self._starts, self._has_warned = time.monotonic(), 0, False

    def _place(self) -> None:
        """Find out how many actors there is room for, and what each needs."""
        starts_ray = is_own()
        on_gpu = self.runner.blueprint.device.type == "cuda"
        workers = self.width if starts_ray or self.options.workers is not None else None
        self._needs = needs_of(self.options, workers, on_gpu)
        if workers is None:
            self._most = workers_in(self._needs)

    def _idle(self, needed: int) -> list[int]:
        assert self._parts is not None
        for index in range(self.width):
            if index not in self._workers and sum(number not in self._busy for number in self._workers) < needed:
                kept = lease(self._needs, self._mark, self._owner)
                self._workers[index] = RayWorker(kept, self._parts, self._mark, self._broadcast)
        return [index for index in sorted(self._workers) if index not in self._busy and self._worker(index).ready]

    def _worker(self, index: int) -> RayWorker:
        return cast(RayWorker, self._workers[index])

    def _wait(self, timeout: float | None) -> Sequence[int]:
        import ray

        waited = {pending: i for i in self._workers if (pending := self._worker(i).pending) is not None}
        nobody = not any(worker.ready for worker in self._workers.values())
        ready, _ = wait(waited, PATIENCE if nobody and timeout is None else timeout, FIRST_COMPLETED)
        waited_for = time.monotonic() - self._since
        if nobody and not ready and waited_for > LIMIT and is_own():
            raise FederationError(
                f"Ray has started no worker in {LIMIT:g} seconds, at a load of {load_now()}. The state of the "
                "rounds before is intact: resume when the machine is less busy, or with engine='processes'."
            )
        if nobody and not ready and not self._has_warned and waited_for > PATIENCE:
            self._has_warned = True
            free = ray.available_resources()
            warnings.warn(
                f"Ray has started no worker in {PATIENCE:g} seconds; the run waits. Each is to have {self._needs[0]:g} CPUs "
                f"and {self._needs[1]:g} GPUs; {free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free beside what Ray "
                "has set aside for them and for other programs.",
                stacklevel=2,
            )
        return [waited[pending] for pending in ready]

    def _lost_at_start(self, how: str) -> Exception | None:
        self._starts += 1
        if self._starts < STARTS:
            return None
        return FederationError(
            f"{self._starts} Ray workers ended while they started (the last: {how}). Ray's logs are in the folder that "
            "/tmp/ray/session_latest leads to."
        )

    def _lost_at_work(self, who: str, how: str) -> str:
        return f"A Ray worker ended ({how}) at work on {who}, which is done again."

    def _too_many(self, tries: int, how: str) -> str:
        return (
            f"{tries} Ray workers ended while they worked on it, the last: {how} (Ray ends a worker when the memory of its "
            "machine runs out: try fewer workers, or more num_cpus for each)"
        )

    def _forget(self) -> None:
        super()._forget()
        self._broadcast.clear()
        for index in list(self._workers):  # another engine of this program may need them before this one does
            keep(self._worker(index).kept)
            del self._workers[index]

    def rest(self) -> None:
        """Let the actors wait: for the next task of this federation, or for another one of this program."""
        self._turn += 1
        self._forget()
        if self._parts is not None:
            self._parts.setup.arena.close()
        self._parts = None

    def close(self) -> None:
        """End the actors. The engine starts new ones if it is used again."""
        self.rest()
        end_kept(self._owner)

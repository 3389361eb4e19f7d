"""Ray as this program has it: started here or found, quiet, and the actors that wait for their next federation."""

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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.errors import ConfigurationError, missing_package
from fedlightning.options import Ray
from fedlightning.parallel.pool import usable_cores
from fedlightning.parallel.ray_start import HERE_ONLY, PATIENT, QUIET, TOKEN, environment, in_a_thread, start

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
    own, first = options.address is None, "ray" not in sys.modules
    _guarded = _guarded or (own and first and not any(name.startswith("RAY_AUTH_") for name in os.environ))
    with environment(QUIET | (HERE_ONLY | PATIENT if own else {}) | (TOKEN if _guarded else {})):
        import ray

    private: Any = getattr(ray, "_private", None)
    constants: Any = getattr(private, "ray_constants", None)
    if own and not first and hasattr(constants, "ENABLE_RAY_CLUSTER"):
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
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigurationError(
            f"Ray got address={options.address!r}: no Ray cluster answers there ({said}). Start one with "
            "`ray start --head`, or leave address out for a Ray of this program's own."
        ) from error
    _own = options.address is None
    atexit.register(_kept.clear)
    _without_messages()


def _knock(address: str, seconds: float = 10.0) -> None:
    """Refuse an address where nobody listens: `ray.init` would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
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

    found = ray.cluster_resources()
    return float(found.get("CPU", 0)), float(found.get("GPU", 0))


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

    for kept in sorted(_kept, key=lambda one: one.holds is mark, reverse=True):
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
    for kept in [one for one in _kept if one.owner is owner]:
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

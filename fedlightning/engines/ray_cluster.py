"""Ray as this program has it: started here or found, quiet, and the actors that wait for their next federation."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.blueprint.ray_options import RayOptions
from fedlightning.engines import ray_sweep
from fedlightning.engines.pool import one_thread, usable_cores
from fedlightning.engines.ray_sweep import sweep
from fedlightning.errors import ConfigurationError, warn

MISSING = (
    "engine='ray' needs Ray, which is not installed here: pip install 'fedlightning[ray]'. Without it engine='processes' "
    "trains on several cores of this machine."
)
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Variables for a Ray that tells nobody of itself, and does not warn of workers without a GPU."""
HERE_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With this a Ray of our own listens on the loopback interface only. It is read when `ray` is imported."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""With these nobody else on this machine gets into a Ray of our own. They are read when `ray` is imported, and by `init`."""

PATIENT = {
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_server_request_timeout_seconds": "120",
    "RAY_health_check_timeout_ms": "60000",
}
"""With these a Ray of our own gives its processes the time that they need where many others want the cores."""
MARK = {"FEDLIGHTNING_RAY": secrets.token_hex(16)}
"""All processes of a Ray of our own have this in their environment; see :mod:`fedlightning.engines.ray_sweep`."""
TRIES = 3
"""How often a Ray of our own is started, until it is there."""
SECONDS = 180.0
"""That a start may take."""


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
_sweeper: subprocess.Popen[bytes] | None = None
_guarded = False  # whether `ray` was imported with TOKEN


def installed() -> bool:
    """Return whether Ray can be imported."""
    return importlib.util.find_spec("ray") is not None


def load(options: RayOptions) -> None:
    """Import Ray, quietly.

    Args:
        options: Say whether it will be a Ray of our own.

    Raises:
        ConfigurationError: If it is not installed.
    """
    global _guarded
    if not installed():
        raise ConfigurationError(MISSING)
    own, first = options.address is None, "ray" not in sys.modules
    _guarded = _guarded or (own and first and not any(name.startswith("RAY_AUTH_") for name in os.environ))
    with _environment(QUIET | (HERE_ONLY | PATIENT if own else {}) | (TOKEN if _guarded else {})):
        import ray

    private: Any = getattr(ray, "_private", None)
    constants: Any = getattr(private, "ray_constants", None)
    if own and not first and hasattr(constants, "ENABLE_RAY_CLUSTER"):
        constants.ENABLE_RAY_CLUSTER = False  # `ray` was imported before HERE_ONLY was set


def connect(options: RayOptions, workers: int) -> None:
    """Start Ray, or connect to the cluster of the options, unless the program is connected already.

    Args:
        options: Address and arguments.
        workers: Number of workers that a Ray of our own must have room for.

    Raises:
        ConfigurationError: If Ray is not installed, there is no such cluster, the program is connected to another one, or a Ray
            of our own does not start.
    """
    load(options)
    if sys.modules["ray"].is_initialized():
        if _own and options.address is not None:
            raise ConfigurationError(
                f"ray: address={options.address!r}, but this program has started a Ray of its own for an earlier run. Call "
                "ray.shutdown() first, or give every run the same address."
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
            _start(arguments)
        else:
            _in_a_thread(arguments, own=False)
    except (ConnectionError, FutureTimeout) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigurationError(
            f"ray: address={options.address!r}: no Ray cluster answers there ({said}). Start one with "
            "`ray start --head`, or leave address out for a Ray of this program's own."
        ) from error
    atexit.register(_kept.clear)
    _without_messages()


def _knock(address: str, seconds: float = 10.0) -> None:
    """Refuse an address where nobody listens: `ray.init` would go on trying for minutes.

    Raises:
        ConfigurationError: If nobody does. An address that is no host and port (`auto`) is Ray's to find.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"ray: address={address!r}: no Ray cluster answers there ({error}). Start one with `ray start --head`, or leave "
            "address out for a Ray of this program's own."
        ) from error


def is_own() -> bool:
    """Return whether Ray was started for engines of this program, which it ends with."""
    return _own


def _start(arguments: Mapping[str, Any]) -> None:
    """Start a Ray of our own; on a machine that is busy, more than once.

    Raises:
        ConfigurationError: If it does not start.
    """
    _watch()
    for number in range(1, TRIES + 1):
        try:
            return _in_a_thread(arguments, own=True)
        except (TypeError, ValueError):  # of the arguments
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:300].rstrip(".") or f"it took longer than {SECONDS:g} seconds"
            _clear_away()
            if number == TRIES:
                raise ConfigurationError(
                    f"Ray has not started in {TRIES} tries; the last: {said}. The load of this machine is {load_now()}: wait until "
                    "it is less, or use engine='processes', which needs no services. Ray's logs are below /tmp/ray."
                ) from error
            warn(f"Ray has not started ({said}), at a load of {load_now()}: try {number + 1} of {TRIES}.")


def load_now() -> str:
    """Return the load of this machine, in words."""
    return f"{os.getloadavg()[0]:.0f} on {usable_cores()} cores"


def _clear_away() -> None:
    """End what a start that failed has left."""
    import ray

    ending = threading.Thread(target=ray.shutdown, daemon=True)
    ending.start()
    ending.join(SECONDS / 6)
    sweep(MARK["FEDLIGHTNING_RAY"].encode())


def _watch() -> None:
    """Let a program beside this one end what Ray leaves behind; it ends with that."""
    global _sweeper
    if _sweeper is None and sys.platform == "linux":
        program = [sys.executable, "-I", "-S", ray_sweep.__file__, MARK["FEDLIGHTNING_RAY"]]
        _sweeper = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)


def _in_a_thread(arguments: Mapping[str, Any], own: bool) -> None:
    """Call `ray.init` in a thread that stays: in the main thread it would replace Python's handler of SIGTERM.

    The thread stays because the kernel ends what it has started when it ends. Beneath Python's handler Ray installs another
    one of its own, which ends the process by SIGABRT; so Python's is put in its place again.
    """
    done: Future[None] = Future()

    def start() -> None:
        global _own
        try:
            own_ones = PATIENT | MARK | (TOKEN if _guarded else {}) if own else {}
            with _environment(QUIET | own_ones), one_thread():
                import ray

                logging.getLogger("ray").setLevel(logging.ERROR)  # else it says that this is not the main thread
                ray.init(**arguments)
            _own = own
        except BaseException as error:
            done.set_exception(error)
            return
        done.set_result(None)
        threading.Event().wait()

    threading.Thread(target=start, name="fedlightning-ray", daemon=True).start()
    done.result(SECONDS)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not None:
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within the block, set variables that the user has not set."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


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


def needs_of(options: RayOptions, workers: int | None, on_gpu: bool) -> tuple[float, float]:
    """Return the CPUs and GPUs of one worker.

    Args:
        options: What the user says.
        workers: Number of workers; `None`: as many as there is room for.
        on_gpu: Whether clients train on GPUs.

    Raises:
        ConfigurationError: If there is no room for any worker.
    """
    cpus, gpus = room()
    share = options.num_gpus
    if share is None:
        on_one = math.ceil((workers or gpus) / gpus) if on_gpu and gpus else 0  # workers that share a GPU
        share = _floor(1 / on_one) if on_one else 0.0
    if on_gpu and not share:
        raise ConfigurationError(
            f"Clients train on GPUs here, and Ray's workers would have none (ray: num_gpus={options.num_gpus}; the cluster "
            f"has {gpus:g} GPUs). Give each a share of one, as in ray={{'num_gpus': 0.5}}, or set accelerator='cpu'."
        )
    needed = options.num_cpus
    if _own and workers is not None and workers * needed > cpus:
        needed = _floor(cpus / workers)  # our own Ray: CPUs are numbers, and nobody else wants any
    if needed > cpus or share > gpus:
        raise ConfigurationError(
            f"Ray has {cpus:g} CPUs and {gpus:g} GPUs, and each worker is to have {needed:g} and {share:g} (ray: num_cpus, "
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
    """Return an actor: one that waits, if possible one that holds the engine's parts, or else a new one.

    Args:
        needs: CPUs and GPUs to be set aside for it.
        mark: Mark of the parts that the engine works with.
        owner: Token of the engine.
    """
    import ray

    from fedlightning.engines.ray_worker import Actor

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

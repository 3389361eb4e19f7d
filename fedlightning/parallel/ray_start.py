"""How Ray is started or found from a program that goes on: in a thread, quietly, with patience where the machine is busy."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from fedlightning.compat.system import short_temporary_folder
from fedlightning.errors import ConfigurationError, warn
from fedlightning.parallel import ray_sweep
from fedlightning.parallel.pool import one_thread, usable_cores

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
"""All processes of a Ray of our own have this in their environment; see :mod:`fedlightning.parallel.ray_sweep`."""
TRIES = 3
"""How often a Ray of our own is started, until it is there."""
SECONDS = 180.0
"""That a start may take."""
_sweeper: subprocess.Popen[bytes] | None = None


def start(arguments: Mapping[str, Any], guarded: bool) -> None:
    """Start a Ray of our own; on a machine that is busy, more than once."""
    _watch()
    for number in range(1, TRIES + 1):
        try:
            in_a_thread(arguments, PATIENT | MARK | (TOKEN if guarded else {}))
            return
        except (TypeError, ValueError):  # of the arguments
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300].rstrip(".") or f"it took longer than {SECONDS:g} seconds"
            _clear_away()
            if number == TRIES:
                raise ConfigurationError(
                    f"Ray has not started in {TRIES} tries; the last: {reason}. This machine's load is {load_now()}: "
                    "wait until it is less, or use engine='processes', which needs no services. Ray's logs: /tmp/ray."
                ) from error
            warn(f"Ray has not started ({reason}), at a load of {load_now()}: try {number + 1} of {TRIES}.")


def load_now() -> str:
    """Return the load of this machine, in words."""
    return f"{os.getloadavg()[0]:.0f} on {usable_cores()} cores"


def _clear_away() -> None:
    """End what a start that failed has left."""
    import ray

    ending = threading.Thread(target=ray.shutdown, daemon=True)
    ending.start()
    ending.join(SECONDS / 6)
    ray_sweep.sweep(MARK["FEDLIGHTNING_RAY"].encode())


def _watch() -> None:
    """Let a program beside this one end what Ray leaves behind; it ends with that."""
    global _sweeper
    if _sweeper is None and sys.platform == "linux":
        program = [sys.executable, "-I", "-S", ray_sweep.__file__, MARK["FEDLIGHTNING_RAY"]]
        _sweeper = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)


def in_a_thread(arguments: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> None:
    """Call `ray.init` in a thread that stays: in the main thread it would replace Python's handler of SIGTERM.

    The thread stays because the kernel ends what it has started when it ends. Beneath Python's handler Ray installs another
    one of its own, which ends the process by SIGABRT; so Python's is put in its place again.
    """
    done: Future[None] = Future()

    def begin() -> None:
        try:
            sockets = {"RAY_TMPDIR": short_temporary_folder()}  # they lie there
            with environment(QUIET | sockets | dict(variables or {})), one_thread():
                import ray

                logging.getLogger("ray").setLevel(logging.ERROR)  # else it says that this is not the main thread
                ray.init(**arguments)
        except BaseException as error:
            done.set_exception(error)
            return
        done.set_result(None)
        threading.Event().wait()

    threading.Thread(target=begin, name="fedlightning-ray", daemon=True).start()
    done.result(SECONDS)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not None:
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within the block, set variables that the user has not set."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)

"""What POSIX has and other systems lack, asked in one place: locks of files, signals, process groups, names of files.

Windows has none of `fcntl`, `resource`, `os.killpg` and some signals. What can do without them does; what cannot refuses with
:func:`fedlightning.errors.refuse_without_posix`.

Processes that are not forked from this one, as workers of a DataLoader are in Python 3.14, or where somebody asks for it.

The server that forks them listens on a socket, whose path may have 107 bytes: too few for some temporary folders.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

PRELOADED = ("__main__", "fedlightning.trainer", "fedlightning.callbacks", "fedlightning.datamodules")
"""What the fork server imports once for all, and each worker anew without it; the program itself is Python's default."""
MAX_PATH_BYTES = 50
"""Bytes of a temporary folder's path that leave room for the folders and sockets of multiprocessing and Ray inside."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def preload_fork_server() -> None:
    """Have the fork server, should it ever start, import what a loader's worker needs.

    A worker that imports torch and Lightning by itself takes seconds, and the loaders of each visit start their own.
    Nothing changes where the server runs already, or where nobody asks for it.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        short_sockets()
        multiprocessing.set_forkserver_preload(list(PRELOADED))


def short_temporary_folder() -> str:
    """Return the temporary folder, or another one that this process may write to if its path is too long for sockets."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= MAX_PATH_BYTES:
        return usual
    return next(
        (folder for folder in SHORT_FOLDERS if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)), usual
    )


def short_sockets() -> None:
    """Let multiprocessing put this process's sockets into a folder with a short path.

    It makes a folder of its own in the temporary folder, once for a process, and keeps it. With a long `TMPDIR` every
    process that is started would fail with "AF_UNIX path too long".
    """
    short = short_temporary_folder()
    if short == tempfile.gettempdir():
        return
    before = tempfile.tempdir
    tempfile.tempdir = short
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


try:
    import fcntl
    import resource
except ImportError:
    fcntl = resource = None  # type: ignore[assignment]

RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{port}{digit}" for port in ("COM", "LPT") for digit in range(10))}
"""Names of devices on Windows, whatever stands behind a dot."""


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those signals that this system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def lead_group() -> None:
    """Make this process the first of a group of its own, where there are groups."""
    if hasattr(os, "setsid"):
        os.setsid()


def kill_group(pid: int) -> None:
    """Kill a process and all of its group; where there are no groups, the process.

    Raises:
        OSError: If it is not there, or leads no group of its own.
    """
    if hasattr(os, "killpg"):
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGTERM)  # on Windows that ends a process without asking it


def peak_memory_mb() -> float | None:
    """Largest resident memory of this process so far, in MB; `None` where the system does not tell."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 * 1024 if sys.platform == "darwin" else 1024), 1)


def lock_file(file: int, path: Path, shared: bool = False) -> Callable[[], None] | None:
    """Lock an open file until the process ends or closes it.

    Without `flock` a file beside it is locked, which others may then still read and write.

    Returns:
        What lets the lock go; `None`: closing the file does.

    Raises:
        BlockingIOError: If another process holds it.
        OSError: If the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return None
    beside = FileLock(f"{path}.held", timeout=0)
    try:
        beside.acquire()
    except Timeout:
        raise BlockingIOError from None
    return beside.release


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine is there; without POSIX there is no harmless way to ask: yes."""
    if not hasattr(os, "killpg"):
        return True  # on Windows signal 0 is Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def file_name_of(client: str) -> str:
    """Return what files and folders of a client are called, on any system.

    Letters that are none in names of files are written as in addresses; so is the first one of a device of Windows, and a dot
    at the end, which Windows drops.

    Example:
        >>> [file_name_of(client) for client in ("ward 3", "A/B", "nul.1", "etc.", "..")]
        ['ward%203', 'A%2FB', '%6Eul.1', 'etc%2E', '.%2E']
    """
    name = quote(client, safe="", errors="replace")
    if name.partition(".")[0].upper() in RESERVED:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return f"{name[:-1]}%2E" if name.endswith(".") else name


def same_file(name: str) -> str:
    """Return a name as the system's files tell it from others: Windows and macOS take "A" and "a" for one."""
    return name.casefold() if sys.platform in ("win32", "darwin") else name

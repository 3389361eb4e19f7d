"""Locks: one writer for a run's folder, and one thread of a process at work."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from fedlightning.compat.system import is_alive, lock_file
from fedlightning.errors import ConfigurationError, warn
from fedlightning.storage.files import is_writing_process, writing

LOCK = ".lock"
SILENCE = 600.0
"""Seconds without a heartbeat after which the holder of another machine is taken for dead: more than a long round's
evaluation on a shared file system, and short enough for a requeued job."""


_at_work = threading.RLock()


@contextmanager
def only_thread() -> Iterator[None]:
    """Within the block, no other thread of this process works on a federation; the same thread may, as a hook that fits does.

    Also a decorator.

    Raises:
        ConfigurationError: If another thread does.
    """
    if not _at_work.acquire(blocking=False):
        raise ConfigurationError(
            f"The thread '{threading.current_thread().name}' asks for work on a federation while another thread of this "
            "process is at work on one. Threads share the global random generators, so both would have other results each "
            "time. Let one wait for the other, or give each a process of its own (concurrent.futures.ProcessPoolExecutor, "
            "or `fedlightning sweep`)."
        )
    try:
        yield
    finally:
        _at_work.release()


class RunInUseError(ValueError):
    """Another process writes into the run's folder."""


class RunLock:
    """A lock on a run's folder, held by the one process that writes into it.

    On one machine the kernel releases it with the process, however that ends (`flock`). Where machines share a folder
    `flock` may not reach the other one, so the file also tells its holder and is touched every round; a holder elsewhere
    that has been silent for ten minutes is taken for dead.

    Args:
        folder: The run's folder; made if need be.

    Raises:
        RunInUseError: If another process holds it; names the process, its machine and since when.
        UnwritableError: If the folder cannot be made or written.

    Example:
        >>> with RunLock(Path("run")) as lock:
        ...     lock.holder["host"] == socket.gethostname()
        True
        >>> Path("run").exists()
        False
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        with writing(folder):
            self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._take()
        self.holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            with writing(self.path):
                os.ftruncate(self._file, 0)
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, json.dumps(self.holder).encode())
        except BaseException:
            self.release()
            raise

    def _take(self) -> int:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            kernel_knows = True
            self._let_go = None
            try:
                self._let_go = lock_file(file, self.path)
            except BlockingIOError:
                holder = _read(file)
                os.close(file)
                raise self._refusal(holder) from None
            except OSError as error:  # some network file systems have no locks
                kernel_knows = False
                warn(
                    f"The file system of {self.path.parent} has no locks ({error.strerror}). Another process that writes "
                    "into the run's folder is noticed by what it says in .lock only."
                )
            try:
                still_there = os.stat(self.path).st_ino == os.fstat(file).st_ino
            except FileNotFoundError:  # released and removed between our opening and our locking it
                still_there = False
            if not still_there:
                self._close(file)
                continue
            holder = _read(file)
            elsewhere = holder.get("host", socket.gethostname()) != socket.gethostname()
            silent = time.time() - os.fstat(file).st_mtime >= SILENCE
            if (elsewhere and not silent) or (not kernel_knows and not elsewhere and _is_there(holder)):
                self._close(file)
                raise self._refusal(holder)
            return file

    def _close(self, file: int, remove: bool = False) -> None:
        os.close(file)
        if self._let_go is not None:
            if remove:  # Windows removes no open file, and nobody else holds the lock yet
                with contextlib.suppress(OSError):
                    self.path.unlink()
            self._let_go()

    def _refusal(self, holder: dict[str, Any]) -> RunInUseError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since {holder.get('since', '?')}"
        return RunInUseError(
            f"The run in {self.path.parent} is being written by {who}. Wait until it ends, stop it, or start a run of "
            "another name or version."
        )

    def beat(self) -> None:
        """Say that the holder is alive."""
        os.utime(self._file if os.utime in os.supports_fd else self.path)

    def release(self) -> None:
        """Let others write; a folder that was made for the lock and is still empty is removed."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._close(self._file, remove=True)
        self._file = -1
        with contextlib.suppress(OSError):
            for path in self._new_folders:
                path.rmdir()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def only_writer(folder: Path) -> AbstractContextManager[RunLock | None]:
    """Hold the lock of a run's folder, in the one process of a run that writes (rank 0 under DDP)."""
    return RunLock(folder) if is_writing_process() else nullcontext()


def holder_of(folder: Path) -> dict[str, Any] | None:
    """Return who holds the lock of a folder: `pid`, `host` and `since`; `None`: nobody. Nothing is changed or taken.

    Of a holder on another machine it is known only that it has not let the lock go: it may have been killed.

    Example:
        >>> with RunLock(Path("run")):
        ...     holder_of(Path("run"))["pid"] == os.getpid()
        True
        >>> holder_of(Path("run")) is None
        True
    """
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        holder = _read(file)
        if holder.get("host", socket.gethostname()) != socket.gethostname():
            return holder
        return holder if _is_there(holder) and _is_locked(file, folder / LOCK) else None
    finally:
        os.close(file)


def _is_locked(file: int, path: Path) -> bool:
    """Return whether another process holds the lock of an open file; where there are no locks, say so."""
    try:
        let_go = lock_file(file, path, shared=True)
    except OSError:  # a process of this number is there, so it is the holder where the file system has no locks
        return True
    if let_go is not None:
        let_go()
    return False


def _is_there(holder: dict[str, Any]) -> bool:
    """Return whether the process that a lock names is one of this machine."""
    return isinstance(holder.get("pid"), int) and is_alive(holder["pid"])


def _read(file: int) -> dict[str, Any]:
    try:
        os.lseek(file, 0, os.SEEK_SET)
        holder = json.loads(os.read(file, 4096) or b"{}")
    except ValueError:  # its holder is writing it
        return {}
    return holder if isinstance(holder, dict) else {}

"""Processes that are not forked from this one, as workers of a DataLoader are in Python 3.14, or where somebody asks for it.

The server that forks them listens on a socket, whose path may have 107 bytes: too few for some temporary folders.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing import util
from pathlib import Path

PRELOADED = ("__main__", "fedlightning.trainer", "fedlightning.callbacks", "fedlightning.datamodules")
"""What the fork server imports once for all, and each worker anew without it; the program itself is Python's default."""
LONGEST = 50
"""Bytes of a temporary folder's path that leave room for the folders and sockets of multiprocessing and Ray inside."""
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


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
    if len(os.fsencode(usual)) <= LONGEST:
        return usual
    return next((folder for folder in SHORT if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)), usual)


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

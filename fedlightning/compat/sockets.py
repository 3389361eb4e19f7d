"""Sockets between processes of one machine, where temporary folders have long names: paths are limited to 107 bytes."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import util
from pathlib import Path

LONGEST = 50
"""Bytes of a temporary folder's path that leave room for the folders and sockets of multiprocessing and Ray inside."""
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


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

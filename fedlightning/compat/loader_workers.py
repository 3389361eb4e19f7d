"""Workers of a DataLoader where they are not forked from this process: Python 3.14's way, and anybody's choice before."""

from __future__ import annotations

import multiprocessing

from fedlightning.compat.sockets import short_sockets

PRELOADED = ("__main__", "fedlightning.trainer", "fedlightning.callbacks", "fedlightning.datamodules")
"""What the fork server imports once for all, and each worker anew without it; the program itself is Python's default."""


def preload_fork_server() -> None:
    """Have the fork server, should it ever start, import what a loader's worker needs.

    A worker that imports torch and Lightning by itself takes seconds, and the loaders of each visit start their own.
    Nothing changes where the server runs already, or where nobody asks for it.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        short_sockets()
        multiprocessing.set_forkserver_preload(list(PRELOADED))

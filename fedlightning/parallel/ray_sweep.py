"""Ends what a Ray of our own leaves behind: a program beside the run, which waits for its end. It imports nothing of ours.

The kernel ends most of Ray's processes with the program that has started them; not one that was just being started as the
program was killed, nor helpers of helpers that look for their parent only now and then.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path


def sweep(mark: bytes) -> bool:
    """Kill every process that was started with a mark in its environment; return whether there was any."""
    killed = False
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
                killed = True
        except OSError:  # it is gone, or somebody else's
            continue
    return killed


def wait_and_sweep(mark: bytes, seconds: float = 60.0) -> None:
    """Wait for the end of the parent, then sweep until nothing has been found three times."""
    parent, quiet = os.getppid(), 0
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1.0)[0]:
        continue
    end = time.monotonic() + seconds
    while quiet < 3 and time.monotonic() < end:
        quiet = 0 if sweep(mark) else quiet + 1
        time.sleep(0.2)


if __name__ == "__main__":
    wait_and_sweep(sys.argv[1].encode())

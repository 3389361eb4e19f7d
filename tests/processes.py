"""Programs as processes of their own that need not import torch and Lightning anew: they are forked from the test's process.

That process has one torch thread and no GPU, so that a fork of it can train.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


def forked(
    work: Callable[[], Any], cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Do some work in a forked process and return how it ended, with what it printed.

    Args:
        work: Function without arguments. A number that it returns is the exit code.
        cwd: Working directory.
        env: Further environment variables.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def begin() -> int:
            os.chdir(cwd)
            os.environ.update(env or {})
            for number, file in ((1, out), (2, err)):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            return int(work() or 0)

        code = wait(fork(begin))
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([], code, *texts)


def fork(work: Callable[[], Any]) -> int:
    """Fork a process that does some work and return its id. It ends with the work, whatever happens.

    Args:
        work: Function without arguments. A number that it returns is the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    forkserver._forkserver._forkserver_pid = None  # of another test: whom the parent started, a fork cannot wait for
    try:
        try:
            code = int(work() or 0)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # what it says cannot be written: the disk is full, a pipe is closed
        code = code or 1
    finally:  # an exception that got out of here would go on as a second test runner
        os._exit(code)


def wait(pid: int, seconds: float = 240.0) -> int:
    """Wait for a process and return its exit code, or minus the signal that ended it.

    Args:
        pid: A child of this process.
        seconds: Time after which it is killed.

    Raises:
        TimeoutError: If it had to be killed.
    """
    ends = time.monotonic() + seconds
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > ends:
                raise TimeoutError(f"process {pid} has not ended within {seconds:g} s and was killed")
            select.select([], [], [], 0.005)  # time.sleep fails under libfaketime's clock
    except BaseException:  # the test's own time limit too
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def script(path: Path, words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> Any:
    """Run a Python file as `python FILE WORDS` would, in a forked process."""

    def work() -> None:
        sys.argv = [str(path), *map(str, words)]
        sys.path[0:0] = [str(path.parent)]
        runpy.run_path(str(path), run_name="__main__")

    return forked(work, cwd, env)

"""Child processes for runs, forked in milliseconds from a server that has imported torch.

A child leads a session of its own, so that Ctrl-C reaches only its parent, and it ends when the parent is gone. It is
stopped by SIGKILL: the state of a run on disk is complete at every instant (see `run.persistence`), while other signals
would reach Lightning in the middle of a visit.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from fedlightning.compat.pytorch_lightning import use_lightning_if_possible
from fedlightning.compat.system import kill_group, lead_group, short_sockets
from fedlightning.config.input_errors import InputError, explain

T = TypeVar("T")
Main = Callable[[Sequence[str]], int]
"""The command line as an importable function: words in, exit code out."""
_PRELOAD = "fedlightning.experiments.preload"
_SENTENCE = re.compile(r"fedlightning(?: [\w-]+)?: (.+)")  # how `cli.main` reports bad input


class ChildCrash(Exception):
    """Raised if a child process ended without an answer."""


def context() -> Any:
    """Return the multiprocessing context: forked from a preloaded server, or spawned where there is no forkserver."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    short_sockets()
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload([_PRELOAD])  # without effect once the server runs
    return forkserver


# -- a function --------------------------------------------------------------------------------------------------------
def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call `function` in a child process and return its result."""
    ctx = context()
    ours, theirs = ctx.Pipe(duplex=False)
    process = ctx.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        kind, value = ours.recv()
    except EOFError:
        kind, value = "crash", None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
        ours.close()
    if kind == "answer":
        return value
    if kind == "input":
        raise InputError(value)
    raise ChildCrash(f"{function.__name__} crashed in process {process.pid} (exit code {process.exitcode}); see above.")


def _answer(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    _lead(Path(os.devnull))
    use_lightning_if_possible()  # user code is imported here as the runs will import it
    try:
        connection.send(("answer", function(*arguments)))
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            traceback.print_exception(error)
        connection.send(("crash", None) if sentence is None else ("input", sentence))


# -- a run -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """The end of a child process.

    Attributes:
        error: Sentence that says what went wrong, or `None`.
        seconds: Duration.
    """

    error: str | None
    seconds: float


class Child:
    """A process that carries out `fedlightning` commands, one after another until one fails.

    Args:
        commands: Words after `fedlightning` on the command line, for each command.
        log: File that standard output and error are appended to.
        threads: Number of torch's threads. `None` uses its default.
        gpu: The only GPU the process sees. `None` shows all.
        main: Command line: words in, exit code out.
        folder: Working directory. `None` is that of this process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        log: Path,
        threads: int | None,
        gpu: str | None,
        main: Main,
        folder: Path | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._started = time.monotonic()
        self._process = context().Process(
            target=_work, args=([list(c) for c in commands], str(log), threads, gpu, main, folder)
        )
        self._process.start()

    @property
    def sentinel(self) -> int:
        """Handle for `multiprocessing.connection.wait`."""
        return int(self._process.sentinel)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return int(self._process.pid)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process.exitcode is not None

    def outcome(self) -> Outcome:
        """Wait for the end and return how it ended."""
        self._process.join()
        return Outcome(self._error(self._process.exitcode), self.seconds)

    def kill(self) -> None:
        """Kill the process and its own children."""
        try:
            kill_group(self.pid)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.join()

    def _error(self, code: int) -> str | None:
        if code == 0:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            why = " Perhaps memory ran out: use fewer --jobs." if name == "SIGKILL" else ""
            return f"It was killed by {name}.{why}"
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else f"It ended with exit code {code}."
        sentences = [match[1] for line in lines if (match := _SENTENCE.fullmatch(line))]
        return sentences[-1] if code == 2 and sentences else last


def _work(
    commands: list[list[str]], log: str, threads: int | None, gpu: str | None, main: Main, folder: Path | None
) -> None:
    """Carry out the commands; the main function of a child."""
    _lead(Path(log))
    if folder is not None:
        os.chdir(folder)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    for words in commands:
        print(f"$ fedlightning {' '.join(words)}", flush=True)
        # Lightning starts this command line again for every further device.
        sys.argv = [str(sys.modules[main.__module__].__file__), *words]
        code = main(words)
        if code:
            sys.exit(code)


def _lead(log: Path) -> None:
    """Start a session, send output to a file, and end when the parent is gone."""
    lead_group()
    if str(log) != os.devnull:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    importlib.import_module(_PRELOAD)


def _follow(parent: Any) -> None:
    parent.join()
    kill_group(os.getpid())  # it leads its group

"""A process of its own for every run, forked in milliseconds from a server that has imported torch.

A child leads a session of its own, so that Ctrl-C reaches only the process that watches it, and it ends when that one
is gone. It is stopped by SIGKILL: a run's state on disk is complete at every instant (see `persistence`), while a
polite signal would reach Lightning in the middle of a visit.
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

from fedlightning.config.errors import InputError, explain

T = TypeVar("T")
Main = Callable[[Sequence[str]], int]
"""The command line as a function that can be imported: words in, exit code out."""
_PRELOAD = "fedlightning.experiments.preload"
_SENTENCE = re.compile(r"fedlightning(?: [\w-]+)?: (.+)")  # how `cli.main` reports bad input


class ChildCrash(Exception):
    """A child process ended without an answer."""


def context() -> Any:
    """The way children are made: forked from a preloaded server, or started anew where that does not exist."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([_PRELOAD])  # without effect once the server runs
    return found


# -- a function --------------------------------------------------------------------------------------------------------
def call(function: Callable[..., T], *arguments: Any) -> T:
    """What `function` answers in a child process.

    Raises:
        InputError: bad input, in the child's words; ChildCrash: anything else (its traceback is on stderr).
    """
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
    """How a child ended.

    Attributes:
        error: `None`, or a sentence; seconds: how long it took.
    """

    error: str | None
    seconds: float


class Child:
    """`fedlightning` commands in a process of their own, one after another until one fails.

    Args:
        commands: what would follow `fedlightning` on the command line.
        log: file that standard output and error are appended to.
        threads: torch's threads; `None`: its default.
        gpu: the one GPU to see; `None`: all.
        main: the command line: words in, exit code out.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], log: Path, threads: int | None, gpu: str | None, main: Main
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._started = time.monotonic()
        self._process = context().Process(
            target=_work, args=([list(c) for c in commands], str(log), threads, gpu, main)
        )
        self._process.start()

    @property
    def sentinel(self) -> int:
        """For `multiprocessing.connection.wait`."""
        return int(self._process.sentinel)

    @property
    def pid(self) -> int:
        """The process's id."""
        return int(self._process.pid)

    @property
    def seconds(self) -> float:
        """Time since it was started."""
        return time.monotonic() - self._started

    def ended(self) -> bool:
        """Whether it is over."""
        return self._process.exitcode is not None

    def outcome(self) -> Outcome:
        """How it ended; waits for the end."""
        self._process.join()
        return Outcome(self._error(self._process.exitcode), self.seconds)

    def kill(self) -> None:
        """Stop it and what it started, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
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
        sentences = [found[1] for line in lines if (found := _SENTENCE.fullmatch(line))]
        return sentences[-1] if code == 2 and sentences else last


def _work(commands: list[list[str]], log: str, threads: int | None, gpu: str | None, main: Main) -> None:
    """A child's main function."""
    _lead(Path(log))
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    for words in commands:
        print(f"$ fedlightning {' '.join(words)}", flush=True)
        sys.argv = [
            str(sys.modules[main.__module__].__file__),
            *words,
        ]  # what Lightning starts again for every further device
        code = main(words)
        if code:
            sys.exit(code)


def _lead(log: Path) -> None:
    """A session of its own, output to a file, and an end when the parent is gone."""
    os.setsid()
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
    os.killpg(os.getpgid(0), signal.SIGKILL)

"""The watch of engines that work in this process: it ends the run when a client takes too long."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fedlightning.engines.attempts import ClientTimeoutError, Retries
from fedlightning.errors import ControlFlow

GRACE = 30.0
"""Seconds after which the process is ended if the interrupted code has not come back."""
EXIT_CODE = 2
"""Exit code of a process that is ended."""
MAX_LISTED = 5
"""Clients that are named."""


class TimeIsUp(ControlFlow):
    """The watchdog has interrupted this thread."""


class Watchdog:
    """Watches how long the engine's thread is at work on clients.

    A client in this thread cannot be ended alone: its code may hold locks, or be half through a change. So the thread is
    interrupted as by Ctrl-C, which every loop answers by closing what it has open, and the run ends with a sentence.
    Code that does not come back from that within :data:`GRACE` seconds (a call of C that waits for ever) takes the process
    with it. Either way no round is half saved: nothing is saved while a client is at work.

    Args:
        attempts: Knows the time that a client may take, and the clock.
    """

    def __init__(self, attempts: Retries) -> None:
        self._attempts = attempts
        self._lock = threading.Lock()
        self._deadline: float | None = None
        self._who: Sequence[str] = ()
        self._depth = 0
        self._thread = 0
        self._fired: str | None = None
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def watching(self, clients: Sequence[str], allowance: int = 1) -> AbstractContextManager[None]:
        """Within the block, this thread is at work on these clients. Blocks may be nested: the innermost one names them."""
        timeout = self._attempts.policy.timeout
        return nullcontext() if timeout is None else self._watching(clients, allowance, timeout)

    @contextmanager
    def _watching(self, clients: Sequence[str], allowance: int, timeout: float) -> Iterator[None]:
        self._start(timeout)
        handler = signal.getsignal(signal.SIGINT)
        outermost = self._depth == 0 and threading.current_thread() is threading.main_thread()
        if outermost:
            signal.signal(signal.SIGINT, partial(self._interrupted, handler))
        before = self._deadline, self._who
        deadline = self._attempts.clock() + timeout * allowance
        self._set(deadline if before[0] is None else min(deadline, before[0]), clients)
        self._depth += 1
        try:
            try:
                yield
            finally:
                self._depth -= 1
                self._set(*before)
                if outermost and self._fired is None:
                    signal.signal(signal.SIGINT, handler)
            if self._fired is not None:
                raise TimeIsUp  # it came back by itself at that moment
        except BaseException:
            fired = self._fired
            if fired is None:
                raise
            if self._depth:
                raise TimeIsUp from None
            self.close()
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, handler)  # Lightning's Trainer leaves it ignored after an interrupt
            raise ClientTimeoutError(fired) from None

    def close(self) -> None:
        """End the watching thread. It starts again when it is needed."""
        self._closed.set()
        self._watcher = self._fired = None

    def _interrupted(self, handler: Any, number: int, frame: Any) -> None:
        """Handle SIGINT: the watchdog's own ends the client; another one is Ctrl-C, and means what it meant before."""
        if self._fired is not None:
            raise KeyboardInterrupt
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:  # ignored in the background of a script
            signal.signal(signal.SIGINT, handler)
            signal.raise_signal(signal.SIGINT)

    def _set(self, deadline: float | None, who: Sequence[str]) -> None:
        with self._lock:
            self._deadline, self._who = deadline, who

    def _start(self, timeout: float) -> None:
        self._thread = threading.get_ident()
        if self._watcher is None:
            self._fired = None
            self._closed = threading.Event()
            self._watcher = threading.Thread(
                target=self._watch,
                args=(self._closed, min(1.0, timeout / 4)),
                name="fedlightning-watchdog",
                daemon=True,
            )
            self._watcher.start()

    def _watch(self, closed: threading.Event, interval: float) -> None:
        while not closed.wait(interval):
            with self._lock:
                if self._deadline is None or self._attempts.clock() <= self._deadline:
                    continue
                sentence = self._fired = self._sentence()
                _interrupt(self._thread)
            last = time.monotonic() + GRACE
            while not closed.wait(0.1):
                if time.monotonic() > last:
                    os.write(2, f"\nfedlightning: {sentence} Its code could not be interrupted.\n".encode())
                    os._exit(EXIT_CODE)
            return

    def _sentence(self) -> str:
        timeout = self._attempts.policy.timeout
        names = ", ".join(f"'{name}'" for name in self._who[:MAX_LISTED])
        more = f" and {len(self._who) - MAX_LISTED} more" if len(self._who) > MAX_LISTED else ""
        who = f"Client {names}" if len(self._who) == 1 else f"The clients {names}{more} together"
        return (
            f"{who} took longer than failures.timeout={timeout:g} seconds allows, in a process that cannot end a client "
            "without ending the run. The state of the rounds before is intact, and resume goes on from there; with "
            "engine='processes' such a client is left out and the others go on."
        )


def _interrupt(thread: int) -> None:
    """Interrupt a thread as Ctrl-C does; another one than the main thread when it next runs Python code."""
    if thread == threading.main_thread().ident:
        if hasattr(signal, "pthread_kill"):  # ends a call of the system that waits, too
            signal.pthread_kill(thread, signal.SIGINT)
        else:
            _thread.interrupt_main()
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))

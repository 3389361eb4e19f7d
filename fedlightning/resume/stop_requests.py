"""Signals to a run: a sentence, an exit code, a state that is whole, and none of them reaches a client's Trainer.

SIGTERM, SIGHUP and Ctrl-C end the run at once; what is on disk is complete at every instant. SIGUSR1 and SIGUSR2 of SLURM
end it after the round, and SLURM is asked to start the job again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fedlightning.compat.system import signals
from fedlightning.errors import warn
from fedlightning.storage.files import broadcast_from_rank_zero, is_writing_process

SIGNALS = signals("SIGUSR1", "SIGUSR2")
"""What SLURM is asked to send before the time is over (`--signal=USR1@90`)."""
ENDINGS = signals("SIGTERM", "SIGHUP")
"""What `kill`, a batch system and a closed terminal send."""

PATIENCE = 5.0
"""Seconds after a second signal until the process ends, whatever code still runs in it."""
SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which two signals are one that was sent to a process and to its group."""


class Terminated(SystemExit):
    """A run was ended by a signal. It ends the process with the code that a shell gives: 128 and the signal's number."""


@dataclass
class StopRequest:
    """What signals have asked the run to do.

    Attributes:
        name: The signal's name; `None` while there was none.
        ending: What ends the run at once, raised already.
        since: When that was, on the monotonic clock.
        last_resort: What ends the process :data:`PATIENCE` seconds after a second signal.
        deadline: When the run ends after its round, on the monotonic clock; `None`: never.
    """

    name: str | None = None
    ending: BaseException | None = None
    since: float = 0.0
    last_resort: threading.Timer | None = None
    deadline: float | None = None

    @property
    def code(self) -> int:
        """Exit code of a process that the signal ended."""
        return 0 if self.name is None else 128 + signal.Signals[self.name]

    def check(self) -> None:
        """Raise again what ends the run, where a destructor or a user's code has swallowed it."""
        if self.ending is not None:
            raise self.ending

    def ends_run(self) -> bool:
        """Return True if the run ends after this round, on all ranks: for a signal, or as its time is over."""
        self.check()
        is_late = self.deadline is not None and time.monotonic() > self.deadline
        is_late, self.name = broadcast_from_rank_zero((is_late, self.name))
        return is_late or self.name is not None

    def after_round(self, number: int, frame: Any) -> None:
        """Handle a signal that asks for an end after the round."""
        self.name = self.name or signal.Signals(number).name

    def at_once(self, number: int, frame: Any) -> None:
        """Handle a signal that ends the run.

        It often comes twice, to a process and to its group: while the first is on its way out, once is enough. Where a
        user's code has swallowed the first, the second is raised too; and after a second one, by whomever it is held up,
        the process ends.
        """
        swallowed = self.ending is not None and not _on_its_way(self.ending)
        if self.ending is not None and (swallowed or time.monotonic() - self.since > SAME_SIGNAL_SECONDS):
            self._end_soon()
        if self.ending is None or swallowed:
            self.name, self.since = signal.Signals(number).name, time.monotonic()
            self.ending = KeyboardInterrupt() if number == signal.SIGINT else Terminated(self.code)
            raise self.ending

    def _end_soon(self) -> None:
        if self.last_resort is None:
            self.last_resort = threading.Timer(PATIENCE, self._end)
            self.last_resort.daemon = True
            self.last_resort.start()

    def _end(self) -> None:
        with suppress(OSError, ValueError):
            print(
                f"{self.name} ended the process: it came twice, and code in the run went on. What was saved is safe. Go on "
                "with resume='last'.",
                file=sys.stderr,
                flush=True,
            )
        os._exit(self.code)


@contextmanager
def stop_requests(progress: Callable[[], tuple[int, int]], deadline: float | None = None) -> Iterator[StopRequest]:
    """Within the block, answer signals.

    A handler that somebody else has installed stays, as does a signal that is ignored (`nohup`). Lightning's handler for
    SLURM, which saves a checkpoint of whatever client is being trained and requeues the job, is not installed where there
    is one already. In other threads than the main one signals stay as they are.

    Args:
        progress: Gives the rounds of the saved state, and the rounds of the run.
        deadline: When the run ends after its round, on the monotonic clock.

    Raises:
        Terminated: After SIGTERM and SIGHUP.
        KeyboardInterrupt: After Ctrl-C, whichever of Lightning's loops it met.
    """
    request = StopRequest(deadline=deadline)
    handlers = dict.fromkeys(SIGNALS, request.after_round) if under_slurm() else {}
    handlers |= _to_end(request)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        handlers[signal.SIGINT] = request.at_once
    with _answering(handlers):
        try:
            yield request
            request.check()
        except BaseException as error:
            if isinstance(request.ending, Terminated):
                saved, rounds = progress()
                with suppress(OSError):  # the terminal may be gone
                    warn(
                        f"{request.name} ended the run "
                        + (
                            f"of {rounds} rounds; its state after round {saved} is saved. Go on with resume='last'."
                            if saved
                            else "before it had saved a state. Start it again."
                        )
                    )
            if request.ending is not None and error is not request.ending:
                raise request.ending from error  # Lightning makes an exit of a Ctrl-C; what breaks off may fail otherwise
            raise
        finally:
            if request.last_resort is not None:
                request.last_resort.cancel()


@contextmanager
def requeued(request: StopRequest, progress: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Within the block, which follows on the rounds, a signal ends it at once; after one of SLURM the job is queued again.

    Args:
        request: What came in the rounds; a signal that came after their end counts, too.
        progress: Gives the rounds of the saved state, and the rounds of the run.

    Raises:
        Terminated: After such a signal.
    """
    with _answering(_to_end(request) | (dict.fromkeys(SIGNALS, request.at_once) if under_slurm() else {})):
        try:
            if request.name is not None:
                raise Terminated(request.code)
            yield
        except Terminated:
            if is_writing_process() and request.name in [number.name for number in SIGNALS]:
                requeue(request, *progress())
            elif is_writing_process():
                with suppress(OSError):  # the terminal may be gone
                    warn(
                        f"{request.name} ended the test after round {progress()[0]}, the last one; what was trained is safe. "
                        "Test it with `fedlightning test --run FOLDER`."
                    )
            raise


@contextmanager
def endings() -> Iterator[StopRequest]:
    """Within the block, SIGTERM and SIGHUP raise :class:`Terminated`, where nobody else answers them."""
    request = StopRequest()
    with _answering(_to_end(request)):
        yield request


def _to_end(request: StopRequest) -> dict[Any, Callable[[int, Any], None]]:
    """Return handlers of signals that end a process, where nobody else has one."""
    return {number: request.at_once for number in ENDINGS if signal.getsignal(number) == signal.SIG_DFL}


@contextmanager
def _answering(handlers: Mapping[Any, Callable[[int, Any], None]]) -> Iterator[None]:
    """Let signals have other handlers within the block; in other threads than the main one they stay as they are."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_its_way(ending: BaseException) -> bool:
    """Return whether code of this thread handles an error or what has come of it: nobody has swallowed it yet."""
    error, seen = sys.exception(), set[int]()
    while error is not None and error is not ending and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return error is ending


def under_slurm() -> bool:
    """Return True if this process is a batch job of SLURM. Lightning, which decides it, is imported only if it may be one."""
    if not any(name.startswith("SLURM_") for name in os.environ):
        return False
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    return SLURMEnvironment.detect()


def ignore_stop_requests() -> None:
    """Leave signals to the main process, which ends its workers; for worker processes."""
    for number in (*SIGNALS, *ENDINGS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def requeue(request: StopRequest, round: int, max_rounds: int) -> None:
    """Say that the run has stopped, and ask SLURM to start the job again.

    Args:
        request: The signal.
        round: Finished rounds.
        max_rounds: Rounds of the run.
    """
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID", "")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array is not None else job
    try:
        again = subprocess.run(["scontrol", "requeue", job], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        again = False
    warn(
        f"{request.name} came from SLURM: the run stopped after round {round} of {max_rounds}, its state is saved. "
        + (
            f"Job {job} is queued again; with resume='auto' it goes on."
            if again
            else f"Job {job} could not be queued again; go on with resume='last'."
        )
    )

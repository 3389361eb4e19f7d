"""Signals of a batch system: the run answers them at a round boundary, not a client's Trainer in the middle of a visit."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from fedlightning.errors import warn

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What SLURM is asked to send before the time is over (`--signal=USR1@90`)."""


@dataclass
class StopRequest:
    """Whether the batch system has asked the run to stop.

    Attributes:
        name: The signal's name; `None` while there was none.
    """

    name: str | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within the block, note SLURM's signals instead of dying by them.

    Lightning's own handler, which saves a checkpoint of whatever client is being trained and requeues the job, is not
    installed where there is one already. Outside SLURM, and in other threads than the main one, signals stay as they are.
    """
    request = StopRequest()
    if not SLURMEnvironment.detect() or threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: Any) -> None:
        request.name = signal.Signals(number).name

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stop_requests() -> None:
    """Leave the batch system's signals to the main process; for worker processes."""
    for number in SIGNALS:
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

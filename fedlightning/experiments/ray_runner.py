"""Runs as Ray tasks, on this machine or on the machines of a cluster: `--runner ray` of `compare` and `sweep`.

A task starts the run's own process, as :mod:`fedlightning.experiments.children` does here, and waits for it. So nothing
is left in Ray's worker from one run to the next, and a run that ends, fails or is killed is told in the same words.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fedlightning.config.input_errors import InputError
from fedlightning.config.short_forms import engine_of
from fedlightning.errors import missing_package, refuse_without_posix
from fedlightning.experiments.children import Child, Main, Outcome
from fedlightning.experiments.execute import LOG, Task
from fedlightning.experiments.methods import Method
from fedlightning.options import Ray

_TICK = 0.1  # seconds between a task's looks for Ctrl-C
_PATIENCE = 20.0  # seconds that a run has to end after Ctrl-C before Ray's worker is killed, which ends the run


def ray_options(runner: str, address: str | None, cpus: float | None) -> Ray | None:
    """Return what Ray is to be, or `None` if runs are processes of this command."""
    if runner != "ray":
        for name, value in (("--ray-address", address), ("--ray-cpus", cpus)):
            if value is not None:
                raise InputError(f"{name} is about Ray, and the runs are processes of this command: add --runner ray.")
        return None
    refuse_without_posix("--runner ray", "Leave --runner out.")
    from fedlightning.parallel import ray as ray_cluster

    if not ray_cluster.installed():
        raise InputError(
            f"{missing_package('--runner ray needs Ray', 'ray')} Without it, leave --runner out: --jobs makes several runs "
            "at a time on this machine."
        )
    return Ray(address=address, num_cpus=1.0 if cpus is None else cpus)


def refuse_ray_within(method: Method) -> None:
    """Refuse runs that start workers with Ray themselves: these would wait for the CPUs that the runs hold."""
    if engine_of(method.config["trainer"]) is Ray:
        raise InputError(
            f"{method.name} has `engine: ray`, and --runner ray makes each run a Ray task, whose clients cannot be Ray's "
            "again. Leave --runner out, or train clients otherwise, as in --trainer.engine=sequential (the same numbers)."
        )


class RayRuns:
    """A runner that makes every run a Ray task. Ray is started, or the cluster found, when it is made.

    Args:
        options: Address, and CPUs of each run.
        jobs: Number of runs at a time.
        main: Command line that makes a run.

    Raises:
        ConfigurationError: If no cluster answers, or it has no room for a run.
    """

    def __init__(self, options: Ray, jobs: int, main: Main) -> None:
        from fedlightning.parallel import ray as ray_cluster

        ray_cluster.connect(options, jobs)
        self._needs = ray_cluster.needs_of(options, jobs, on_gpu=ray_cluster.room()[1] > 0)
        self._main = main

    def __call__(self, task: Task, slot: int) -> RayChild:
        """Submit a run."""
        import ray

        cpus, gpus = self._needs
        # a run that is lost is told, as one that is killed: Ray does not start it again by itself
        remote = ray.remote(_make_run).options(
            num_cpus=cpus, num_gpus=gpus, max_retries=0, scheduling_strategy="SPREAD", name=f"{task.name} {task.seed}"
        )
        log = (task.folder / LOG).absolute()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        stamp = int(time.time())
        os.utime(log, (stamp, stamp))
        module, name = self._main.__module__, self._main.__qualname__
        return RayChild(remote.remote(task.commands(), str(log), stamp, os.getcwd(), f"{module}:{name}"))


class RayChild:
    """A run as a Ray task, with the interface of :class:`Child`.

    Args:
        reference: Ray's reference to the task's answer.
    """

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._started = time.monotonic()
        self.sentinel, writer = os.pipe()
        reference.future().add_done_callback(lambda _: os.close(writer))  # a closed pipe is ready for reading

    @property
    def seconds(self) -> float:
        """Seconds since the run was submitted."""
        return time.monotonic() - self._started

    def ended(self) -> bool:
        """Return True if the run has ended, or is lost."""
        import ray

        return bool(ray.wait([self._reference], timeout=0)[0])

    def outcome(self) -> Outcome:
        """Wait for the end and return how it ended."""
        import ray

        try:
            error, seconds = ray.get(self._reference)
        except ray.exceptions.RayError as lost:
            reason = " ".join(str(getattr(lost, "cause", None) or lost).split())
            error, seconds = (
                f"Ray lost the run ({reason[:300]}). Perhaps memory ran out: use fewer --jobs.",
                self.seconds,
            )
        self._close()
        return Outcome(error, seconds)

    def kill(self) -> None:
        """Kill the run's process, and return when it is gone."""
        import ray

        with suppress(Exception):  # Ray itself may be gone, and its tasks with it
            ray.cancel(self._reference)
            if not ray.wait([self._reference], timeout=_PATIENCE)[0]:
                ray.cancel(self._reference, force=True)
                ray.wait([self._reference], timeout=_PATIENCE)
        self._close()

    def _close(self) -> None:
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1


def _make_run(commands: list[list[str]], log: str, stamp: int, cwd: str, main: str) -> tuple[str | None, float]:
    """Make a run in a process of its own, and return its error and duration. This is what Ray calls."""
    import ray

    if not _reaches(log, stamp) or not os.path.isdir(cwd):
        where = os.path.dirname(log) if os.path.isdir(cwd) else cwd
        return (
            f"{socket.gethostname()}, a machine of the Ray cluster, does not see {where}: start the command in a folder of a "
            "file system that all machines share, with --out there.",
            0.0,
        )
    module, _, name = main.partition(":")
    gpus = ",".join(map(str, ray.get_gpu_ids())) or None
    program = sys.modules["__main__"]
    file = vars(program).pop("__file__", None)  # else the run's process would load Ray's worker as its main module
    child = None
    try:  # a cancelled task gets KeyboardInterrupt here, at any line
        child = Child(commands, Path(log), 1, gpus, getattr(importlib.import_module(module), name), Path(cwd))
        while not child.ended():
            wait([child.sentinel], timeout=_TICK)
        outcome = child.outcome()
        return outcome.error, outcome.seconds
    finally:
        if file is not None:
            vars(program)["__file__"] = file
        if child is not None and not child.ended():
            child.kill()


def _reaches(log: str, stamp: int) -> bool:
    """Return whether this machine sees the log that the command has just stamped, and not one of the same name."""
    try:
        with open(log, "rb") as opened:  # opened, since a network file system asks anew then
            return int(os.fstat(opened.fileno()).st_mtime) == stamp
    except OSError:
        return False

"""A Ray of our own on a busy machine: tried again, waited for within bounds, and gone with the program however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import fedlightning  # noqa: F401  before lightning

# isort: split
pytest.importorskip("ray")

import ray

from fedlightning.engines.attempts import FederationError
from fedlightning.errors import ConfigurationError
from fedlightning.parallel import ray as ray_cluster
from fedlightning.parallel import ray as ray_engine
from fedlightning.parallel import ray_start, ray_sweep
from tests.helpers import mostly_slow
from tests.parallel.test_processes import alive, wait_until

BUSY = Exception("The current node timed out during startup.\nThis could happen because of much.")


@pytest.fixture
def starts(monkeypatch):
    """Let starts end as a list says: `None` is a start that succeeds."""
    said, cleared = [], []

    def start(arguments, variables):
        if (error := said.pop(0)) is not None:
            raise error

    monkeypatch.setattr(ray_start, "in_a_thread", start)
    monkeypatch.setattr(ray_start, "_watch", lambda: None)
    monkeypatch.setattr(ray_start, "_clear_away", lambda: cleared.append(True))
    return said, cleared


def test_a_start_that_fails_is_tried_again(starts):
    said, cleared = starts
    said[:] = [BUSY, TimeoutError(), None]
    with pytest.warns(UserWarning, match="timed out during startup.*load.*try 2 of 3") as told:
        ray_start.start({}, guarded=True)
    assert len(told) == len(cleared) == 2 and "longer than 180 seconds" in str(told[1].message) and not said


@pytest.mark.filterwarnings("ignore:Ray has not started")
def test_after_the_last_try_there_is_a_sentence(starts):
    starts[0][:] = [BUSY] * 3
    with pytest.raises(
        ConfigurationError, match=r"not started in 3 tries; the last: .*load .* cores.*engine='processes'"
    ):
        ray_start.start({}, guarded=True)


def test_wrong_arguments_are_not_tried_again(starts):
    starts[0][:] = [TypeError("no such argument"), None]
    with pytest.raises(TypeError):
        ray_start.start({}, guarded=True)


def test_a_start_that_hangs_is_not_waited_for_without_end(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **arguments: over.wait())
    monkeypatch.setattr(ray_start, "SECONDS", 0.01)
    with pytest.raises(TimeoutError):
        ray_start.in_a_thread({})
    over.set()


def test_a_ray_of_our_own_without_any_worker_ends_the_run(monkeypatch):
    engine = SimpleNamespace(_workers={}, _since=0.0, _has_warned=True, _needs=(1.0, 0.0))
    monkeypatch.setattr(ray_engine, "PATIENCE", 0.01)
    monkeypatch.setattr(ray_engine, "LIMIT", -1.0)
    monkeypatch.setattr(ray_cluster, "_own", True)
    with pytest.raises(FederationError, match=r"no worker in -1 seconds, at a load of .*is intact"):
        ray_engine.RayEngine._wait(engine, None)
    monkeypatch.setattr(ray_cluster, "_own", False)  # a cluster may have no room for hours
    assert ray_engine.RayEngine._wait(engine, None) == []


PROGRAM = """
import os, subprocess, sys, time
sweep = [sys.executable, "-I", "-S", sys.argv[1], sys.argv[2]]
sweeper = subprocess.Popen(sweep, stdin=subprocess.PIPE, start_new_session=True)
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
left = subprocess.Popen(sleep, env={"FEDLIGHTNING_RAY": sys.argv[2]}, start_new_session=True)
mine = subprocess.Popen(sleep, start_new_session=True)
print(sweeper.pid, left.pid, mine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("how", mostly_slow([signal.SIGKILL, signal.SIGTERM], [signal.SIGTERM]))
def test_what_is_left_behind_is_ended_and_nothing_else(how):
    mark = f"mark of {os.getpid()} and {how}"
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, ray_sweep.__file__, mark]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    sweeper, left, mine = map(int, program.stdout.readline().split())
    try:
        program.send_signal(how)
        program.wait()
        wait_until(lambda: not alive(left) and not alive(sweeper), "the end of both")
        assert alive(mine)
    finally:
        os.kill(mine, signal.SIGKILL)
        program.stdout.close()

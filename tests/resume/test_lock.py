"""One writer for a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.cli import main
from fedlightning.errors import ConfigurationError
from fedlightning.resume.lock import LOCK, SILENCE, RunInUseError, RunLock
from tests.helpers import Toy, global_state, make_trainer, same, toy_data

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from fedlightning.resume.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_with_the_first_ones_name(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RunInUseError, match=rf"is being written by process {other.pid} on .* since \d{{4}}-"):
            RunLock(tmp_path)
        other.kill()
    with RunLock(tmp_path) as lock:  # the kernel has released it with the killed process
        assert lock.holder["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_a_holder_on_another_machine_counts_until_it_is_silent(tmp_path):
    path = tmp_path / LOCK
    path.write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-01-01 00:00:00"}))
    now = time.time()
    os.utime(path, (now, now))  # the clock of the system's files may be another one
    with pytest.raises(RunInUseError, match="process 7 on elsewhere since 2026-01-01"):
        RunLock(tmp_path)
    silent = now - SILENCE - 1
    os.utime(path, (silent, silent))
    RunLock(tmp_path).release()


def test_without_locks_of_the_file_system_the_holder_is_looked_for(tmp_path, monkeypatch):
    """As on some network file systems."""

    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match=r"has no locks \(No locks available\)"):
        lock = RunLock(tmp_path)
    with pytest.warns(UserWarning), pytest.raises(RunInUseError, match=f"process {os.getpid()}"):
        RunLock(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / LOCK).write_text(json.dumps({**lock.holder, "pid": gone.pid}))
    with pytest.warns(UserWarning):
        RunLock(tmp_path).release()


@pytest.mark.parametrize("content", ["", "{", "[1]", "\0\0", '{"pid": "x"}'])
def test_a_lock_file_that_says_nothing_is_of_nobody(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with RunLock(tmp_path) as lock:
        assert json.loads((tmp_path / LOCK).read_text()) == lock.holder


class Reader(FederatedCallback):
    """Tests, reports and trains the run that it is in, from another process's point of view."""

    facts = Facts(takes_part=False)

    def on_round_end(self, server):
        if server.round == 1:
            other = make_trainer(server.run_dir.parent.parent, [], max_rounds=3)
            other.restore(Toy(), toy_data(), server.run_dir)
            with pytest.raises(RunInUseError, match="is being written by"):
                other.test()
            assert main(["report", str(server.run_dir), "--out", str(server.run_dir / "out")]) == 2  # no result yet


def test_readers_of_a_run_that_is_being_written(tmp_path, capsys):
    trainer = make_trainer(tmp_path, [Reader()], max_rounds=3)
    trainer.fit(Toy(), datamodule=toy_data())
    assert trainer.rounds_done == 3
    assert "has no summary.json, so it is not a finished run" in capsys.readouterr().err


def test_a_folder_made_for_the_lock_goes_with_it(tmp_path):
    RunLock(tmp_path / "a" / "b").release()
    assert not (tmp_path / "a").exists()


class Second(FederatedCallback):
    """Starts to resume the very run that it is in."""

    def __init__(self, root: str) -> None:
        self.root = root

    def on_round_end(self, server):
        other = make_trainer(self.root, [Second(self.root)], max_rounds=3)
        other.fit(Toy(), datamodule=toy_data(), resume=str(server.run_dir))


def test_a_run_that_is_being_written_cannot_be_resumed(tmp_path):
    trainer = make_trainer(tmp_path, [Second(str(tmp_path))], max_rounds=3, save_state=1)
    with pytest.raises(RunInUseError, match=f"process {os.getpid()}"):
        trainer.fit(Toy(), datamodule=toy_data())
    assert not list(tmp_path.rglob(LOCK))


class Asking(Toy):
    """Calls a function when its training begins."""

    def on_fit_start(self):
        Asking.ask()


def fitted_asking(ask):
    Asking.ask = ask
    return fitted(Asking())


def fitted(module):
    trainer = make_trainer(None, max_rounds=1)
    trainer.fit(module, toy_data((8,)))
    return trainer


@pytest.mark.parametrize("asked", ["fit", "test", "validate", "predict", "module", "dry_run", "onboard"])
def test_a_second_thread_is_refused_while_one_is_at_work(asked):
    other, answers = fitted(Toy()), []
    given = (Toy(), toy_data((8,))) if asked in ("fit", "dry_run") else ()

    def ask():
        with ThreadPoolExecutor(1, "sweep") as pool:
            answers.append(pool.submit(getattr(other, asked), *given).exception())

    fitted_asking(ask)
    assert answers and all(isinstance(answer, ConfigurationError) for answer in answers)
    assert str(answers[0]).startswith("The thread 'sweep_0' asks for work on a federation while another thread")
    fitted(Toy())  # nobody is at work any more


def test_a_fit_within_a_fit_of_the_same_thread_and_one_after_another_in_threads_are_alike():
    inside = []

    def alone():
        with_same_start = Toy()
        with_same_start.load_state_dict(start)
        return fitted(with_same_start)

    start = Toy().state_dict()
    fitted_asking(lambda: inside.append(alone()))
    with ThreadPoolExecutor(1) as pool:
        apart = pool.submit(alone).result()
    for trainer in (*inside, apart):
        same(global_state(trainer), global_state(alone()))

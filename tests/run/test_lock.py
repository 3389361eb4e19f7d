"""One writer for a run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlightning import FederatedCallback
from fedlightning.run.lock import LOCK, SILENCE, RunInUseError, RunLock
from tests.helpers import Toy, make_trainer, toy_data

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from fedlightning.run.lock import RunLock
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
    with pytest.raises(RunInUseError, match="process 7 on elsewhere since 2026-01-01"):
        RunLock(tmp_path)
    silent = time.time() - SILENCE - 1
    os.utime(path, (silent, silent))
    RunLock(tmp_path).release()


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

"""Systems without what POSIX has: what can work does, what cannot says so, and files have names that are valid there.

Simulated: a fresh process in which FedLightning finds no `fcntl`, no `os.killpg` and so on. It has not been run on Windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path, PureWindowsPath
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedlightning.arguments.inputs import _check_ids
from fedlightning.compat import system
from fedlightning.errors import ConfigurationError
from fedlightning.resume.lock import LOCK, RunInUseError, RunLock, holder_of

ROOT = Path(__file__).parents[2]
QUICK = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--trainer.enable_progress_bar=false"]
QUICK += ["--data.partitioner.num_clients=2", "--data.max_train=60", "--data.max_test=30"]


def without_posix(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.without_posix", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_run_is_trained_goes_on_and_is_reported(tmp_path: Path) -> None:
    fit = ["fit", *QUICK, "--trainer.name=a"]
    resume = ["fit", *QUICK, "--trainer.name=a", "--trainer.max_rounds=2", "--resume", "last"]
    words = [*fit, "--trainer.max_rounds=1", "then", *resume, "then", "test", "--run", "runs/a/version_0"]
    done = without_posix(tmp_path, *words, "then", "report", "runs/a", "--out", "report")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "a" / "version_0" / "summary.json").read_text())
    assert len(summary["per_round"]) == 2 and summary["peak_memory_mb"] is None
    assert (tmp_path / "report" / "report.html").is_file()
    assert not (tmp_path / "runs" / "a" / "version_0" / LOCK).exists()


@pytest.mark.slow
def test_what_needs_posix_says_so_before_anything_is_trained(tmp_path: Path) -> None:
    for words in (
        ["fit", *QUICK, "--trainer.engine=processes"],
        ["fit", *QUICK, "--trainer.engine=ray"],
        ["compare", str(ROOT / "configs" / "quickstart.yaml"), "--runner=ray", "--out=out"],
    ):
        done = without_posix(tmp_path, *words)
        assert done.returncode == 2 and "needs a POSIX system such as Linux or macOS" in done.stderr, done.stderr
    assert not list(tmp_path.rglob("metrics.csv"))


def test_a_second_writer_is_refused_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "fcntl", None)
    with RunLock(tmp_path / "run") as lock:
        with pytest.raises(RunInUseError, match=f"is being written by process {os.getpid()}"):
            RunLock(tmp_path / "run")
        assert holder_of(tmp_path / "run") == lock.holder
        lock.beat()
    assert holder_of(tmp_path / "run") is None
    elsewhere = json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-01-01 00:00:00"})
    (tmp_path / "run" / LOCK).write_text(elsewhere)
    os.utime(tmp_path / "run" / LOCK, (time.time(), time.time()))  # a heartbeat by the clock that the lock reads
    with pytest.raises(RunInUseError, match="process 7 on elsewhere"):
        RunLock(tmp_path / "run")
    (tmp_path / "run" / LOCK).unlink()
    RunLock(tmp_path / "run").release()  # what was refused has let go


def reserved(name: str) -> bool:
    return PureWindowsPath(name).is_reserved() if sys.version_info < (3, 13) else __import__("ntpath").isreserved(name)


@given(st.text(min_size=1))
@example("CON")
@example("nul.tar.gz")
@example("LPT9")
@example("a.")
@example("..")
@example('a<b>c:d"e|f?g*h/i\\j')
@example("ward 3 ")
def test_names_of_files_are_valid_on_windows_and_tell_clients_apart(client: str) -> None:
    name = system.file_name_of(client)
    for whole in (name, f"{name}.ckpt"):
        assert not reserved(whole) and PureWindowsPath(whole).name == whole
        assert not set(whole) & set('<>:"/\\|?*') and whole.isprintable() and whole[-1] not in ". "
    if all(not 0xD800 <= ord(letter) < 0xE000 for letter in client):
        assert unquote(name) == client, "two clients would have one file"


@pytest.mark.parametrize("client", ["hospital-3", "a.b", "ward_3~x", "0", "Zürich", "a/b c", "console"])
def test_names_of_files_are_those_that_they_were(client: str) -> None:
    from urllib.parse import quote

    assert system.file_name_of(client) == quote(client, safe="")


def test_clients_that_would_share_a_file_are_refused_where_names_ignore_case(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = {"A": [], "a": []}
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigurationError, match="'A' and 'a', which are one file where names of files ignore case"):
        _check_ids("train_dataloaders", loaders)
    monkeypatch.setattr(sys, "platform", "linux")
    _check_ids("train_dataloaders", loaders)


@pytest.mark.slow
def test_many_runs_are_compared_in_spawned_processes(tmp_path: Path) -> None:
    words = [
        "compare",
        str(ROOT / "configs" / "quickstart.yaml"),
        "--seeds=1",
        "--baselines=none",
        "--jobs=2",
        "--out=out",
    ]
    done = without_posix(tmp_path, *words, "--trainer.max_rounds=1", *QUICK[3:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "report.html").is_file()

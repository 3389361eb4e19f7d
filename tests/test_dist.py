"""What `make dist` hands on: the same bytes for the same commit, no links, a wheel that works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedlightning
from tools import dist

pytestmark = pytest.mark.slow
TINY = ["--trainer.max_rounds=1", "--data.partitioner.num_clients=2", "--data.max_train=60", "--data.max_test=30"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if not (dist.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return dist.build(tmp_path_factory.mktemp("dist"))


def test_two_builds_are_the_same_bytes(built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    before = os.umask(0o077)
    try:
        again = dist.build(tmp_path)
    finally:
        os.umask(before)
    assert [path.name for path in again] == [path.name for path in built] and len(built) == 2
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_archives_hold_files_of_nobody(built: list[Path]) -> None:
    with tarfile.open(built[0]) as tar:
        members = tar.getmembers()
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
    assert all(member.isdir() or member.isreg() for member in members), "a link"
    with zipfile.ZipFile(built[1]) as wheel:
        assert not any((info.external_attr >> 16) & 0o170000 == 0o120000 for info in wheel.infolist()), "a link"


def test_twine_finds_no_fault(built: list[Path]) -> None:
    pytest.importorskip("twine", reason="make dist installs it")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], check=True)


def test_the_wheel_works_outside_of_the_checkout(built: list[Path], tmp_path: Path) -> None:
    """In an environment of its own, which finds all other packages where this one has them (no network)."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MPLBACKEND": "agg"}
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python, work = home / "bin" / "python", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", str(built[1])], check=True)
    (site,) = home.glob("lib/*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work.mkdir()

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    place = run(str(python), "-c", "import fedlightning.callbacks as found; print(found.__file__)").strip()
    assert Path(place) == site / "fedlightning" / "callbacks" / "__init__.py" and not Path(place).parent.is_symlink()
    command = str(home / "bin" / "fedlightning")
    assert fedlightning.__version__ in run(command, "--version")
    run(command, "configs", "copy", "quickstart", "algorithms/fenda")
    run(command, "partition", "--config", "configs/quickstart.yaml", *TINY[1:])
    run(command, "fit", "--config=configs/quickstart.yaml", "--config=configs/algorithms/fenda.yaml", *TINY)
    run(command, "compare", "configs/quickstart.yaml", "--seeds=1", "--out=runs/all", "--baselines=none", *TINY)
    run(command, "report", "runs/all", "--out=report")
    assert (work / "report" / "report.html").is_file()

"""The demo on one machine runs to its end, and leaves no process behind: `make test-flower`."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower")

SCRIPT = Path(__file__).parents[3] / "examples" / "sites" / "one_machine.py"
LONG = 900.0


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--out", str(out), "--rounds", "1", *words]


def left(out: Path) -> list[str]:
    """Return the processes that know the folder, by their command lines and where they work."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.name != str(os.getpid()):
                about = (path / "cmdline").read_text() + os.readlink(path / "cwd")
                found += [about] if str(out) in about else []
        except OSError:
            continue
    return found


def test_breast_tumours_at_three_sites(tmp_path: Path) -> None:
    out = tmp_path / "sites"
    done = subprocess.run(command(out), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left(out) == []
    for name in ("north", "south", "west"):
        assert f"The model of {name} is at its site only: {out / name / 'site'}" in done.stdout
        (model,) = (out / name / "site" / "models").glob("*/*.ckpt")
        assert f"{model}" in done.stdout and not (out / "server" / "certificates" / name).exists()
        assert {path.name for path in (out / name / "certificates").iterdir()} == {name}
    with (out / "server/runs/sites/one/metrics.csv").open() as file:
        scores = {row["client"]: float(row["value"]) for row in csv.DictReader(file) if is_accuracy(row)}
    assert set(scores) == {"north", "south", "west"} and min(scores.values()) > 0.7


def is_accuracy(row: dict[str, str]) -> bool:
    return (row["metric"], row["split"], row["stage"], row["checkpoint"]) == ("test_accuracy", "test", "L1", "latest")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_all_processes_end_with_it(how: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "sites"
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command(out, "--rounds", "500"), stdout=said, stderr=said, start_new_session=True)
    ends = time.monotonic() + LONG
    while not all((out / name / "site" / "supernode.log").exists() for name in ("north", "south", "west")):
        assert process.poll() is None and time.monotonic() < ends, (tmp_path / "said").read_text()
        time.sleep(0.2)
    process.send_signal(how)
    assert process.wait(LONG) != 0
    while left(out) and time.monotonic() < ends:  # SuperNodes end with the process that started them
        time.sleep(0.2)
    assert left(out) == []

"""Two processes that share each client's batches give the numbers of one process with batches twice as large."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.ddp_script import RUNS
from tests.helpers import close, mostly_slow
from tests.processes import fork, script, wait

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "ddp_script.py"


def process(rank: int, port: int, root: Path, names: Sequence[str]) -> int:
    """One of two, started from outside: by LOCAL_RANK Lightning knows that it need not start the other one."""
    env = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first = {"FEDLIGHTNING_RUN_FOLDER": str(root / "2" / names[0] / "version_0")} if rank else {}
    return alone(root, 2, names, env | first, f"rank-{rank}.log")


def alone(root: Path, devices: int, names: Sequence[str], env: Mapping[str, str], log: str) -> int:
    done = script(SCRIPT, [str(root / str(devices)), str(devices), *names], ROOT, env)
    (root / log).write_text(done.stdout + done.stderr)
    return done.returncode


@pytest.mark.parametrize(
    ("starts", "names"),
    [("test", ["scaffold", "fails"]), *mostly_slow([("test", ["keep", "fenda", "sam"]), ("Lightning", [*RUNS])], [])],
    ids=["some", "others", "started by Lightning"],
)
def test_two_processes_are_one_with_the_doubled_batch(tmp_path, starts, names):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if starts == "test":
        two = [fork(partial(process, rank, port, tmp_path, names)) for rank in range(2)]
    else:
        two = [fork(partial(alone, tmp_path, 2, names, {"PYTHONPATH": str(ROOT)}, "rank-0.log"))]
    assert alone(tmp_path, 1, names, {}, "alone.log") == 0, (tmp_path / "alone.log").read_text()[-4000:]
    for rank, pid in enumerate(two):
        assert wait(pid) == 0, (tmp_path / f"rank-{rank}.log").read_text()[-4000:]

    def known(devices, name, rank=0):
        return torch.load(tmp_path / f"{devices}-{name}-{rank}.pt", weights_only=False)

    for name in names:
        one, first, second = known(1, name), known(2, name), known(2, name, 1)
        are_one(one, first, name)
        agree(first, second)
        assert first["written"] and second["written"] == []
    if "fails" in names:
        assert known(2, "fails")["visits"] == {"0": 2, "1": 0, "2": 2}, (
            "a client that fails everywhere does not stop them"
        )


def are_one(one, two, name):
    close(one["model"], two["model"], atol=1e-5)
    assert one["steps"] == two["steps"]
    assert one["visits"] == two["visits"]
    assert len(one["rows"]) == len(two["rows"]) > 0
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert {k: v for k, v in a.items() if k != "value"} == {k: v for k, v in b.items() if k != "value"}
        if a["split"] != "train":  # in training each process logs its half
            assert a["value"] == pytest.approx(b["value"], abs=1e-4)
    if name == "scaffold":
        close(one["state"]["SCAFFOLD"]["c"], two["state"]["SCAFFOLD"]["c"], atol=1e-4)


def agree(first, second):
    close(first["model"], second["model"], atol=0, rtol=0)
    assert first["run"] == second["run"]
    assert first["rows"] == second["rows"]  # also what training logged: the second process takes the first one's word
    assert first["steps"] == second["steps"] and first["visits"] == second["visits"]

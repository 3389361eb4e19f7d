"""Sites that never come, hang or send nonsense, programs that are killed, large models: over a real SuperLink, with keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower")

from fedlightning.sites.flower.connection import Address
from fedlightning.sites.flower.programs import end
from tests.sites.flower.nonsense import REPLIES, WHY
from tests.sites.flower.test_flower import Machines, read, same_models

pytestmark = pytest.mark.slow


class WithKeys(Machines):
    """Machines with certificates and keys."""

    def alone(self, *words: str) -> subprocess.Popen[bytes]:
        more = ["--trainer.version=alone", "--trainer.failures.timeout=null"]
        return self.start("alone", "fit", "--config=run.yaml", *more, *words)

    def same(self) -> bool:
        """Whether both runs have the same scores and models."""
        runs = [self.folder / "runs" / "run" / name for name in ("alone", "one")]
        rows = [sorted(tuple(row.items()) for row in read(run / "metrics.csv")) for run in runs]
        return rows[0] == rows[1] and same_models(*(run / "checkpoints" / "last" for run in runs))


@pytest.fixture
def machines(tmp_path):
    made = WithKeys(tmp_path)
    made.finish(made.start("keys", "certificates", "--hosts", "127.0.0.1", "--sites", "s0", "s1"))
    yield made
    started = [below for process in made.running for below in family(process.pid)]
    for process in made.running:
        end(process)
    assert not left(started)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", made.port))


def family(pid: int) -> list[tuple[int, str]]:
    """Return a process and those that it started, each with its start time, which tells it from a later one of its number."""
    found = [(pid, began(pid))]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return found + [below for child in children for below in family(int(child))]


def began(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def left(processes: list[tuple[int, str]]) -> list[int]:
    """Return those of some processes that do not end within a few seconds."""
    ends = time.monotonic() + 30
    while True:
        found = [pid for pid, start in processes if start and began(pid) == start and not is_zombie(pid)]
        if not found or time.monotonic() > ends:
            return found
        time.sleep(0.1)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def program(process: subprocess.Popen[bytes], name: str) -> int:
    """Return the id of one of Flower's programs that a process started."""
    for pid, _ in family(process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "-c" not in words and any(word.endswith(name) for word in words):
            return pid
    raise AssertionError(name)


def test_a_site_that_never_comes(machines):
    server, site = machines.serve(), machines.site(0)
    machines.until(lambda: "Waiting for 2 sites. Here: s0. Not connected: s1." in machines.said("server"), server)
    started = family(server.pid)
    assert len(started) >= 3 and machines.rounds() == 0
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 130 and "fedlightning serve --config" in machines.said("server")
    assert "Traceback" not in machines.said("server") and not left(started)
    machines.until(lambda: "Nobody listens at" in machines.said("s0"))
    started = family(site.pid)
    site.terminate()
    site.wait(60)
    assert "Traceback" not in machines.said("s0") and not left(started)
    assert not (machines.folder / "runs" / "run").exists()  # a run that has not begun leaves no folder


def test_a_site_that_hangs_and_comes_back(machines):
    more = ["--trainer.failures.timeout=40", "--trainer.max_rounds=100"]
    server, _, site = machines.serve(*more), machines.site(0, more[1]), machines.site(1, more[1])
    machines.until(lambda: machines.rounds() >= 1, server)
    site.send_signal(signal.SIGSTOP)
    machines.until(lambda: "failures.timeout=40" in machines.said("server"), server)
    hung = machines.rounds()
    site.send_signal(signal.SIGCONT)
    metrics = machines.folder / "runs" / "run" / "one" / "metrics.csv"
    machines.until(lambda: any(row["client"] == "1" and int(row["round"]) > hung + 1 for row in read(metrics)), server)
    server.terminate()
    assert server.wait(60) == 143 and "Traceback" not in machines.said("server")


def stop_runs(machines: Machines) -> None:
    """Stop what runs on the SuperLink, as whoever has the server's secret can."""
    from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest
    from flwr.supercore.control.control_http_client import ControlHttpClient

    authority, secret = machines.folder / "certificates/server/ca.pem", machines.folder / "serve" / "secret"
    address = Address(f"127.0.0.1:{machines.port}", str(authority), secret.read_bytes())
    control = address.client(ControlHttpClient, name="flwr CLI")
    for run in control.ListRuns(ListRunsRequest()).run_dict:
        control.StopRun(StopRunRequest(run_id=run))
    control.close()


def test_flowers_programs_are_killed(machines):
    """A SuperNode, which its site starts anew; a run of Flower, which the server begins anew; and the SuperLink."""
    alone = machines.alone()
    server, site, _ = machines.serve(), machines.site(0), machines.site(1)
    machines.until(lambda: machines.rounds() >= 1, server)
    os.kill(program(site, "flower-supernode"), signal.SIGKILL)
    stop_runs(machines)
    machines.until(
        lambda: "SuperNode has ended" in machines.said("s0") and "was stopped, and not by" in machines.said("server"),
        server,
    )
    machines.until(lambda: machines.rounds() >= 2, server)
    os.kill(program(server, "flower-superlink"), signal.SIGKILL)
    assert server.wait(120) == 2, machines.said("server")
    assert "The SuperLink has ended" in machines.said("server") and "Traceback" not in machines.said("server")
    machines.finish(machines.serve("--resume=last"))
    machines.finish(alone)
    assert machines.same()


def test_large_messages(machines):
    """Each way 74 MB, which Flower sends in parts of 5."""
    more = ["--model.net.init_args.hidden=[3000, 3000]", "--trainer.max_rounds=1"]
    alone = machines.alone(*more)
    server = machines.serve(*more)
    machines.site(0, *more)
    machines.site(1, *more)
    machines.finish(server)
    machines.finish(alone)
    assert machines.same()
    found = json.loads((machines.folder / "runs" / "run" / "one" / "summary.json").read_text())
    assert found["bytes_up"] == found["bytes_down"] > 2 * 64 * 2**20


def test_nonsense_is_a_failed_client(machines):
    more = f"--trainer.max_rounds={len(REPLIES) + 1}"
    server = machines.serve(more)
    machines.site(0, more)
    place = [f"--superlink=127.0.0.1:{machines.port}", "--name=s1", "--folder=s1", "--clients=[1]"]
    machines.start("s1", "site", "--config=run.yaml", *place, more, module="tests.sites.flower.nonsense")
    machines.finish(server)
    found = json.loads((machines.folder / "runs" / "run" / "one" / "summary.json").read_text())["failures"]
    assert [(one["round"], one["client"]) for one in found] == [(round + 1, "1") for round in range(len(REPLIES))]
    assert all(why in one["reason"] for why, one in zip(WHY, found, strict=True)), found

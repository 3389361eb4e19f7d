"""A server and two sites as processes of their own, over a real SuperLink and SuperNodes: `make test-flower`."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower")

from fedlightning.sites.flower.programs import end, free_port
from tests.sites.flower.test_reachability import Proxy, listening

CONFIG = """
trainer:
  max_rounds: 3
  name: run
  version: one
  failures: {timeout: 300}
  evaluation: {stages: [L1, L2], test_data: [local]}
  callbacks: [{class_path: fedlightning.callbacks.SCAFFOLD}]
  enable_progress_bar: false
  logger: false
model:
  class_path: fedlightning.models.Classifier
  init_args:
    net: {class_path: fedlightning.models.MLP, init_args: {in_features: 64, hidden: [8], num_classes: 10}}
    num_classes: 10
    lr: 0.1
data:
  class_path: fedlightning.datamodules.DigitsDataModule
  init_args: {partitioner: {class_path: fedlightning.datamodules.IIDPartitioner, init_args: {num_clients: 2}}}
"""
LONG = 900.0  # of a machine with other work


class Machines:
    """Commands as processes with groups of their own, ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.running: list[subprocess.Popen[bytes]] = []
        self.variables: dict[str, str] = {}
        (folder / "run.yaml").write_text(CONFIG)

    def start(self, name: str, *words: str, module: str = "fedlightning") -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONUNBUFFERED": "1"}
                | self.variables,
            )
        self.running.append(process)
        return process

    def serve(self, *words: str) -> subprocess.Popen[bytes]:
        return self.start("server", "serve", "--config=run.yaml", "--sites=2", f"--port={self.port}", *words)

    def site(self, number: int, *words: str) -> subprocess.Popen[bytes]:
        place = [
            f"--superlink=127.0.0.1:{self.port}",
            f"--name=s{number}",
            f"--folder=s{number}",
            f"--clients=[{number}]",
        ]
        return self.start(f"s{number}", "site", "--config=run.yaml", *place, *words)

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def until(self, what, process: subprocess.Popen[bytes] | None = None) -> None:
        ends = time.monotonic() + LONG
        while not what():
            assert time.monotonic() < ends, "\n".join(map(self.said, ("server", "s0", "s1")))
            assert process is None or process.poll() is None, self.said("server")
            time.sleep(0.2)

    def rounds(self) -> int:
        path = self.folder / "runs" / "run" / "one" / "metrics.csv"
        return max((int(row["round"]) for row in read(path)), default=0) if path.exists() else 0

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(LONG) == 0, self.said("server") + self.said("s0")


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path)
    yield made
    for process in made.running:
        end(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_tls_keys_and_kills(machines):
    """TLS and keys are on; a site and then the server are killed in the middle of the run, and go on: the same bits."""
    alone = machines.start(
        "alone", "fit", "--config=run.yaml", "--trainer.version=alone", "--trainer.failures.timeout=null"
    )
    machines.finish(machines.start("keys", "certificates", "--hosts", "127.0.0.1", "--sites", "s0", "s1"))
    server, _, second = machines.serve(), machines.site(0), machines.site(1)
    machines.until(lambda: machines.rounds() >= 1, server)
    kill(second)
    machines.site(1)
    machines.until(lambda: machines.rounds() >= 2, server)
    kill(server)
    machines.finish(machines.serve("--resume=last"))
    machines.finish(alone)
    runs = machines.folder / "runs" / "run"
    rows = [sorted(tuple(row.items()) for row in read(runs / name / "metrics.csv")) for name in ("alone", "one")]
    assert rows[0] == rows[1]
    models = [(runs / name / "checkpoints" / "last") for name in ("alone", "one")]
    assert same_models(*models)
    assert not list((runs / "one" / "checkpoints" / "clients").glob("*.ckpt"))  # they stay at their sites


def test_a_site_behind_a_proxy(machines):
    """The server's name is known to the proxy alone: site and SuperNode go through it, and not to one another."""
    machines.finish(machines.start("keys", "certificates", "--hosts", "fl.example.invalid", "--sites", "s0", "s1"))
    place = f"fl.example.invalid:{machines.port}"
    proxy = Proxy({place: machines.port})
    with listening(proxy) as port:
        server = machines.serve("--trainer.max_rounds=1")
        machines.variables = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), f"http://127.0.0.1:{port}")
        for number in range(2):
            machines.site(number, f"--superlink={place}", "--trainer.max_rounds=1")
        machines.finish(server)
    assert {head.split()[1] for head in proxy.asked} == {place}


def same_models(one: Path, other: Path) -> bool:
    import torch

    from fedlightning.codec.tree import load

    states = [load(sorted(folder.glob("server-*.safetensors"))[-1])["models"]["global"] for folder in (one, other)]
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_wrong_key_and_plaintext_are_kept_out(machines):
    machines.finish(machines.start("keys", "certificates", "--hosts", "127.0.0.1", "--sites", "s0", "s1"))
    machines.finish(machines.start("others", "certificates", "--sites", "s0", "s1", "--out", "others"))
    (machines.folder / "others" / "s0" / "ca.pem").write_bytes(
        (machines.folder / "certificates/s0/ca.pem").read_bytes()
    )
    server = machines.serve()
    machines.site(0, "--certificates=others/s0")
    machines.until(lambda: "does not let this site in" in machines.said("s0"), server)
    assert (
        "SuperNode ID" not in (machines.folder / "s0" / "supernode.log").read_text()
    )  # what it says when it is let in
    machines.site(1, "--insecure=true")
    machines.until(lambda: "wants TLS and a key" in machines.said("s1"), server)
    with socket.create_connection(("127.0.0.1", machines.port), timeout=30) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
    assert machines.rounds() == 0

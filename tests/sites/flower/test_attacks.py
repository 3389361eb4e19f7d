"""What a stranger, another site and a reader of files can do, over a real SuperLink with keys: `make test-flower`."""

from __future__ import annotations

import re
import ssl
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower")

from fedlightning.sites.flower import programs
from fedlightning.sites.flower.certificate_files import CA, make
from fedlightning.wire import read

LONG = 120.0
MEDIA = {"Content-Type": "application/protobuf"}
MODEL = b"entries of a model" * 100_000
"""More than a stranger may send, and to be found on no disk afterwards."""


class Two:
    """A SuperLink with two sites, each a process of its own: Flower keeps one identity in a process."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.own = make(folder / "certificates", ["127.0.0.1"], ["a", "b"])[0]
        programs.prepare(folder / "serve" / "flower")
        self.port = programs.free_port()
        for name in "ab":
            words = [sys.executable, "-m", "tests.sites.flower.echo", str(folder), str(self.port), name]
            process = subprocess.Popen(words, cwd=Path(__file__).parents[3], start_new_session=True)
            stack.callback(programs.end, process)
        self.link = stack.enter_context(programs.superlink(folder / "serve", "127.0.0.1", self.port, self.own, 2))
        self.until(lambda: len(self.link.nodes()) == 2)
        self.node = {self.link.owner(node): node for node in self.link.nodes()}

    def told(self, name: str) -> str:
        return (self.folder / name / "told").read_text().splitlines()[-1]

    def until(self, what) -> None:
        ends = time.monotonic() + LONG
        while not what():
            assert time.monotonic() < ends
            time.sleep(0.1)

    def ask(self, name: str, request: bytes) -> dict:
        number, found = self.link.send(self.node[name], request), []
        self.until(lambda: found.extend(self.link.receive([number], 1.0)) or found)
        return read(found[0][1])

    def posted(self, path: str, body: bytes, **headers: str) -> int:
        """Return the status of a request over TLS with the public certificate and nothing else."""
        trust = ssl.create_default_context(cafile=str(self.own / CA))
        asked = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", body, headers, method="POST")
        try:
            with urllib.request.urlopen(asked, timeout=60, context=trust) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with ExitStack() as stack:
        yield Two(tmp_path_factory.mktemp("two"), stack)


def test_the_public_certificate_opens_nothing_but_what_asks_for_a_key(two):
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StartRunRequest, StopRunRequest
    from flwr.proto.control_pb2 import UnregisterNodeRequest as Unregister
    from flwr.supercore.control.control_http_client import ControlHttpClient

    from fedlightning.sites.flower.connection import Address

    run, node = two.link._grid.run.run_id, int(two.node["a"])
    asked = {"ListNodes": ListNodesRequest(), "ListRuns": ListRunsRequest(), "StopRun": StopRunRequest(run_id=run)}
    asked |= {"StartRun": StartRunRequest(), "UnregisterNode": Unregister(node_id=node)}
    for secret, names in (
        (b"", asked),
        (b"guess", asked),
        ((two.folder / "serve/secret").read_bytes(), ["UnregisterNode"]),
    ):
        address = Address(f"127.0.0.1:{two.port}", str(two.own / CA), secret)
        control = address.client(ControlHttpClient, name="flwr CLI")
        for name in names:
            with pytest.raises(Exception, match="403 Forbidden"):
                getattr(control, name)(asked[name])
        control.close()
    for path in ("/v1/runtime/acquire-task", "/v1/runtime/get-nodes", "/docs", "/openapi.json", "/v1/responses"):
        assert two.posted(path, b"") == 403
    for path in ("/v1/fleet/../control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes", "//v1/control/list-nodes"):
        assert two.posted(path, b"", **MEDIA) in (403, 404), path
        assert two.posted(path.replace("list-nodes", "unregister-node"), b"") in (403, 404), path
    assert two.posted("/v1/fleet/pull-messages", b"", **MEDIA) in (400, 401)
    assert two.posted("/v1/fleet/push-object", MODEL) == 413
    assert two.ask("a", b"work")["answer"] == "a"


def test_a_site_s_own_port_opens_nothing(two):
    """SuperNodes listen at 127.0.0.1, where every user of the machine comes."""
    place = re.findall(r"running on (http://127\.0\.0\.1:\d+)", (two.folder / "a" / "supernode.log").read_text())[-1]
    for path in (
        "acquire-task",
        "pull-task-input",
        "pull-messages",
        "push-messages",
        "push-task-output",
        "pull-object",
    ):
        asked = urllib.request.Request(f"{place}/v1/runtime/{path}", b"", MEDIA)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=60)
        assert refused.value.code in (401, 403), path
    assert two.ask("a", b"work")["answer"] == "a"


def test_a_signed_request_is_good_for_one_site_and_one_time(two, monkeypatch):
    sign, sent = two.link._sign, []
    monkeypatch.setattr(two.link, "_sign", lambda to, request: sent.append(sign(to, request)) or sent[-1])
    assert two.ask("a", MODEL) == {"answer": "a", "size": len(MODEL)}
    monkeypatch.setattr(two.link, "_sign", lambda to, request: request)
    assert "is for site 'a'" in two.ask("b", sent[0])["refused"]
    assert "is for site 'a'" in two.told("b")
    assert two.ask("a", sent[0]) == {"lost": ""}
    assert "not signed by the server" in two.ask("a", b"x" * 100)["refused"]
    assert "not signed by the server" in two.told("a")


def test_a_reply_that_nobody_waits_for_does_not_stay_in_memory(two):
    link, number = two.link, two.link.send(two.node["a"], MODEL)
    assert two.ask("a", b"work")["answer"] == "a"  # a site answers in order
    two.until(lambda: link.receive([link.send(two.node["b"], b"work")], 10.0) or number not in link._open_messages)
    (again,) = link._grid.pull_messages([number])
    assert number not in link._open_messages and again.has_error()  # it knows it no more


def test_the_true_cause_is_named_where_the_run_is_stopped(two):
    from flwr.proto.control_pb2 import StopRunRequest

    two.link._control.StopRun(StopRunRequest(run_id=two.link._grid.run.run_id))  # whoever has the secret can
    with pytest.warns(UserWarning, match="was stopped, and not by this process.*Another is begun"):
        two.until(lambda: two.ask("b", b"again").get("answer") == "b")


def test_nobody_else_can_read_the_files_and_no_model_is_in_them(two):
    """Last: after models went through."""
    assert two.ask("b", MODEL)["size"] == len(MODEL)
    paths = list(two.folder.rglob("*"))
    assert len(paths) > 20
    for path in paths:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
        assert path.is_dir() or MODEL[:64] not in path.read_bytes(), path

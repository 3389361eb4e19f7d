"""A server behind a proxy: most hospitals let nothing out but through one."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate

import pytest

pytest.importorskip("cryptography", reason="it comes with Flower: make test-flower")

from fedlightning.sites.flower import programs
from fedlightning.sites.flower import reachability as reach
from fedlightning.sites.flower.certificate_files import CA, KEY, SERVER, make
from tests.helpers import one_clock

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Let a thread answer each connection to a port of this machine, and give the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def loop() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.settimeout(5)
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                serve(connection)

        threading.Thread(target=loop, daemon=True).start()
        yield server.getsockname()[1]
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A proxy that knows one name, and passes bytes on both ways.

    Attributes:
        asked: What it was asked for.
        answer: What it says in place of yes.
    """

    def __init__(self, knows: dict[str, int]) -> None:
        self.knows, self.asked, self.answer = knows, list[str](), b""

    def __call__(self, connection: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        self.asked.append(head.decode())
        port = self.knows.get(head.split()[1].decode())
        if self.answer or port is None:
            connection.sendall(self.answer or b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", port)) as other:
            connection.sendall(b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n")
            back = threading.Thread(target=pass_on, args=(other, connection), daemon=True)
            back.start()
            pass_on(connection, other)
            back.join(5)


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def behind(tmp_path, monkeypatch):
    """A server with TLS for a name that only a proxy knows, and the proxy: its object, its port, the authority."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    own, _ = make(tmp_path / "certificates", ["fl.example.invalid"], ["a"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / SERVER, own / KEY)

    def tls(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1)

    with listening(tls) as server:
        proxy = Proxy({"fl.example.invalid:8443": server, "other.example.invalid:8443": server})
        with listening(proxy) as port:
            yield proxy, port, own / CA


@one_clock
def test_a_server_that_only_a_proxy_reaches(behind, monkeypatch):
    """A site tried plain sockets, and waited for ever, though its SuperNode would have gone through."""
    proxy, port, authority = behind
    place = "fl.example.invalid:8443"
    with pytest.raises(RuntimeError, match="no network"):  # without it, straight
        reach.unreachable(place, authority)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, f"http://127.0.0.1:{port}")
            assert reach.unreachable(place, authority) is None
            assert "is not for 'other.example.invalid'" in reach.unreachable("other.example.invalid:8443", authority)
            assert "502 Bad Gateway" in reach.unreachable("nowhere.example.invalid:8443", authority)
    assert proxy.asked[0].startswith(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n")


@one_clock
def test_a_user_of_a_proxy(behind, monkeypatch):
    proxy, port, authority = behind
    monkeypatch.setenv("HTTPS_PROXY", f"http://dr%40x:pass%3Aword@127.0.0.1:{port}")
    assert reach.unreachable("fl.example.invalid:8443", authority) is None
    told = base64.b64encode(b"dr@x:pass:word").decode()
    assert f"\r\nProxy-Authorization: Basic {told}\r\n" in proxy.asked[-1]
    proxy.answer = b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"
    said = reach.unreachable("fl.example.invalid:8443", authority)
    assert "wants a user and a password" in said and "pass" not in said.replace("password", "")


@pytest.mark.parametrize(
    "answer, said",
    [
        (b"HTTP/1.1 403 Not \x1b[31mallowed\r\n\r\n", r"which says 403 Not \x1b[31mallowed"),
        (b"SSH-2.0-x\r\n\r\n", "other than HTTP"),
        (b"x" * 2**17, "other than HTTP"),
    ],
)
def test_a_proxy_that_does_not_let_through_is_named(behind, monkeypatch, answer, said):
    proxy, port, authority = behind
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
    proxy.answer = answer
    found = reach.unreachable("fl.example.invalid:8443", authority)
    assert said in found and f"127.0.0.1:{port}" in found and "NO_PROXY" in found


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "http://127.0.0.1:x", "https://p:1", "http://"]
)
def test_a_proxy_that_is_none_is_named(behind, monkeypatch, address):
    monkeypatch.setenv("HTTPS_PROXY", address)
    found = reach.unreachable("fl.example.invalid:8443", behind[2])
    assert found is not None and "HTTPS_PROXY" in found


def test_programs_of_this_machine_are_reached_without(behind, monkeypatch):
    """Flower's clients go by the environment: to the SuperNode at the loopback, too."""
    port = behind[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("NO_PROXY", "intern.example")
    programs.reach_directly("127.0.0.1", "localhost", "::1")
    programs.reach_directly("127.0.0.1")
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "intern.example,127.0.0.1,localhost,::1"
    for host in ("127.0.0.1", "localhost", "::1", "intern.example"):
        assert reach.proxy_for(host, "http") is reach.proxy_for(host, "https") is None
    assert reach.proxy_for("fl.example.invalid", "https") == f"http://127.0.0.1:{port}"


@one_clock
@pytest.mark.parametrize(
    "ahead, said", [(0, None), (4, None), (8, "8 s ahead of"), (-200, None), (-400, "400 s behind"), (None, None)]
)
def test_a_clock_that_the_server_would_not_bear_is_said(tmp_path, monkeypatch, ahead, said):
    """A request 6 s from the future is refused, as one with an unknown key is; the site waited and did not know why."""
    own, _ = make(tmp_path / "certificates", ["127.0.0.1"], ["a"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / SERVER, own / KEY)
    then = 1_700_000_000
    monkeypatch.setattr(reach.time, "time", lambda: then + (ahead or 0) + 0.5)
    date = "Date: nonsense" if ahead is None else f"Date: {formatdate(then, usegmt=True)}"

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(2**16)
            secure.sendall(f"HTTP/1.1 403 Forbidden\r\n{date}\r\ncontent-length: 0\r\n\r\n".encode())

    with listening(answer) as port:
        found = reach.unreachable(f"127.0.0.1:{port}", own / CA)
    assert (found is None) == (said is None) and (said is None or (said in found and "NTP" in found))

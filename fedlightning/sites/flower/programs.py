"""Flower's programs, started and ended: a SuperLink for the server, a SuperNode for a site.

A site's end of Flower: the messages that come to its SuperNode are answered here (flwr 1.41).

Requests signed by the server, each for one site, one start of the server and one time: sites obey nothing else.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedlightning.errors import ConfigurationError, missing_package, refuse_without_posix
from fedlightning.sites.flower import certificates as files
from fedlightning.sites.flower.certificates import bundle
from fedlightning.sites.flower.connection import (
    COMPLETED,
    POLL,
    Address,
    Tasks,
    content_of,
    heartbeat,
    records_of,
)
from fedlightning.sites.link import Answer
from fedlightning.sites.status import NAME, printable
from fedlightning.storage.files import write_secret, write_text_atomically
from fedlightning.wire import write

LENGTH = 64
"""Bytes of a signature, which stands in front of what is signed."""
CONTEXT = b"fedlightning request 2\0"
"""What is signed besides, so that a signature is good for nothing else."""
HEAD = struct.Struct(">QQH")
"""Start of the server, number of the request since then, length of the site's name; the name and the request follow."""
Sign = Callable[[str, bytes], bytes]
"""Signs a request to the site of a name."""


def begin(path: Path) -> int:
    """Return a number for a start of the server that is larger than those before, and keep it."""
    began = max(time.time_ns(), _numbers(path)[0] + 1)
    write_text_atomically(path, f"{began} 0")
    return began


def signer(path: Path, began: int) -> Sign:
    """Return what signs requests with a key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, numbers = Ed25519PrivateKey.from_private_bytes(path.read_bytes()), itertools.count(1)

    def sign(to: str, request: bytes) -> bytes:
        signed = HEAD.pack(began, next(numbers), len(to.encode())) + to.encode() + request
        return key.sign(CONTEXT + signed) + signed

    return sign


class Heard:
    """What a site has heard of its server: each request once, and none of an earlier start.

    Args:
        path: Keeps the newest over starts of the site; a copy beside it does where it is damaged or gone.
    """

    def __init__(self, path: Path) -> None:
        self._paths = path, path.with_name(f"{path.name}.copy")
        self._began, self._newest = max(map(_numbers, self._paths))
        self._before = self._newest  # what came before this start of the site was answered, or is lost and comes anew
        self._seen: set[int] = set()

    def objection(self, began: int, number: int) -> str | None:
        """Return why a request is not carried out; empty: it came already; `None`: it is new, and noted."""
        if began < self._began:
            return (
                "the request is of an earlier start of the server: somebody sends it again, or the server's clock was set "
                f"back (then stop the site, remove {' and '.join(path.name for path in self._paths)} from its folder and "
                "start it again)"
            )
        if began > self._began:
            self._began, self._newest, self._before = began, 0, 0
            self._seen.clear()
        if number <= self._before or number in self._seen:  # Flower does not keep the order
            return ""
        self._seen.add(number)
        self._newest = max(number, self._newest)
        for path in self._paths:
            write_text_atomically(path, f"{self._began} {self._newest}")
        return None


def verified(answer: Answer, path: Path, name: str, heard: Heard, refused: Callable[[str], None] = print) -> Answer:
    """Return a site that refuses what the server has not signed for it, and does nothing a second time."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = Ed25519PublicKey.from_public_bytes(path.read_bytes())

    def checked(request: bytes) -> bytes:
        signed, reason = request[LENGTH:], None
        try:
            key.verify(request[:LENGTH], CONTEXT + signed)
            began, number, length = HEAD.unpack_from(signed)
        except (InvalidSignature, struct.error):
            reason = "the request is not signed by the server that this site belongs to"
        else:
            to = signed[HEAD.size : HEAD.size + length].decode(errors="replace")
            if to != name:
                reason = (
                    f"the request is for site '{printable(to, NAME)}', as the server knows it by its key, and this is "
                    f"'{name}': start it with the --name and the key of one site"
                )
            else:
                try:
                    reason = heard.objection(began, number)
                except OSError:  # else it could be sent again
                    reason = "this site cannot note what it hears: its disk is full, or its folder is closed to it"
        if reason is None:
            return answer(signed[HEAD.size + length :])
        if not reason:
            return write({"lost": ""})
        refused(reason)
        return write({"refused": reason})

    return checked


def _numbers(path: Path) -> tuple[int, int]:
    try:
        began, number = map(int, path.read_text().split())
    except (OSError, ValueError):
        return 0, 0
    return began, number


def serve_site(address: Address, answer: Answer, lives: Callable[[], bool]) -> None:
    """Answer what comes to a SuperNode, one request after another, as long as it runs."""
    tasks, token = Tasks(address, TaskType.CLIENT_APP), None
    while lives():
        if token is None:
            with suppress(httpx.HTTPError):  # it is about to end, or busy
                token = tasks.next()
        if token is None:
            time.sleep(POLL)
            continue
        following = Following(tasks)
        try:
            _answer_one(address, token, answer, following)
        except Exception as error:  # whatever Flower raises: a site goes on with the next
            print(f"A message was lost: {' '.join(str(error).split())}", flush=True)
        token = following.token


class Following:
    """Finds out that the message of a task never comes: a SuperNode has one task at a time, so the next says so.

    A run that ends while a SuperNode receives a message leaves it with a task whose message it has dropped, and Flower waits
    more than an hour for that.

    Args:
        tasks: The tasks of the SuperNode.

    Attributes:
        token: Token of the task after this one, if it has come.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.token: str | None = None
        self._tasks = tasks
        self._lock = threading.Lock()  # Flower pulls the parts of a message side by side

    def watch(self, client: RuntimeHttpClient) -> None:
        """Let a client that pulls parts of a message give up when the next task is there."""
        pull = client.PullObject

        def watched(request: PullObjectRequest) -> PullObjectResponse:
            response = pull(request)
            if response.object_found and not response.object_available:
                with self._lock, suppress(httpx.HTTPError):
                    self.token = self.token or self._tasks.next()
                if self.token is not None:
                    raise RuntimeError("its run has ended while it was on the way.")
            return response

        client.PullObject = watched


def _answer_one(address: Address, token: str, answer: Answer, following: Following) -> None:
    client = address.client(RuntimeHttpClient, RuntimeTokenHttpInterceptor(token), name="flwr-clientapp")
    following.watch(client)
    with _beating(client):
        message, context, _, fab = pull_task_input(client)
        try:
            if fab.hash_str != bundle()[1]:
                raise ValueError(
                    "it belongs to another app than that of `fedlightning serve`, which this site does not carry out"
                )
            reply = answer(content_of(message))
        except ValueError as error:
            reply = write({"refused": f"{error}"})
        push_message(client, Message(records_of(reply), reply_to=message), context)
        push_task_output(client, context, COMPLETED, "")


@contextmanager
def _beating(client: RuntimeHttpClient) -> Iterator[None]:
    heart = HeartbeatSender(heartbeat(client, lambda: None))  # the reply is refused then, and the task comes again
    heart.start()
    try:
        yield
    finally:
        if heart.is_running:
            heart.stop()
        client.close()


QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Nothing is told to Flower's makers, and nothing is installed while a run goes on."""
GUARD = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def watch():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
os._exit(child.wait() % 256)
"""
"""Ends a program with the process that started it, however that ended: its end of a pipe closes."""
START = 60.0
"""Seconds that a program has until it listens."""


def prepare(home: Path) -> None:
    """Set what Flower reads from the environment, before it is imported, and keep files to this user."""
    refuse_without_posix("A server or a site", "Run it there.")
    os.umask(0o077)  # what is written from now on, here and by Flower, is this user's only
    home.mkdir(parents=True, exist_ok=True)
    for folder in (home.parent, home):  # they may be older
        with suppress(PermissionError):  # somebody else's, who has given this user a place
            folder.chmod(0o700)
    os.environ.update(QUIET | {"FLWR_HOME": str(home)})
    reach_directly("127.0.0.1", "localhost", "::1")
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            missing_package("Sites need Flower", "flower")
            + " It takes an environment of its own: docs/how-to/deploy.md."
        ) from None


def reach_directly(*hosts: str) -> None:
    """Let no proxy come between programs of this machine: Flower's clients go by the environment."""
    before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    known = [host for host in before.split(",") if host.strip()]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*known, *(host for host in hosts if host not in known)])


def secret_file(folder: Path) -> tuple[Path, bytes]:
    """Write a new secret that only this user can read; return its file and the secret."""
    folder.mkdir(parents=True, exist_ok=True)
    path, secret = folder / "secret", secrets.token_hex(32).encode()
    write_secret(path, secret)
    return path, secret


def itself(host: str) -> str:
    """Return the address by which a machine reaches what listens on `host` here."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    program: str, arguments: Sequence[str], port: int, log: Path, host: str = "127.0.0.1", by: Sequence[str] = ()
) -> Iterator[Callable[[], bool]]:
    """Run one of Flower's programs inside the block; it has its own group, and is ended with all that it started.

    The block is given what says whether it still runs.
    """
    found = Path(sys.executable).with_name(program)
    command = [*by, program] if by else [str(found) if found.exists() else program]
    command = [sys.executable, "-I", "-S", "-c", GUARD, *command, *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=_environment(),
        )
    try:
        _wait(process, program, port, log, itself(host))
        yield lambda: process.poll() is None
    finally:
        end(process)


class Log:
    """The lines that a program adds to its log.

    Args:
        path: The log. What is in it already is not looked at.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._codes: list[str] = []

    def new_lines(self) -> list[str]:
        """Return the lines that were added since the last call, without colours."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            found = self._rest + file.read()
            self._read = file.tell()
        *lines, self._rest = found.split(b"\n")
        texts = [re.sub(r"\x1b\[[0-9;]*m", "", line.decode(errors="replace")) for line in lines]
        self._codes += [text.strip() for text in texts if text.startswith("[code: ")]
        return texts

    def reason(self) -> str | None:
        """Return the reason that Flower gave last since the last call, in its words; `None`: it gave none."""
        found = self._codes[-1].partition("] ")[2] if self._codes else None
        self._codes.clear()
        return found


def _environment() -> Mapping[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _wait(process: subprocess.Popen[bytes], program: str, port: int, log: Path, host: str) -> None:
    ends = time.monotonic() + START
    while time.monotonic() < ends:
        if process.poll() is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise ConfigurationError(
                f"{program} does not start: {lines[-1] if lines else 'it says nothing'} (see {log})."
            )
        with suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)
    raise ConfigurationError(f"{program} does not listen on port {port} after {START:g} seconds (see {log}).")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started."""
    for how, grace in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def superlink(home: Path, host: str, port: int, own: Path | None, sites: int) -> Iterator[Any]:
    """Run a SuperLink inside the block, and give the connection to its sites."""
    path, secret = secret_file(home)
    keys = None if own is None else own / "sites"
    words = [str(path), "" if keys is None else str(keys), "--host", host, "--port", str(port)]
    words += ["--database", ":flwr-in-memory:"]  # nothing that went through it is left, nor is a site unknown for ever
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(path)]
    words += ["--disable-runtime-dependency-installation"]
    if own is None:
        words += ["--insecure"]
    else:
        ca, certificate, key = files.needed(own, (files.CA, files.SERVER, files.KEY))
        words += ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
        words += ["--enable-supernode-auth"]
    local = itself(host)
    reach_directly(local)
    with ExitStack() as stack:
        by = [sys.executable, "-P", str(Path(__file__).with_name("gateway.py"))]
        lives = stack.enter_context(running("flower-superlink", words, port, home / "superlink.log", host, by))
        from fedlightning.sites.flower import connection, server
        from fedlightning.sites.flower import programs as signatures

        address = connection.Address(f"{local}:{port}", None if own is None else str(own / files.CA), secret)
        if keys is None or own is None:
            link = server.FlowerLink(address, sites, lives=lives)
        else:
            allowed = server.register(address, keys)
            sign = signatures.signer(own / files.SIGN, signatures.begin(home / "began"))
            link = server.FlowerLink(address, sites, allowed, sign, lives)
        stack.callback(link.close)
        yield link


@contextmanager
def supernode(
    home: Path, place: str, own: Path | None, name: str = "", refused: Callable[[str], None] = print
) -> Iterator[Any]:
    """Run a SuperNode inside the block, and give what answers its messages with a site."""
    path, secret = secret_file(home)
    port = free_port()
    words = ["--superlink", place, "--port", str(port), "--isolation", "process"]
    words += ["--superexec-auth-secret-file", str(path)]
    if own is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(own / files.CA), "--auth-supernode-private-key", str(own / files.SITE)]
    with running("flower-supernode", words, port, home / "supernode.log") as lives:
        from fedlightning.sites.flower import connection
        from fedlightning.sites.flower import programs as node
        from fedlightning.sites.flower import programs as signatures

        address = connection.Address(f"127.0.0.1:{port}", None, secret)

        def answer_all(answer: Answer, beside: Callable[[], bool]) -> None:
            known = answer
            if own is not None:
                heard = signatures.Heard(home / "heard")
                known = signatures.verified(answer, own / files.SIGNED, name, heard, refused)
            node.serve_site(address, known, lambda: beside() and lives())

        yield answer_all

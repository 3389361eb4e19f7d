"""Flower's programs, started and ended: a SuperLink for the server, a SuperNode for a site."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fedlightning.errors import ConfigurationError, missing_package, refuse_without_posix
from fedlightning.sites.flower import certificate_files as files
from fedlightning.sites.link import Answer
from fedlightning.storage.files import write_secret

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
    direct = [host for host in before.split(",") if host.strip()]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(
        [*direct, *(host for host in hosts if host not in direct)]
    )


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
    installed = Path(sys.executable).with_name(program)
    command = [*by, program] if by else [str(installed) if installed.exists() else program]
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
            content = self._rest + file.read()
            self._read = file.tell()
        *lines, self._rest = content.split(b"\n")
        texts = [re.sub(r"\x1b\[[0-9;]*m", "", line.decode(errors="replace")) for line in lines]
        self._codes += [text.strip() for text in texts if text.startswith("[code: ")]
        return texts

    def reason(self) -> str | None:
        """Return the reason that Flower gave last since the last call, in its words; `None`: it gave none."""
        reason = self._codes[-1].partition("] ")[2] if self._codes else None
        self._codes.clear()
        return reason


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
def superlink(home: Path, host: str, port: int, certs: Path | None, sites: int) -> Iterator[Any]:
    """Run a SuperLink inside the block, and give the connection to its sites."""
    path, secret = secret_file(home)
    keys = None if certs is None else certs / "sites"
    words = [str(path), "" if keys is None else str(keys), "--host", host, "--port", str(port)]
    words += ["--database", ":flwr-in-memory:"]  # nothing that went through it is left, nor is a site unknown for ever
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(path)]
    words += ["--disable-runtime-dependency-installation"]
    if certs is None:
        words += ["--insecure"]
    else:
        ca, certificate, key = files.needed(certs, (files.CA, files.SERVER, files.KEY))
        words += ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
        words += ["--enable-supernode-auth"]
    local = itself(host)
    reach_directly(local)
    with ExitStack() as stack:
        by = [sys.executable, "-P", str(Path(__file__).with_name("gateway.py"))]
        lives = stack.enter_context(running("flower-superlink", words, port, home / "superlink.log", host, by))
        from fedlightning.sites.flower import connection, server_link, signatures

        address = connection.Address(f"{local}:{port}", None if certs is None else str(certs / files.CA), secret)
        if keys is None or certs is None:
            link = server_link.FlowerLink(address, sites, lives=lives)
        else:
            allowed = server_link.register(address, keys)
            sign = signatures.signer(certs / files.SIGN, signatures.begin(home / "began"))
            link = server_link.FlowerLink(address, sites, allowed, sign, lives)
        stack.callback(link.close)
        yield link


@contextmanager
def supernode(
    home: Path, place: str, certs: Path | None, name: str = "", refused: Callable[[str], None] = print
) -> Iterator[Any]:
    """Run a SuperNode inside the block, and give what answers its messages with a site."""
    path, secret = secret_file(home)
    port = free_port()
    words = ["--superlink", place, "--port", str(port), "--isolation", "process"]
    words += ["--superexec-auth-secret-file", str(path)]
    if certs is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(certs / files.CA), "--auth-supernode-private-key", str(certs / files.SITE)]
    with running("flower-supernode", words, port, home / "supernode.log") as lives:
        from fedlightning.sites.flower import connection, node, signatures

        address = connection.Address(f"127.0.0.1:{port}", None, secret)

        def answer_all(answer: Answer, beside: Callable[[], bool]) -> None:
            verified_answer = answer
            if certs is not None:
                heard = signatures.Heard(home / "heard")
                verified_answer = signatures.verified(answer, certs / files.SIGNED, name, heard, refused)
            node.serve_site(address, verified_answer, lambda: beside() and lives())

        yield answer_all

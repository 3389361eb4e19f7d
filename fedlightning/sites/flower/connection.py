"""What both ends of Flower need of its interfaces (flwr 1.41; they change with its versions): clients, tasks, contents.

Both `fedlightning serve` and `fedlightning site` start Flower's own program with ``--isolation process`` and take its tasks
themselves, so no process starts for a message. A secret that only the two know keeps others from taking them.

Flower's SuperLink behind a gate: sites reach what is for sites, and all else wants the secret of the server's process.

Flower 1.41 has all its interfaces at one port (`--control-api-address` is without effect) and asks nobody who he is that
lists, stops and starts runs or unregisters a site. So this file is run in the place of `flower-superlink`. It imports
nothing of FedLightning, whose start takes seconds; what it needs of Flower are `create_app` and the names of headers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.message import Array
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import (
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient

HEADER = "fedlightning-pass"
SITES = "/v1/fleet/"
"""What begins so is for sites: Flower asks for their keys there."""
OWN = ("/v1/runtime/", *(f"/v1/control/{name}" for name in ("list-nodes", "list-runs", "register-node", "stop-run")))
"""What begins so is for the server's process; nobody unregisters a site."""
START = "/v1/control/start-run"
"""With this the server's process has let its sites be known."""
SMALL = 2**16
"""Bytes that a stranger may send: Flower reads a request before it asks for the key."""

Asgi = Callable[[Mapping[str, Any], Any, Any], Awaitable[None]]


def pass_of(secret: bytes) -> str:
    """Return what the server's process shows: not the secret itself, which also is a key of Flower's."""
    return hmac.new(secret, b"fedlightning gate", hashlib.sha256).hexdigest()


class Gate:
    """An ASGI application that lets some requests through to another.

    Args:
        app: The other.
        secret: That of the server's process.
        keys: Public keys of the sites, as Flower sends them; `None`: there are none to prove.
    """

    def __init__(self, app: Asgi, secret: bytes, keys: Collection[bytes] | None) -> None:
        self._app, self._pass, self._keys = app, pass_of(secret).encode(), keys
        self._is_open = False

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        kind = scope["type"]
        status = None if kind == "lifespan" else 403 if kind != "http" else self.refusal(scope)
        if status is None:
            await self._app(scope, receive, send)
        elif kind == "http":
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def refusal(self, scope: Mapping[str, Any]) -> int | None:
        """Return the status with which a request is refused; `None`: it is let through."""
        path, headers = str(scope["path"]), {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        if path.startswith(SITES):
            if not self._is_open:
                return 503  # a SuperNode asks again
            return None if _is_small(headers) or self._is_of_site(headers) else 413
        if not hmac.compare_digest(headers.get(HEADER.encode(), b""), self._pass):
            return 403
        self._is_open |= path == START
        return None if path.startswith((*OWN, START)) else 403

    def _is_of_site(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request comes from a site, as far as can be seen before it is read; Flower looks again."""
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

        if self._keys is None:
            return True
        names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
        key, signature, stamp = (headers.get(name.lower().encode(), b"") for name in names)
        try:
            own = base64.b64decode(key, validate=True)
            return own in self._keys and verify_signature(
                bytes_to_public_key(own), stamp, base64.b64decode(signature, validate=True)
            )
        except (ValueError, binascii.Error):
            return False


def _is_small(headers: Mapping[bytes, bytes]) -> bool:
    length = headers.get(b"content-length", b"")
    return b"transfer-encoding" not in headers and (not length or (length.isdigit() and int(length) <= SMALL))


def public_keys(folder: Path) -> dict[str, bytes]:
    """Return the public keys of sites, as Flower sends them, by the sites' names."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    found = {}
    for path in sorted(folder.glob("*.pub")):
        key = load_ssh_public_key(path.read_bytes())
        found[path.stem] = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


def main(program: str, secret: str, keys: str, *words: str) -> None:
    """Run a SuperLink behind a gate."""
    from flwr.superlink import main as superlink
    from flwr.superlink.cli.flower_superlink import flower_superlink

    known = None if not keys else set(public_keys(Path(keys)).values())
    make, content = superlink.create_app, Path(secret).read_bytes()
    superlink.create_app = lambda *given: Gate(make(*given), content, known)
    sys.argv = [program, *words]
    flower_superlink()


if __name__ == "__main__":
    main(*sys.argv[1:])


ENTRY = "fedlightning"
POLL = 0.2
"""Seconds between looks for a task or a reply."""
COMPLETED = "completed"
BUSY = (408, 429, 500, 502, 503, 504)
"""Answers of a program that may do better later."""
PATIENCE = 600.0
"""Seconds in which a program is asked again that runs and does not answer."""

T = TypeVar("T", RuntimeHttpClient, ControlHttpClient)


def patient(lives: Callable[[], bool] = lambda: True) -> RetryInvoker:
    """Return what calls a program again that is busy, as long as it runs.

    Flower's own sends its process a SIGINT when a token is not good any more, and has no end where a program has ended.
    """

    def gives_up(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.status_code not in BUSY
        return not lives() or "certificate" in str(error).lower()

    again = (httpx.TransportError, httpx.HTTPStatusError)
    return RetryInvoker(lambda: exponential(max_delay=5), again, None, PATIENCE, should_giveup=gives_up)


def heartbeat(client: RuntimeHttpClient, ended: Callable[[], None]) -> Callable[[], bool]:
    """Return what tells a program that a task goes on. Flower's own sends its process a SIGINT where the task is over."""

    def beat() -> bool:
        try:
            if client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                return True
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError as error:
            if error.response.status_code in BUSY:
                return False
        ended()
        return True

    return beat


class Pass:
    """Shows a secret at the gate of a SuperLink.

    Args:
        secret: The secret that was shared with it.
    """

    def __init__(self, secret: bytes) -> None:
        self._shown = pass_of(secret)

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers[HEADER] = self._shown
        return call_next(context)


@dataclass(frozen=True)
class Address:
    """Where a SuperLink or SuperNode is reached.

    Attributes:
        place: Host and port.
        certificate: File of the certificate to trust; `None`: no TLS.
        secret: Shared with the program that was started here.
    """

    place: str
    certificate: str | None = None
    secret: bytes = b""

    def client(self, kind: type[T], *interceptors: Any, name: str, retry: RetryInvoker | None = None) -> T:
        """Return a client of an interface; `retry`: what calls again where it is not answered."""
        return kind.from_server_address(
            server_address=self.place,
            insecure=self.certificate is None,
            root_certificates=self.certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=name), Pass(self.secret), *interceptors],
            retry_invoker=retry,
        )


def content_of(message: Message) -> bytes:
    """Return the bytes that a message carries."""
    records = message.content if message.has_content() else {}
    record = records.get(ENTRY)
    if not isinstance(record, ArrayRecord) or list(record) != [ENTRY]:
        raise ValueError("A message without content of FedLightning was refused.")
    return bytes(record[ENTRY].data)


def records_of(content: bytes) -> RecordDict:
    """Return bytes as a message carries them: an array, which Flower sends in parts."""
    array = Array(dtype="uint8", shape=(len(content),), stype=ENTRY, data=content)
    return RecordDict({ENTRY: ArrayRecord({ENTRY: array})})


class Tasks:
    """Takes the tasks of a SuperLink or SuperNode, as Flower's SuperExec does.

    Args:
        address: Its address.
        kind: Kind of the tasks.
    """

    def __init__(self, address: Address, kind: TaskType) -> None:
        # the name of Flower's own program for this: the interface compares the versions that it is told
        guard = SuperExecAuthHttpInterceptor(
            master_secret=address.secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
        )
        self._client = address.client(RuntimeHttpClient, guard, name="SuperExec")
        self._kind = kind

    def next(self) -> str | None:
        """Return the token of a task, if there is one."""
        found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._kind], agentapp_fab_hashes=[]))
        return found.token if found.HasField("task") and found.token else None

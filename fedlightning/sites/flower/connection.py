"""What both ends of Flower need of its interfaces (flwr 1.41; they change with its versions): clients, tasks, contents.

Both `fedlightning serve` and `fedlightning site` start Flower's own program with ``--isolation process`` and take its tasks
themselves, so no process starts for a message. A secret that only the two know keeps others from taking them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.message import Array
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient

from fedlightning.sites.flower.gateway import HEADER, pass_of

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
        reply = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._kind], agentapp_fab_hashes=[]))
        return reply.token if reply.HasField("task") and reply.token else None

"""All that touches Flower's interfaces (flwr 1.41; they change with its versions): connections, runs, messages.

Both `fedlightning serve` and `fedlightning site` start Flower's own program with ``--isolation process`` and take its tasks
themselves, so no process starts for a message. A secret that only the two know keeps others from taking them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.message import Array
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedlightning.engines.flower.bundle import bundle
from fedlightning.engines.sites.link import Answer, LostConnectionError
from fedlightning.errors import ConfigurationError, warn
from fedlightning.wire import write

ENTRY = "fedlightning"
MESSAGE_TYPE = "train"
POLL = 0.2
"""Seconds between looks for a task or a reply."""
FOREVER = 10 * 365 * 24 * 3600.0
COMPLETED = "completed"
BUSY = (408, 429, 500, 502, 503, 504)
"""Answers of a program that may do better later."""
PATIENCE = 600.0
"""Seconds in which a program is asked again that runs and does not answer."""
ENDED = "The SuperLink has ended; its log says why. Go on with --resume last."

R = TypeVar("R")
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
    """Return what tells a program that a task goes on. Flower's own sends its process a SIGINT where the task is over.

    Args:
        client: A connection to the program.
        ended: Is called where the program has given the task up.
    """

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
            interceptors=[RuntimeVersionHttpInterceptor(component_name=name), *interceptors],
            retry_invoker=retry,
        )


def content_of(message: Message) -> bytes:
    """Return the bytes that a message carries.

    Raises:
        ValueError: If it carries something else.
    """
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


class FlowerLink:
    """The server's connection to its sites: one run on a SuperLink.

    Args:
        address: The SuperLink's address.
        expected: Number of sites without which no run begins.
        allowed: Names of the sites that may take part, by the ids of their nodes; `None`: all that are connected.
        sign: Signs a request.
        lives: Whether the SuperLink runs.

    Attributes:
        expected: The same.
    """

    def __init__(
        self,
        address: Address,
        expected: int,
        allowed: Mapping[int, str] | None = None,
        sign: Callable[[bytes], bytes] = lambda request: request,
        lives: Callable[[], bool] = lambda: True,
    ) -> None:
        self.expected = expected
        self._sign = sign
        self._allowed = None if allowed is None else dict(allowed)
        self._address, self._lives = address, lives
        self._nodes: list[str] = []
        self._connect()

    def _connect(self) -> None:
        """Begin a run on the SuperLink, and take its task."""
        address, retry = self._address, patient(self._lives)
        self._ended, self._sent = False, set[str]()
        content, fab_hash = bundle()
        self._control = address.client(ControlHttpClient, name="flwr CLI", retry=retry)
        started = self._control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(fab_hash, content, {}))))
        if not started.HasField("run_id"):
            raise ConfigurationError(f"The SuperLink at {address.place} starts no run.")
        tasks, token = Tasks(address, TaskType.SERVER_APP), None
        while token is None:
            if not self._lives():
                raise LostConnectionError(ENDED)
            time.sleep(POLL)
            with suppress(httpx.TransportError):
                token = tasks.next()
        certificate = None if address.certificate is None else open(address.certificate, "rb").read()  # noqa: SIM115
        self._grid = HttpGrid(address.place, certificate is None, certificate, token=token)
        self._grid._retry_invoker = retry
        self._client = self._grid._runtime_client  # the interface that Flower's own runner uses
        self._heart = HeartbeatSender(heartbeat(self._client, self._end))
        self._heart.start()
        found = self._client.PullTaskInput(PullTaskInputRequest())
        self._context = context_from_proto(found.context)
        self._grid.set_run(run_from_proto(found.run))
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            found.task_id,
            found.run.run_id,
            self._context.node_id,
        )

    def _end(self) -> None:
        self._ended = True

    def _ask(self, what: Callable[[], R], otherwise: R) -> R:
        """Return what the SuperLink answers. If it has given the run up meanwhile, begin another.

        Args:
            what: Asks it.
            otherwise: The answer where none came.

        Raises:
            LostConnectionError: If the SuperLink has ended or refuses.
        """
        try:
            if not self._ended:
                return what()
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (401, 403):
                raise LostConnectionError(f"The SuperLink refuses what it is asked: {error}".splitlines()[0]) from error
        except httpx.TransportError as error:
            if not self._lives():
                raise LostConnectionError(ENDED) from None
            raise LostConnectionError(f"The SuperLink does not answer ({error}). Go on with --resume last.") from error
        warn(
            "The SuperLink has not heard of this process for a minute or longer (asleep, or the machine is too busy) and has "
            "given the connection up. Another is begun, and sites are asked again for what was on the way."
        )
        self._close(says=False)
        self._connect()
        return otherwise

    def nodes(self) -> list[str]:
        if not self._lives():
            raise LostConnectionError(ENDED)
        found = self._ask(lambda: [int(node) for node in self._grid.get_node_ids()], None)
        if found is not None:
            self._nodes = [str(node) for node in found if self._allowed is None or node in self._allowed]
        return self._nodes

    def missing(self) -> list[str]:
        connected = self.nodes()
        return [name for node, name in (self._allowed or {}).items() if str(node) not in connected]

    def owner(self, node: str) -> str | None:
        return None if self._allowed is None else self._allowed.get(int(node))

    def send(self, node: str, request: bytes) -> str:
        content = records_of(self._sign(request))

        def push() -> str | None:
            message = Message(content, dst_node_id=int(node), message_type=MESSAGE_TYPE, ttl=FOREVER)
            (number,) = self._grid.push_messages([message]) or [None]
            return number

        try:
            number = self._ask(push, None)
        except ObjectPushError:  # it was too slow
            number = None
        if number is None:  # it is lost, and whoever waits for the reply is told so
            time.sleep(POLL)
            return f"lost {uuid.uuid4().hex}"
        self._sent.add(str(number))
        return str(number)

    def receive(self, waiting: Collection[str], timeout: float) -> list[tuple[str, bytes]]:
        ends = time.monotonic() + timeout
        while True:
            lost = [name for name in waiting if name not in self._sent]
            if lost:
                return [(name, write({"lost": ""})) for name in lost]
            pulled: list[Message] = []
            if waiting:
                pulled = self._ask(lambda: list(self._grid.pull_messages(list(waiting))), pulled)
            found = [self._read(message) for message in pulled]
            if found or time.monotonic() > ends:
                return found
            time.sleep(POLL)

    def _read(self, message: Message) -> tuple[str, bytes]:
        try:
            content = content_of(message)
        except ValueError:
            lost = message.has_error()  # its SuperNode or its process was gone: it has not been told
            content = write({"lost": ""} if lost else {"refused": "its reply says nothing"})
        return str(message.metadata.reply_to_message_id), content

    def close(self) -> None:
        """End the run."""
        self._close(says=True)

    def _close(self, says: bool) -> None:
        self._grid._retry_invoker.max_tries = 1  # as Flower's own runner does: the SuperLink may be gone
        if says:
            push_task_output(self._client, self._context, COMPLETED, "")
        if self._heart.is_running:
            self._heart.stop()
        self._grid.close()
        self._control.close()


def stop_runs(address: Address) -> None:
    """Stop what runs on a SuperLink: a server that was killed has left its run there."""
    control = address.client(ControlHttpClient, name="flwr CLI", retry=patient())
    try:
        for run_id, run in control.ListRuns(ListRunsRequest()).run_dict.items():
            if run.status.status != "finished":
                control.StopRun(StopRunRequest(run_id=run_id))
    finally:
        control.close()


def register(address: Address, keys: Sequence[Path]) -> dict[int, str]:
    """Let sites with these public keys connect; return the names of the sites, which those of the files are, by node."""
    control = address.client(ControlHttpClient, name="flwr CLI", retry=patient())
    try:
        known = {node.public_key: node.node_id for node in control.ListNodes(ListNodesRequest()).nodes_info}
        found: dict[int, str] = {}
        for path in keys:
            key = load_ssh_public_key(path.read_bytes())
            content = public_key_to_bytes(cast(EllipticCurvePublicKey, key))
            made = known.get(content) or control.RegisterNode(RegisterNodeRequest(public_key=content)).node_id
            found[int(made)] = path.stem
        return found
    finally:
        control.close()


def serve_site(address: Address, answer: Answer, lives: Callable[[], bool]) -> None:
    """Answer what comes to a SuperNode, one request after another, as long as it runs.

    Args:
        address: The address of the SuperNode's own interface.
        answer: The site.
        lives: Whether the SuperNode runs.
    """
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
        """Let a client that pulls parts of a message give up when the next task is there.

        Args:
            client: Its `PullObject` is asked again by Flower as long as a part is not there.
        """
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

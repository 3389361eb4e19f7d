"""The server's end of Flower: a run on a SuperLink, its messages, and the keys of the nodes (flwr 1.41)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import push_task_output

from fedlightning.errors import ConfigurationError, warn
from fedlightning.sites.flower.bundle import bundle
from fedlightning.sites.flower.connection import (
    COMPLETED,
    POLL,
    Address,
    Tasks,
    content_of,
    heartbeat,
    patient,
    records_of,
)
from fedlightning.sites.flower.gateway import public_keys
from fedlightning.sites.link import LostConnectionError
from fedlightning.wire import write

MESSAGE_TYPE = "train"
FOREVER = 10 * 365 * 24 * 3600.0
ENDED = "The SuperLink has ended; its log says why. Go on with --resume auto."
R = TypeVar("R")


class FlowerLink:
    """The server's connection to its sites: one run on a SuperLink.

    Args:
        address: The SuperLink's address.
        expected: Number of sites without which no run begins.
        allowed: Names of the sites that may take part, by the ids of their nodes; `None`: all that are connected.
        sign: Signs a request to the site of a name.
        lives: Whether the SuperLink runs.

    Attributes:
        expected: The same.
    """

    def __init__(
        self,
        address: Address,
        expected: int,
        allowed: Mapping[int, str] | None = None,
        sign: Callable[[str, bytes], bytes] = lambda to, request: request,
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
        self._ended, self._open_messages = False, set[str]()
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
        guard = RuntimeTokenHttpInterceptor(token)  # its own client knows nothing of the gate
        self._grid._client = address.client(RuntimeHttpClient, guard, name="flwr-serverapp", retry=retry)
        self._client = self._grid._runtime_client  # the interface that Flower's own runner uses
        self._heart = HeartbeatSender(heartbeat(self._client, self._end))
        self._heart.start()
        task_input = self._client.PullTaskInput(PullTaskInputRequest())
        self._context = context_from_proto(task_input.context)
        self._grid.set_run(run_from_proto(task_input.run))
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            task_input.task_id,
            task_input.run.run_id,
            self._context.node_id,
        )

    def _end(self) -> None:
        self._ended = True

    def _ask(self, what: Callable[[], R], otherwise: R) -> R:
        """Return what the SuperLink answers. If it has given the run up meanwhile, begin another."""
        try:
            if not self._ended:
                return what()
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (401, 403):
                raise LostConnectionError(f"The SuperLink refuses what it is asked: {error}".splitlines()[0]) from error
        except httpx.TransportError as error:
            if not self._lives():
                raise LostConnectionError(ENDED) from None
            raise LostConnectionError(f"The SuperLink does not answer ({error}). Go on with --resume auto.") from error
        warn(f"{self._cause()} Another is begun, and sites are asked again for what was on the way.")
        self._close(says=False)
        self._connect()
        return otherwise

    def _cause(self) -> str:
        """Return why the SuperLink knows this process no more."""
        status = None
        with suppress(httpx.HTTPError):
            status = self._control.ListRuns(ListRunsRequest(run_id=self._grid.run.run_id)).run_dict.get(
                self._grid.run.run_id
            )
        if status is not None and status.status.sub_status == SubStatus.STOPPED:
            return (
                "The run of Flower was stopped, and not by this process: another one can read the file 'secret' in the "
                "server's folder, which is for this user only."
            )
        return (
            "The SuperLink has not heard of this process for a minute or longer (asleep, or the machine is too busy) and has "
            "given the connection up."
        )

    def nodes(self) -> list[str]:
        if not self._lives():
            raise LostConnectionError(ENDED)
        node_ids = self._ask(lambda: [int(node) for node in self._grid.get_node_ids()], None)
        if node_ids is not None:
            self._nodes = [str(node) for node in node_ids if self._allowed is None or node in self._allowed]
        return self._nodes

    def missing(self) -> list[str]:
        connected = self.nodes()
        return [name for node, name in (self._allowed or {}).items() if str(node) not in connected]

    def owner(self, node: str) -> str | None:
        return None if self._allowed is None else self._allowed.get(int(node))

    def send(self, node: str, request: bytes) -> str:
        content = records_of(self._sign(self.owner(node) or "", request))

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
        self._open_messages.add(str(number))
        return str(number)

    def receive(self, waiting: Collection[str], timeout: float) -> list[tuple[str, bytes]]:
        ends = time.monotonic() + timeout
        while True:
            lost = [name for name in waiting if name not in self._open_messages]
            if lost:
                return [(name, write({"lost": ""})) for name in lost]
            pulled: list[Message] = []
            if waiting:  # and what is waited for no more: it would lie in the SuperLink's memory until the run ends
                pulled = self._ask(lambda: list(self._grid.pull_messages(list(self._open_messages))), pulled)
            read = [self._read(message) for message in pulled]
            self._open_messages.difference_update(name for name, _ in read)
            replies = [(name, content) for name, content in read if name in waiting]
            if replies or time.monotonic() > ends:
                return replies
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


def register(address: Address, folder: Path) -> dict[int, str]:
    """Let sites connect; return their names by node."""
    control = address.client(ControlHttpClient, name="flwr CLI", retry=patient())
    try:
        return {
            int(control.RegisterNode(RegisterNodeRequest(public_key=key)).node_id): name
            for name, key in public_keys(folder).items()
        }
    finally:
        control.close()

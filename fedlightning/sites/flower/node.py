"""A site's end of Flower: the messages that come to its SuperNode are answered here (flwr 1.41)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedlightning.sites.flower.bundle import bundle
from fedlightning.sites.flower.connection import COMPLETED, POLL, Address, Tasks, content_of, heartbeat, records_of
from fedlightning.sites.link import Answer
from fedlightning.wire import write


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

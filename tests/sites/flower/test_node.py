"""What is made of Flower's answers, without its programs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower")

from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

from fedlightning.sites.flower.node import Following


def test_a_message_that_never_comes_is_given_up_when_the_next_task_is_there():
    """A part that is on the way is waited for; with another task there, it is not on the way any more."""
    answers = [PullObjectResponse(object_found=True, object_available=False)] * 3
    client = SimpleNamespace(PullObject=lambda request: answers.pop())
    tasks = iter([None, None, "next"])
    following = Following(SimpleNamespace(next=lambda: next(tasks)))
    following.watch(client)
    for _ in range(2):
        assert not client.PullObject(PullObjectRequest()).object_available and following.token is None
    with pytest.raises(RuntimeError, match="its run has ended"):
        client.PullObject(PullObjectRequest())
    assert following.token == "next"


def test_a_message_that_is_there_asks_for_no_other_task():
    answer = PullObjectResponse(object_found=True, object_available=True, object_content=b"x")
    client = SimpleNamespace(PullObject=lambda request: answer)
    following = Following(SimpleNamespace(next=lambda: pytest.fail("a task is taken and lost")))
    following.watch(client)
    assert client.PullObject(PullObjectRequest()) is answer and following.token is None

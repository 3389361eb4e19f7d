"""Which tasks are drawn ahead, which share a message, and how long they are waited for."""

from __future__ import annotations

from itertools import count

import pytest

from fedlightning.client.requests import Evaluate
from fedlightning.contract.messages import Message
from fedlightning.engines.attempts import Retries
from fedlightning.engines.contract import Visit
from fedlightning.guards.step_trials import StepTrial
from fedlightning.sites import task_window as windows
from fedlightning.sites.task_window import AHEAD, BUDGET, MAX_TASKS_AHEAD, Entry, Window

NAMES = count()
WHERE = {"a": "x", "b": "x", "c": "x", "d": "y"}


def entry(client, size=0, step=False):
    task = StepTrial(client, "val") if step else Visit(Message(0, client, {}, ()), Evaluate(()))
    object.__setattr__(task, "_size", size)
    return Entry(task, client, Retries().of(task))


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    monkeypatch.setattr(Visit, "num_bytes", property(lambda task: task._size))


def filled(*entries):
    made = Window()
    for one in entries:
        made.add(one)
    return made


def send(window, now=0.0, ready=("x", "y")):
    """Send all that is due; return the clients of each message by its name."""
    sent = {}
    for batch in window.due(WHERE, ready, now):
        name = str(next(NAMES))
        window.sent(name, batch)
        sent[name] = [one.client for one in batch.entries]
    return sent


def finish(window, name):
    for one in window.came(name):
        one.done, one.answer = True, one.client


def test_drawing_goes_on_until_every_site_has_its_share_but_not_beyond_memory():
    many = filled(*(entry("a") for _ in range(MAX_TASKS_AHEAD * 2 - 1)))
    assert many.has_room(2)
    many.add(entry("a"))
    assert not many.has_room(2)
    large = filled(*(entry("a", windows.DRAWN_BYTES) for _ in range(AHEAD * 2 - 1)))
    assert large.has_room(2)  # as ever, however large
    large.add(entry("a", 1))
    assert not large.has_room(2)


@pytest.mark.parametrize("how", ["taken", "forgotten"])
def test_room_comes_back_with_answers(how):
    window = filled(*(entry("a", windows.DRAWN_BYTES) for _ in range(AHEAD)))
    assert not window.has_room(1)
    for one in window:
        one.done = True
    assert len(list(window.take())) == AHEAD if how == "taken" else not window.clear()
    for _ in range(AHEAD):
        window.add(entry("a", 1))
    assert window.has_room(1)  # the bytes of those before are not counted


def test_tasks_of_a_site_share_a_message_and_those_of_a_client_follow_one_another():
    window = filled(entry("a"), entry("b"), entry("a"), entry("d"))
    sent = send(window)
    assert list(sent.values()) == [["a", "b"], ["d"]] and not send(window)
    finish(window, next(iter(sent)))
    assert list(send(window).values()) == [["a"]]


def test_tries_of_a_client_share_a_message():
    assert list(send(filled(entry("a", step=True), entry("a", step=True))).values()) == [["a", "a"]]


def test_large_tasks_travel_alone(monkeypatch):
    monkeypatch.setattr(windows, "BATCH_BYTES", 10)
    window = filled(entry("a", 6), entry("b", 4), entry("c", 1), entry("d", 99))
    assert list(send(window).values()) == [["a", "b"], ["c"], ["d"]]


def test_only_a_site_that_is_ready_is_sent_something():
    window = filled(entry("a"), entry("d"))
    assert list(send(window, ready=["y"]).values()) == [["d"]]
    assert list(send(window).values()) == [["a"]]


def test_tasks_share_a_message_as_far_as_the_budget_goes():
    window = filled(entry("a"), entry("b"), entry("c"))
    for one in window:
        window.took("x", one, BUDGET / 2)
    assert list(send(window).values()) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("seconds", ["long", -1.0, float("nan"), float("inf"), None])
def test_nonsense_about_time_is_nothing(seconds):
    window = filled(entry("a"), entry("b"))
    window.took("x", next(iter(window)), seconds)
    assert list(send(window).values()) == [["a", "b"]]


def test_what_was_refused_together_is_sent_alone():
    window = filled(entry("a"), entry("b"), entry("c"))
    (name,) = send(window)
    first, *_ = window.came(name)
    first.alone = True
    assert list(send(window).values()) == [["a"], ["b", "c"]]


def test_a_reply_counts_for_those_only_that_wait_for_it():
    window = filled(entry("a"), entry("b"))
    (name,) = send(window)
    first, second = window
    assert window.unsend(first) == [] and window.came(name) == [None, second]
    assert window.came(name) is None
    (again,) = send(window)
    assert window.unsend(first) == [] and window.unsend(second) == [again]  # nobody waits for it now


def test_what_was_sent_to_a_node_that_is_gone():
    window = filled(entry("a"), entry("d"))
    send(window)
    assert [one.client for one in window.astray(["y"])] == ["a"]


def test_time_begins_with_the_last_answer_and_a_shared_message_has_the_budget_besides():
    window = filled(entry("a"), entry("b"), entry("d"))
    send(window, now=0.0)
    assert [one.client for one in window.late(WHERE, 10.5, 10)] == ["d"]
    window.answered("x", WHERE, 8.0)
    assert [one.client for one in window.late(WHERE, 10.5 + BUDGET, 10)] == ["d"]
    assert [one.client for one in window.late(WHERE, 18.5 + BUDGET, 10)] == ["a", "b", "d"]


def test_a_site_that_was_late_is_sent_tasks_one_by_one_until_it_is_quick():
    window = filled(entry("a"), entry("b"))
    send(window)
    for one in window.late(WHERE, 100.0, 10):
        window.unsend(one)
    assert list(send(window).values()) == [["a"], ["b"]]
    for one in window:
        window.unsend(one)
        window.took("x", one, 0.1)
    assert list(send(window).values()) == [["a", "b"]]

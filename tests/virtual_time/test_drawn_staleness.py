"""Staleness that is drawn: uniform, one job for each client, resumed to the bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fedlightning.callbacks import FedAsync, Stragglers
from fedlightning.virtual_time import DrawnStaleness
from tests.helpers import Toy, federate, global_state, make_trainer, same, toy_data
from tests.virtual_time.test_asynchronous import StopBefore, Watch

SIZES = (8,) * 7


def test_staleness_is_uniform_and_clients_take_turns():
    watch = Watch()
    federate(
        Toy(), toy_data(SIZES), [watch, FedAsync()], loop=DrawnStaleness(4), max_rounds=150, local_steps=1, save_state=0
    )
    clients, times, late, rounds = zip(*watch.seen, strict=True)
    assert rounds == tuple(range(150)) and times == tuple(range(1, 151))
    counts = Counter(late[4:])
    assert set(counts) == {0, 1, 2, 3, 4} and min(counts.values()) >= 15  # of 29 on average
    assert all(len(set(clients[n : n + 5])) == 5 for n in range(146))
    assert set(Counter(clients)) == set("0123456")


def test_no_staleness_is_one_after_another():
    watch = Watch()
    federate(Toy(), toy_data(), [watch, FedAsync()], loop=DrawnStaleness(0), max_rounds=6)
    assert [late for _, _, late, _ in watch.seen] == [0] * 6


def test_resume_in_flight(tmp_path: Path):
    module, given = Toy("momentum"), {"loop": DrawnStaleness(2), "max_rounds": 6, "version": "run"}
    whole = federate(module, toy_data(), [FedAsync()], tmp_path / "a", **given)
    with pytest.raises(KeyboardInterrupt):
        federate(module, toy_data(), [FedAsync(), StopBefore(3)], tmp_path / "b", **given)
    resumed = make_trainer(tmp_path / "b", [FedAsync()], **given)
    resumed.fit(module, datamodule=toy_data(), resume="last")
    same(global_state(whole), global_state(resumed))


@pytest.mark.parametrize(
    ("loop", "callbacks", "said"),
    [
        (DrawnStaleness(3), [FedAsync()], "3 clients with at most one job at a time"),
        (DrawnStaleness(2), [FedAsync(), Stragglers()], "Stragglers"),
    ],
)
def test_refused(loop, callbacks, said):
    with pytest.raises(ValueError, match=said):
        federate(Toy(), toy_data(), callbacks, loop=loop, local_epochs=2)

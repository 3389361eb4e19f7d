"""What a run has cost, round by round: over an interruption, and where a longer run takes its last visits back."""

from __future__ import annotations

from types import SimpleNamespace

from fedlightning.federation.costs import Costs


def server(round, up, down, steps, time=0.0):
    return SimpleNamespace(round=round, bytes_up=up, bytes_down=down, steps=steps, time=time, spent={"a": 9})


def counted(*servers, costs=None, has_clock=False):
    costs = costs or Costs()
    for one in servers:
        costs.tick()
        costs.count(one, has_clock)
    return costs


def test_a_round_costs_what_has_come_since_the_last_one():
    costs = counted(server(0, 10, 20, 3, time=1.5), server(1, 15, 40, 6, time=4.0), has_clock=True)
    without = [{key: value for key, value in entry.items() if key != "seconds"} for entry in costs.history]
    assert without == [
        {"round": 1, "bytes_up": 10, "bytes_down": 20, "steps": 3, "time": 1.5},
        {"round": 2, "bytes_up": 5, "bytes_down": 20, "steps": 3, "time": 4.0},
    ]
    assert abs(sum(entry["seconds"] for entry in costs.history) - costs.seconds) < 1e-9
    assert "time" not in counted(server(0, 1, 1, 1)).history[0]


def test_a_resumed_run_goes_on_counting():
    first = counted(server(0, 10, 20, 3))
    again = Costs()
    again.load(first.state())
    counted(server(1, 15, 40, 6), costs=again)
    assert [entry["bytes_up"] for entry in again.history] == [10, 5]
    assert [entry["steps"] for entry in again.history] == [3, 3]


def test_a_longer_run_does_not_make_the_last_visits():
    costs = counted(server(0, 10, 20, 3), server(1, 15, 40, 6))
    costs.spent_of_rounds = {"a": 4}
    seconds, found = costs.history[0]["seconds"], server(1, 15, 40, 6)
    costs.forget_final_visits(found, rounds_done=1)
    assert (found.bytes_up, found.bytes_down, found.steps, found.spent) == (10, 20, 3, {"a": 4})
    assert [entry["round"] for entry in costs.history] == [1]
    assert abs(costs.seconds - seconds) < 1e-9

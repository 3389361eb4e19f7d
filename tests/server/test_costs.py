"""What a run has cost, round by round: over an interruption, and where a longer run takes its last visits back."""

from __future__ import annotations

from fedlightning.contract.messages import Update
from fedlightning.server.costs import Costs


def counted(*rounds, costs=None, has_clock=False):
    """Return the costs after rounds, each told by its number and by the whole of bytes up, down, steps and virtual time."""
    costs = costs or Costs()
    for round, up, down, steps, *time in rounds:
        costs.tick()
        costs.bytes_up, costs.bytes_down, costs.steps, costs.virtual_time = up, down, steps, *(time or [0.0])
        costs.end_round(round, has_clock)
    return costs


def test_a_round_costs_what_has_come_since_the_last_one():
    costs = counted((0, 10, 20, 3, 1.5), (1, 15, 40, 6, 4.0), has_clock=True)
    without = [{key: value for key, value in entry.items() if key != "seconds"} for entry in costs.history]
    assert without == [
        {"round": 1, "bytes_up": 10, "bytes_down": 20, "steps": 3, "time": 1.5},
        {"round": 2, "bytes_up": 5, "bytes_down": 20, "steps": 3, "time": 4.0},
    ]
    assert abs(sum(entry["seconds"] for entry in costs.history) - costs.seconds) < 1e-9
    assert "time" not in counted((0, 1, 1, 1)).history[0]


def test_a_resumed_run_goes_on_counting():
    first = counted((0, 10, 20, 3))
    again = Costs()
    again.load(first.state())
    counted((1, 15, 40, 6), costs=again)
    assert [entry["bytes_up"] for entry in again.history] == [10, 5]
    assert [entry["steps"] for entry in again.history] == [3, 3]


def test_a_longer_run_does_not_make_the_last_visits():
    costs = counted((0, 10, 20, 3), (1, 15, 40, 6))
    costs.extra_work, costs.extra_work_of_rounds = {"own_steps": 9}, {"own_steps": 4}
    seconds = costs.history[0]["seconds"]
    costs.forget_final_visits(rounds_done=1)
    assert (costs.bytes_up, costs.bytes_down, costs.steps, costs.extra_work) == (10, 20, 3, {"own_steps": 4})
    assert [entry["round"] for entry in costs.history] == [1]
    assert abs(costs.seconds - seconds) < 1e-9


def test_work_beside_federated_steps_is_kept_apart():
    costs, update = Costs(), Update(0, "a", own_steps=3, selections=1)
    costs.add_work(update)
    costs.add_work(update, after_last_round=True)
    assert costs.extra_work == {"own_steps": 3, "selections": 2, "fine_tuning_steps": 3}
    again = Costs()
    again.load(costs.state() | {"spent": {**costs.extra_work, "another": 1}})
    assert again.extra_work == costs.extra_work and again.steps == 0

"""Loops as objects: given by the user, saved with a run, part of its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fedlightning import FederatedTrainer
from fedlightning.algorithm import FederatedCallback, State
from fedlightning.client.requests import Evaluate
from fedlightning.contract.messages import Update
from fedlightning.engines.contract import Engine
from fedlightning.errors import ConfigurationError
from fedlightning.server.loop import Loop, run_round
from fedlightning.server.server import Server
from fedlightning.virtual_time import VirtualClock
from tests.helpers import Toy, federate, toy_data


class Counting(Loop):
    """Counts its rounds, and gives each ten virtual seconds."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.clock = VirtualClock()
        self.count = begin

    def check(self, server: Server) -> None:
        if server.callbacks.role("reduce") is not None:
            raise ValueError("Counting takes no reducer.")

    def round(
        self, server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
    ) -> list[Update]:
        self.count += 1
        server.costs.virtual_time += 10.0
        return run_round(server, engine, evaluate, report)

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_a_loop_is_copied_for_each_run_and_its_state_goes_on(tmp_path):
    loop = Counting(5)
    trainer = federate(Toy(), toy_data(), [], tmp_path, max_rounds=2, loop=loop)
    assert (loop.count, trainer.federation.loop.count, trainer.server.costs.virtual_time) == (5, 7, 20.0)
    assert [entry["time"] for entry in trainer.federation.history] == [10.0, 20.0]
    again = FederatedTrainer(**{**trainer.arguments, "max_rounds": 3})
    again.fit(Toy(), toy_data(), resume=trainer.recorder.run.path)
    assert (again.federation.loop.count, again.server.costs.virtual_time) == (8, 30.0)
    other = FederatedTrainer(**{**trainer.arguments, "max_rounds": 4, "loop": "synchronous"})
    with pytest.raises(ValueError, match="of another loop than Synchronous"):
        other.fit(Toy(), toy_data(), resume=trainer.recorder.run.path)
    changed = FederatedTrainer(**{**trainer.arguments, "max_rounds": 4, "loop": Counting(6)})
    with pytest.raises(ValueError, match=r"Counting\.begin"):
        changed.fit(Toy(), toy_data(), resume=trainer.recorder.run.path)


def test_a_loop_refuses_before_round_1():
    class First(FederatedCallback):
        def reduce(self, server: Server, updates: list[Update]) -> State:
            return updates[0].state

    with pytest.raises(ValueError, match="takes no reducer"):
        federate(Toy(), toy_data(), [First()], max_rounds=1, loop=Counting())


def test_what_is_no_loop_is_refused():
    with pytest.raises(ConfigurationError, match=r"loop='fast'. Use a Loop, .* It says when clients are visited"):
        FederatedTrainer(loop="fast")
    assert repr(Counting(3)) == "Counting(begin=3)"

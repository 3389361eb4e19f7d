"""Who steps together, and for how long, changes nothing but rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.callbacks import SCAFFOLD, FedAvg
from fedlightning.stacked import stacked_fit, vectorized_engine
from fedlightning.stacked.stacked_fit import StackedFit
from tests.helpers import NormNet, Toy, toy_data
from tests.stacked.test_vectorized_engine import Loud, assert_equal, pair

SIZES = (40, 24, 24, 19, 8, 5)


class Watched(StackedFit):
    """Notes which clients took each step."""

    steps: list[list[int]] = []

    def _take_step(self, numbers: list[int], *args: Any) -> None:
        self.steps.append(list(numbers))
        super()._take_step(numbers, *args)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    monkeypatch.setattr(vectorized_engine, "StackedFit", Watched)
    monkeypatch.setattr(Watched, "steps", [])
    return Watched.steps


def room_for(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cache have room for so many."""
    plain = Watched.__init__

    def small(self: Watched, runner: Any, phase: Any, found: Any, *others: Any) -> None:
        plain(self, runner, phase, replace(found, bytes_of_step=stacked_fit.CACHE // clients), *others)

    monkeypatch.setattr(Watched, "__init__", small)


@pytest.mark.parametrize("clients", [1, 2, 4])
@pytest.mark.fast_cases(1)
def test_no_more_step_together_than_the_cache_has_room_for(
    clients: int, steps: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(clients, monkeypatch)
    assert_equal(pair(NormNet(dropout=0.2), [SCAFFOLD()], data=lambda: toy_data(SIZES)))
    assert max(map(len, steps)) == min(clients, 3), "six clients in two parts are three and three"
    assert steps


def test_what_is_logged_follows_the_parts(steps: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(2, monkeypatch)
    assert_equal(pair(Loud(), data=lambda: toy_data(SIZES)))
    assert max(map(len, steps)) == 2


def test_a_client_that_fails_in_the_middle_of_alike_turns_leaves_alone(steps: list[list[int]]) -> None:
    def data() -> Any:
        made = toy_data((24, 24, 24))
        made.tensors["1"]["train"][1][:] = 77  # no such class, in any batch
        return made

    with pytest.warns(UserWarning, match="client '1' failed"):
        runs = pair(Toy(), [FedAvg()], data=data, max_rounds=1)
    (_, seen), (_, stacked) = runs
    assert [update.client for update in stacked.updates] == [update.client for update in seen.updates] == ["0", "2"]
    assert [update.steps for update in stacked.updates] == [6, 6]
    for one, other in zip(seen.updates, stacked.updates, strict=True):
        for name, value in one.state.items():
            torch.testing.assert_close(other.state[name], value, rtol=0, atol=1e-6)
    assert steps[0] == [0, 1, 2] and [0, 2] in steps

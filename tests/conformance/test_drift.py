"""Every method on training data that change from round to round: each round sees its own, or the method is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from fedlightning.contract import Facts, FederatedCallback
from fedlightning.datamodules import DriftingDataModule, ShiftedDataModule
from fedlightning.tensors import module_state
from fedlightning.testing.runs import deployed
from fedlightning.testing.toys import ToyData, federate
from tests import helpers
from tests.conformance.case import Case, collect

CASES: dict[str, Case] = collect("CASES")
TOLD = ("training data change from round to round", "public data")
"""Words of the refusals: of samples that change, and of methods that need what drifting data do not have."""


class Began(FederatedCallback):
    """Tells whether a first round began."""

    facts = Facts(takes_part=False)

    def __init__(self, rounds):
        self.rounds = rounds

    def on_round_start(self, server):
        self.rounds.append(server.round)


def toys(batch_size, later):
    """Return toy clients; `later` changes the training samples of each, told which of them are in the first half."""
    toys = ToyData()
    held = {client: {split: toys.data[client, split].tensors for split in ("train", "val")} for client in toys.names}
    for splits in held.values():
        x, y = splits["train"]
        first = torch.arange(len(x)) < (len(x) + 1) // 2
        splits["train"] = later(x, y, first)
        splits["test"] = splits["val"]
    return helpers.ToyData(held, batch_size=batch_size)


def by_window(batch_size):
    """Return two windows, of which only the first is trained on; every sample of the second is NaN."""
    source = toys(batch_size, lambda x, y, first: (torch.where(first[:, None], x, torch.nan), y))
    return DriftingDataModule(source, windows=2, every=5, scored="all")


class Spoilt(ShiftedDataModule):
    """Training samples are NaN wherever the shift has its full strength."""

    def shifted(self, x, y, place, rows, split, share=1.0):
        x, y = super().shifted(x, y, place, rows, split, share)
        return (torch.full_like(x, torch.nan) if split == "train" and share == 1.0 else x), y


def by_shift(batch_size):
    """Return clients whose shift has grown to a fifth when the run ends."""
    source = toys(batch_size, lambda x, y, first: (x[first], y[first]))
    return Spoilt(source, features="noise", strength=0.1, grows_over=5)


@pytest.mark.fast_cases(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [by_window, by_shift], ids=["window", "shift"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_no_sample_is_seen_as_in_a_later_round(name, data):
    case, rounds = CASES[name], []
    arguments = {"max_rounds": 2, "local_steps": 2, **case.arguments}
    batch_size = arguments.pop("batch_size", 6)  # no window leaves one sample alone, for batch normalisation
    try:
        trainer = federate(copy.deepcopy(case.algorithm), data(batch_size), None, others=[Began(rounds)], **arguments)
    except ValueError as error:
        assert not rounds, f"{name} fails in a round: {error}"
        assert any(words in str(error) for words in TOLD), error
        return
    assert not trainer.server.failures
    states = [*trainer.server.models.values(), *(module_state(module) for _, module in deployed(trainer))]
    for state in states:
        for entry, value in state.items():
            assert torch.isfinite(value).all(), f"{name}: {entry}"

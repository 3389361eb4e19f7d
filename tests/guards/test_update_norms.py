"""An update far beyond the usual is a failed client: who it was, how large, and the run goes on."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from fedlightning import FederatedCallback
from fedlightning.algorithm import ClientSelection, Extra, Facts, Wire
from fedlightning.callbacks import SCAFFOLD, FedAsync, FedAvg
from fedlightning.engines.attempts import FederationError
from fedlightning.errors import ConfigurationError
from fedlightning.guards.update_checks import FACTOR, WINDOW, ZERO_LENGTH, Norms, UpdateChecks, norm_of_sent
from fedlightning.options import FailurePolicy
from fedlightning.virtual_time import Asynchronous, SampleSpeed, VirtualClock
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, federate, make_trainer, part_of, same, toy_data

NAME = "net.0.weight"


def toy():
    torch.manual_seed(0)
    return Toy()


class Liar(FederatedCallback):
    """Client 0 multiplies what it sends, or sends other numbers, from a round on."""

    facts = Facts(asynchronous=True)

    def __init__(self, begin: int = 0, factor: float = 1.0, number: float | None = None, entry: str = NAME) -> None:
        self.begin, self.factor, self.number, self.entry = begin, factor, number, entry

    def on_send(self, client, update):
        if client.id == "0" and client.round >= self.begin and self.entry in update.state:
            start, value = client.received[self.entry], update.state[self.entry]
            lie = start + self.factor * (value - start) if self.number is None else torch.full_like(value, self.number)
            update.state = {**update.state, self.entry: lie}


def failed(trainer):
    return [(one["round"], one["client"]) for one in trainer.server.failures]


@pytest.mark.filterwarnings("ignore:Round")
@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_finite_lie_fails_under_its_own_name_and_the_run_goes_on(engine, begin):
    trainer = federate(toy(), toy_data(), [Liar(begin, number=1e30)], max_rounds=4, engine=engine)
    assert failed(trainer) == [(round + 1, "0") for round in range(begin, 4)]
    reason = trainer.server.failures[0]["reason"]
    assert reason.startswith("the update of client '0' was refused: its change of the parameters has the norm ")
    assert "e+30" in reason and "'net.0.weight' most" in reason and "update_limit=1000" in reason
    assert all(bool(torch.isfinite(value).all()) for value in trainer.server.model.values())
    assert "warnings" not in trainer.summary  # told once, as a failure


@pytest.mark.filterwarnings("ignore:Round")
def test_the_round_goes_on_as_without_the_client():
    honest = federate(toy(), toy_data(), [Absent()], max_rounds=3)
    same(federate(toy(), toy_data(), [Liar(number=1e30)], max_rounds=3).server.model, honest.server.model)


class Absent(ClientSelection):
    def participants(self, server):
        return [client for client in server.clients if client != "0"]


def test_usual_is_what_the_last_rounds_were():
    norms = Norms()
    for round in range(WINDOW + 3):
        norms.note("0", round, {"parameters": float(round + 1)})
        norms.end_round()
    assert norms.usual["parameters"] == [float(round + 1) for round in range(3, WINDOW + 3)]


@pytest.mark.filterwarnings("ignore:Round")
@pytest.mark.parametrize("begin", [0, 2])
def test_where_the_line_is(begin):
    """In round 1 at a thousand times the norm of the model; later at that of the usual change."""
    model = federate(toy(), toy_data(), [], max_rounds=1, local_epochs=1)
    reference = norm_of_sent(toy().state_dict().values())
    usual = part_of(model, UpdateChecks).norms.usual["parameters"][0]
    limit = FACTOR * (reference if begin == 0 else usual)
    for share, refused in ((0.5, False), (4.0, True)):
        trainer = federate(toy(), toy_data(), [Liar(begin, factor=share * limit / usual)], max_rounds=begin + 1)
        assert bool(failed(trainer)) == refused, (share, failed(trainer))


@pytest.mark.filterwarnings("ignore:Round")
def test_none_refuses_nothing_and_a_factor_is_taken():
    free = federate(toy(), toy_data(), [Liar(number=1e20)], max_rounds=1, failures=FailurePolicy(update_limit=None))
    assert not failed(free) and float(free.server.model[NAME].max()) > 1e10
    assert failed(
        federate(toy(), toy_data(), [Liar(1, factor=500.0)], max_rounds=2, failures=FailurePolicy(update_limit=2))
    ) == [(2, "0")]
    for wrong in (0, 1, -3.0, True, "x", math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="update_limit="):
            make_trainer(None, [], failures=FailurePolicy(update_limit=wrong))


@pytest.mark.filterwarnings("ignore:Round")
def test_asynchronous_rounds_refuse_too():
    for callbacks in ([Liar(2, number=1e30)], [Liar(2, number=1e30), FedAsync()]):
        loop = Asynchronous(VirtualClock(SampleSpeed(0.01)), concurrency=3)
        trainer = federate(toy(), toy_data(), callbacks, max_rounds=12, loop=loop)
        assert {client for _, client in failed(trainer)} == {"0"}
        assert all(bool((value.abs() < 100).all()) for value in trainer.server.model.values())


@pytest.mark.filterwarnings("ignore:Round")
def test_running_statistics_and_extras_have_a_size_too():
    trainer = federate(NormNet(), toy_data(), [Liar(number=1e30, entry="net.1.running_var")], max_rounds=2)
    assert failed(trainer) == [(1, "0"), (2, "0")] and "change of the buffers" in trainer.server.failures[0]["reason"]

    class Control(SCAFFOLD):
        def on_send(self, client, update):
            super().on_send(client, update)
            if client.id == "0":
                found = update.extras[self.key]["delta_c"]
                update.extras[self.key] = {"delta_c": {name: value + 1e30 for name, value in found.items()}}

    trainer = federate(toy(), toy_data(), [Control()], max_rounds=2, local_steps=2)
    assert failed(trainer) == [(1, "0"), (2, "0")] and "'delta_c' has the norm" in trainer.server.failures[0]["reason"]


@pytest.mark.parametrize("told", [True, False])
def test_what_an_extra_only_tells_may_be_of_any_size(told):
    class Tells(FederatedCallback):
        def wire(self, module):
            return Wire(up={"number": Extra("scalar", low=0.0, told=told, due=("",))})

        def on_send(self, client, update):
            update.extras[self.key] = {"number": torch.tensor(1e9)}

    run = partial(federate, toy(), toy_data(), [Tells()], max_rounds=2)
    if told:
        assert not failed(run())
    else:
        with pytest.raises(FederationError, match="'number' has the norm"):
            run()


class Zeros(Toy):
    def make(self, hidden, dropout):
        net = nn.Linear(FEATURES, CLASSES)
        nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
        return net


def test_a_model_of_zeros_tells_nothing_of_the_size():
    assert not failed(federate(Zeros(lr=1.0), toy_data(), [FedAvg()], max_rounds=3))
    assert norm_of_sent([torch.zeros(9)]) == norm_of_sent([torch.full((9,), ZERO_LENGTH / 2)]) == 3.0
    with pytest.warns(UserWarning, match="client '0' was refused"):
        federate(Zeros(), toy_data(), [Liar(number=1e6, entry="net.weight")], max_rounds=1)


def test_rounds_in_which_next_to_nothing_moves_do_not_make_the_next_one_large():
    norms = Norms()
    for _ in range(3):
        norms.note("a", 0, {"parameters": 1e-9, "other": 0.0})
        norms.end_round()
    assert norms.limit("parameters", "parameters", lambda: 5.0, 4.9) is None  # as large as the model
    assert norms.limit("parameters", "parameters", lambda: 5.0, 5.1) == (5.0, 1e-9)
    assert "other" not in norms.usual


def test_usual_is_robust_and_bounded():
    norms = Norms()
    for round in range(3 * WINDOW):
        for client, norm in (("a", 1.0), ("b", 1.2), ("c", 900.0)):  # a liar below the line
            norms.note(client, round, {"parameters": norm})
        norms.note("a", round, {"parameters": 1.0})  # tried again: counted once
        norms.end_round()
    assert norms.usual == {"parameters": [1.2] * WINDOW}
    norms.note("a", 0, {"parameters": 7.0})
    norms.forget_round()
    norms.end_round()
    assert norms.usual == {"parameters": [1.2] * WINDOW}


@pytest.mark.filterwarnings("ignore:Round")
def test_a_resumed_run_decides_as_an_unbroken_one(tmp_path):
    given = {"name": "run", "save_state": 1}
    whole = make_trainer(tmp_path, [Liar(3, factor=1e5)], max_rounds=5, version="whole", **given)
    whole.fit(toy(), datamodule=toy_data())
    make_trainer(tmp_path, [Liar(3, factor=1e5)], max_rounds=3, version="cut", **given).fit(
        toy(), datamodule=toy_data()
    )
    other = make_trainer(tmp_path, [Liar(3, factor=1e5)], max_rounds=5, version="cut", **given)
    other.fit(toy(), datamodule=toy_data(), resume=tmp_path / "run" / "cut")
    assert failed(whole) == failed(other) == [(4, "0"), (5, "0")]
    assert part_of(whole, UpdateChecks).norms.usual == part_of(other, UpdateChecks).norms.usual
    same(whole.server.model, other.server.model)

"""Updates and losses that grow by orders of magnitude are told of once, with the client and the entry."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import FedAvg, FedIT
from fedlightning.contract import CallbackList
from fedlightning.contract.messages import Update
from fedlightning.engines.attempts import FederationError
from fedlightning.guards.explosions import FACTOR, Explosions
from fedlightning.options import FailurePolicy
from tests.helpers import CLASSES, FEATURES, Toy, make_trainer, part_of, toy_data


class Diverging(Toy):
    """Squares: a large rate makes each step larger than the one before."""

    def make(self, hidden, dropout):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Linear(hidden, CLASSES))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), F.one_hot(batch[1], CLASSES).float())
        self.log("train_loss", loss)
        return loss


class Linear(Diverging):
    def make(self, hidden, dropout):
        torch.manual_seed(0)
        return nn.Linear(FEATURES, CLASSES)


def told(trainer, module, **given):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(FederationError):  # in the end there are NaNs
            trainer.fit(module, datamodule=toy_data(), **given)
    return [str(one.message) for one in caught if "Training diverges" in str(one.message)]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_large_rate_is_told_once_for_every_client(engine):
    trainer = make_trainer(
        None, [FedAvg()], engine=engine, max_rounds=5, failures=FailurePolicy(update_limit=None)
    )  # else they are refused
    sentences = told(trainer, Linear(lr=2.5))
    found = trainer.summary["warnings"]
    assert len(sentences) == len(found) == len({one["client"] for one in found}) > 0
    assert all(one["entry"] in ("net.weight", "net.bias") for one in found)
    assert f"client '{found[0]['client']}'" in sentences[0] and f"'{found[0]['entry']}'" in sentences[0]
    assert f"Round {found[0]['round']}" in sentences[0]


def test_fedit_does_not_diverge_without_a_word():
    trainer = make_trainer(None, [FedIT(r=2)], max_rounds=6, local_steps=3, failures=FailurePolicy(update_limit=None))
    assert told(trainer, Diverging(lr=0.9))
    assert all("lora" in one["entry"] for one in part_of(trainer, Explosions).warnings)


def test_an_ordinary_run_is_told_nothing(tmp_path):
    trainer = make_trainer(tmp_path, [FedAvg()], max_rounds=8, local_epochs=3)
    assert told(trainer, Toy(lr=0.3)) == []
    assert "warnings" not in trainer.summary


def test_a_resumed_run_tells_what_an_unbroken_one_tells(tmp_path):
    whole = make_trainer(
        tmp_path, [FedAvg()], max_rounds=5, name="whole", version="a", failures=FailurePolicy(update_limit=None)
    )
    sentences = told(whole, Linear(lr=2.5))
    for stop in (1, 2):
        options = {"name": f"cut{stop}", "version": "a", "failures": FailurePolicy(update_limit=None)}
        first = make_trainer(tmp_path, [FedAvg()], max_rounds=stop, **options)
        second = make_trainer(tmp_path, [FedAvg()], max_rounds=5, **options)
        parts = told(first, Linear(lr=2.5)) + told(second, Linear(lr=2.5), resume=tmp_path / f"cut{stop}" / "a")
        assert parts == sentences
        assert second.summary["warnings"] == whole.summary["warnings"]
        assert part_of(second, Explosions).usual == part_of(whole, Explosions).usual


def server_of(round):
    """Return what the part reads of a server in a round, from 1."""
    architecture = SimpleNamespace(trainable=["w", "b"])
    return SimpleNamespace(round=round - 1, architecture=lambda model: architecture, callbacks=CallbackList([]))


def feed(explosions, round, values, metric="train_loss"):
    for client, value in values.items():
        state = {"w": torch.full((4,), float(value)), "b": torch.zeros(2)}
        model = {"w": torch.zeros(4), "b": torch.zeros(2)}
        explosions.on_update(server_of(round), Update(round - 1, client, state=state, metrics={metric: 1.0}), model)
    explosions.on_round_trained(SimpleNamespace(server=server_of(round)), [])
    return [one["client"] for one in explosions.warnings]


@pytest.mark.filterwarnings("ignore:Round")
def test_what_counts_as_an_explosion():
    explosions = Explosions()
    assert feed(explosions, 1, {"a": 1.0, "b": 2.0, "c": 1.5}) == []
    assert feed(explosions, 2, {"a": 1e-6, "b": 1e-6}) == []  # it converges
    assert feed(explosions, 3, {"a": 1e-6, "c": 2.0}) == []  # and a client that was away is not large for that
    assert feed(explosions, 4, {"a": 1.5 * FACTOR * 1.1}) == ["a"]
    assert explosions.warnings[0]["entry"] == "w"
    assert feed(explosions, 5, {"a": 1e9, "b": 1e20}) == ["a", "b"]
    assert math.isclose(explosions.warnings[0]["usual"], 3.0)  # of four numbers of 1.5


@pytest.mark.filterwarnings("ignore:Round")
def test_the_first_round_is_compared_with_itself_and_a_warm_up_is_none():
    first = Explosions()
    assert feed(first, 1, {"a": 1.0, "b": 1.0, "c": 1e4}) == ["c"]
    slow = Explosions()
    for round in range(1, 40):  # a rate that grows in small steps
        assert feed(slow, round, {"a": 0.001 * 1.3**round, "b": 0.001 * 1.3**round}) == []
    nan = Explosions()
    nan.on_update(server_of(1), Update(0, "a", metrics={"train_loss": math.nan, "train_acc": math.inf}), {})
    nan.on_round_trained(SimpleNamespace(server=server_of(1)), [])
    assert [(one["client"], one["what"], one["value"]) for one in nan.warnings] == [("a", "train_loss", "nan")]


def test_the_norm_of_a_large_entry_is_estimated_well():
    explosions = Explosions()
    model = {"w": torch.randn(300, 300, generator=torch.Generator().manual_seed(0))}
    update = Update(0, "a", state={"w": (model["w"] * 1.5).half()})
    explosions.on_update(server_of(1), update, model)
    explosions.on_round_trained(SimpleNamespace(server=server_of(1)), [])
    assert explosions.usual["update"][0] == pytest.approx(float(model["w"].norm()) / 2, rel=0.05)

"""A client that trains several of the server's models in one round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlightning.algorithm import GLOBAL, Client, FederatedCallback, Job, Plan, Server, Update, Wire
from fedlightning.server.evaluation import rows_from_updates
from fedlightning.tensors import clone
from tests.helpers import NormNet, Toy, federate, same, toy_data


class TwoModels(FederatedCallback):
    """Everybody trains the global model and a copy of it; the plan keeps what came back."""

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self.seen: list[list[Update]] = []

    def wire(self, module: Any) -> Wire:
        return Wire(up={"draw": (1,)})

    def on_federation_start(self, server: Server) -> None:
        server.models["second"] = clone(server.model)

    def plan_round(self, server: Server) -> Plan:
        jobs = [Job(client, model=model, keep=self.keep) for client in server.clients for model in (GLOBAL, "second")]
        self.seen.append((yield jobs))

    def on_send(self, client: Client, update: Update) -> None:
        update.extras[self.key] = {"draw": torch.rand(1, generator=client.rng("draw"))}


class TrainedTwice(FederatedCallback):
    """Everybody trains the global model twice."""

    def plan_round(self, server: Server) -> Plan:
        yield [Job(client) for client in server.clients for _ in range(2)]


def test_each_visit_of_a_round_has_randomness_of_its_own():
    two = TwoModels()
    federate(Toy(), toy_data(), [two], max_rounds=2)
    draws = [float(update.extras["TwoModels"]["draw"]) for updates in two.seen for update in updates]
    assert len(set(draws)) == len(draws) == 12
    for updates in two.seen[:1]:  # equal starts, other batches
        assert any(not torch.equal(updates[0].state[name], updates[1].state[name]) for name in updates[0].state)


def test_kept_updates_average_to_the_new_models():
    two = TwoModels()
    trainer = federate(Toy(), toy_data(), [two], max_rounds=2)
    for model in (GLOBAL, "second"):
        of_model = [update for update in two.seen[-1] if update.model == model]
        total = sum(update.num_samples for update in of_model)
        for name, value in trainer.server.models[model].items():
            mean = sum(update.state[name].double() * update.num_samples / total for update in of_model)
            torch.testing.assert_close(value.double(), mean, atol=1e-6, rtol=0)


def test_without_keep_the_plan_gets_no_model():
    two = TwoModels(keep=False)
    federate(Toy(), toy_data(), [two], max_rounds=1)
    assert all(not update.state and not update.extras for update in two.seen[0])


@pytest.mark.parametrize("callback", [TwoModels(), TrainedTwice()])
def test_every_model_has_rows_of_its_own(tmp_path, callback):
    trainer = federate(Toy(), toy_data(), [callback], tmp_path, max_rounds=2)
    rows = list(trainer.recorder.rows)
    assert len({row.address for row in rows}) == len(rows)
    other = "second" if isinstance(callback, TwoModels) else "personal 2"
    for client in ("0", "1", "2"):
        of_client = [
            row.model for row in rows if row.client == client and row.stage == "L2" and row.metric == "val_loss"
        ]
        assert of_client.count("personal") == of_client.count(other) == 2
    found = trainer.server.score("val_loss", stage="L2", model=other)
    assert {client: value for client, (value, _) in found.items()} == {
        row.client: row.value
        for row in rows
        if (row.round, row.stage, row.model, row.metric) == (2, "L2", other, "val_loss")
    }


def test_a_client_that_trains_its_own_model_of_the_server_has_a_personal_row():
    scores = [("L2", "local", "val", "val_loss", 0.5, 10)]
    updates = [Update(0, client, origin="second", evaluations=list(scores)) for client in ("0", "1")]
    rows = rows_from_updates(updates, {"0": "second", "1": GLOBAL}.__getitem__)
    assert [(row.client, row.model) for row in rows] == [("0", "personal"), ("1", "second")]


@pytest.mark.parametrize("engine", ["vectorized", pytest.param("processes", marks=pytest.mark.slow)])
def test_engines_agree(engine):
    module = Toy()
    one = federate(module, toy_data(), [TwoModels()], max_rounds=2)
    other = federate(module, toy_data(), [TwoModels()], max_rounds=2, engine=engine)
    for model in (GLOBAL, "second"):
        for name, value in one.server.models[model].items():
            torch.testing.assert_close(value, other.server.models[model][name], atol=1e-6, rtol=1e-5)


def test_one_visit_a_round_is_addressed_by_the_round():
    class Addresses(FederatedCallback):
        def on_visit_start(self, client: Client) -> None:
            assert client.visit == client.round

    module = Toy()
    plain = federate(module, toy_data(), max_rounds=2)
    same(plain.server.model, federate(module, toy_data(), [Addresses()], max_rounds=2).server.model)


def test_losses_of_samples_average_to_the_loss():
    class Look(FederatedCallback):
        found: list[tuple[torch.Tensor, float, torch.Tensor]] = []

        def on_visit_start(self, client: Client) -> None:
            other = {name: value + 1 for name, value in client.model_state().items()}
            self.found.append((client.losses(), client.loss(), client.losses(other)))

    federate(Toy(dropout=0.5), toy_data(batch_size=7), [Look()], max_rounds=1)
    for losses, mean, others in Look.found:
        assert losses.dtype == torch.float64 and losses.shape == others.shape
        assert float(losses.mean()) == pytest.approx(mean, abs=1e-6)
        assert not torch.equal(losses, others)
    assert [len(losses) for losses, _, _ in Look.found] == [24, 40, 16]


def test_losses_leave_no_trace():
    class Look(FederatedCallback):
        def on_visit_start(self, client: Client) -> None:
            client.losses()

    module = NormNet()
    plain = federate(module, toy_data(), max_rounds=2)
    same(plain.server.model, federate(module, toy_data(), [Look()], max_rounds=2).server.model)

"""Scores that are taken over from an equal model are those of the model itself."""

from __future__ import annotations

import math

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.callbacks import IFCA, FedAvg, FedPer, GlobalCheckpoint, HypCluster, LocalCheckpoint
from fedlightning.options import Evaluation
from fedlightning.tensors import load_state
from tests.helpers import CLASSES, Toy, federate, toy_data

DATA = ["local", "pooled", "clients"]
RUNS = {
    "FedAvg": lambda: [FedAvg(), LocalCheckpoint(), GlobalCheckpoint()],
    "FedPer": lambda: [FedPer(personal=["net.3"]), LocalCheckpoint()],
    "IFCA": lambda: [IFCA(num_clusters=2), LocalCheckpoint()],
    "HypCluster": lambda: [HypCluster(num_clusters=2), LocalCheckpoint()],
    "best and worst": lambda: [Worst(), LocalCheckpoint()],
}


class Worst(LocalCheckpoint):
    """Keeps the worst model of a client, under a name of its own."""

    def on_client_evaluated(self, client, stage, split, metrics, module):
        super().on_client_evaluated(client, stage, split, {"val_loss": -metrics.get("val_loss", 0.0)}, module)
        if self.key in client.checkpoints:
            client.checkpoints[self.key]["name"] = "worst"


def loss_of(module, data, client):
    """The loss on a client's test data, or on everybody's, by a plain loop."""
    module.eval()
    whole = [data.tensors[one]["test"] for one in (data.client_ids if client == "pooled" else [client])]
    with torch.no_grad():
        x, y = (torch.cat(parts) for parts in zip(*whole, strict=True))
        return float(torch.nn.functional.cross_entropy(module(x), y))


@pytest.mark.parametrize("engine", [pytest.param("sequential", marks=pytest.mark.slow), "vectorized"])
@pytest.mark.parametrize("name", RUNS)
def test_every_test_score_is_that_of_its_own_model(name, engine):
    torch.manual_seed(0)
    data = toy_data((24, 16, 40, 16))
    trainer = federate(
        Toy("sgd", lr=0.5),
        data,
        RUNS[name](),
        max_rounds=3,
        evaluation=Evaluation(every=1, test_data=DATA),
        engine=engine,
    )
    trainer.test()
    checked = 0
    for row in trainer.rows:
        if row.split != "test" or row.metric != "test_loss" or row.stage != "L1":
            continue
        module = trainer.module(row.client)
        if row.checkpoint != "latest":
            kept = trainer.store.get(row.client).checkpoints.values()
            load_state(module, next(one["model"] for one in kept if one["name"] == row.checkpoint))
        where = row.client if row.data == "local" else row.data.removeprefix("client:")
        assert row.value == pytest.approx(loss_of(module, data, where), abs=1e-5), row
        checked += 1
    kinds = 1 + len([one for one in RUNS[name]() if isinstance(one, LocalCheckpoint)])
    assert checked == kinds * 4 * (1 + 1 + 3)  # own data, everybody's, each other's


class Zeros(FederatedCallback):
    """Deploys at every client a model that knows nothing, in place of the one that travels."""

    def personal_module(self, client, stage):
        module = client.copy_module()
        load_state(module, {name: torch.zeros_like(value) for name, value in module.state_dict().items()})
        return module


def test_a_client_that_deploys_another_model_does_not_take_over_the_scores_of_the_servers():
    trainer = federate(Toy("sgd", lr=0.5), toy_data(), [Zeros()], max_rounds=1, evaluation=1)
    found = {(row.stage, row.client): row.value for row in trainer.rows if row.metric == "val_loss"}
    for client in ("0", "1", "2"):
        assert found["L1", client] == pytest.approx(math.log(CLASSES)) != pytest.approx(found["G", client], abs=1e-3)


class Closed(FederatedCallback):
    """The first client cannot be opened when the run is tested."""

    def on_receive(self, client, message):
        if client.evaluating and client.round == 1 and client.id == "0" and message.work == 0 and self.closed:
            raise OSError("the site is closed")

    closed = False


def test_a_client_that_cannot_be_opened_takes_nobody_elses_scores_along():
    closed = Closed()
    trainer = federate(Toy("sgd"), toy_data(), [closed, LocalCheckpoint()], max_rounds=2, evaluation=2)
    type(closed).closed = True
    try:
        with pytest.warns(UserWarning, match="client '0' was not scored .* the site is closed"):
            trainer.test()
            before = len(trainer.summary["failures"])
            trainer.test()
    finally:
        type(closed).closed = False
    pooled = {row.client for row in trainer.rows if row.data == "pooled" and row.checkpoint == "best_local"}
    assert pooled == {"1", "2"}
    assert len(trainer.summary["failures"]) == before

"""Loops without rounds of everybody, beside what other parts of the package offer: right, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlightning.callbacks import DFedAvg, FedAvg, FedBuff, Local
from fedlightning.models import ClientModels
from fedlightning.virtual_time import Asynchronous, FixedSpeed, VirtualClock
from tests.helpers import Toy, federate, global_state, make_trainer, same, toy_data
from tests.server.faulty import FailingHook, Fault

SIZES = (24, 40, 16, 24)
SLOW = VirtualClock(FixedSpeed(1.0, slowdown={"2": 5}))


def loop() -> Asynchronous:
    return Asynchronous(SLOW, concurrency=3)


@pytest.mark.parametrize("where", ["on_visit_start", "on_send"])
def test_a_further_try_gives_the_bits_of_a_run_without_the_failure(where: str, tmp_path: Path):
    module, given = Toy("momentum", dropout=0.3), {"loop": loop(), "max_rounds": 4, "evaluation": 1}
    whole = federate(module, toy_data(SIZES), [FedBuff(2)], **given)
    fault = FailingHook(Fault(tmp_path, "ValueError", times=1), where)
    with pytest.warns(UserWarning, match=r"client '1' failed.*tried again \(2 of 2\)"):
        again = federate(module, toy_data(SIZES), [FedBuff(2), fault], failures="retry", **given)
    same(global_state(again), global_state(whole))
    assert again.server.costs.virtual_time == whole.server.costs.virtual_time and list(again.rows) == list(whole.rows)
    assert [one["decision"] for one in again.server.failures] == ["tried again (2 of 2)"]


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        (FedBuff(2), {"loop": loop()}, "FedBuff works on models of one architecture"),
        (DFedAvg(), {}, "DFedAvg works on models of one architecture"),
    ],
    ids=["FedBuff", "DFedAvg"],
)
def test_models_of_two_architectures_are_refused(method: Any, given: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        federate(ClientModels({"small": Toy(), "wide": Toy(hidden=9)}), toy_data(SIZES), [method], **given)


def test_models_of_two_architectures_train_alone_without_rounds():
    models = ClientModels({"small": Toy(), "wide": Toy(hidden=9)})
    trainer = federate(models, toy_data(SIZES), [Local()], loop=loop(), max_rounds=8, evaluation=4)
    widths = {client: trainer.module(client).net[0].out_features for client in trainer.server.clients}
    assert set(widths.values()) == {Toy().net[0].out_features, 9}
    assert {row.client for row in trainer.rows if row.stage == "L1"} == set(trainer.server.clients)


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_held_out_client_is_scored_and_joins_as_after_synchronous_rounds(epochs: int, tmp_path: Path):
    """The model is the server's, though jobs are in flight; onboarding changes nothing of them."""
    module, data = Toy(), toy_data(SIZES)
    given = {"loop": loop(), "max_rounds": 3, "held_out": ["3"], "evaluation": 1}
    trainer = federate(module, data, [FedBuff(2)], tmp_path, **given)
    trainer.test(verbose=False)
    unseen = [row for row in trainer.rows if row.client == "3"]
    assert {row.model for row in unseen} == {"unseen"} and {row.round for row in unseen} == {1, 2, 3}
    assert trainer.federation.loop._in_flight
    before = [(flight.client, flight.arrival) for flight in trainer.federation.loop._in_flight]
    found = trainer.onboard(epochs=epochs, verbose=False)
    assert [(flight.client, flight.arrival) for flight in trainer.federation.loop._in_flight] == before
    plain = federate(module, data, [FedAvg()], held_out=["3"], max_rounds=3)
    plain.server.models["global"] = global_state(trainer)  # the same model, after as many synchronous rounds
    expected = plain.onboard(epochs=epochs, verbose=False)

    def means(rows: Any) -> dict[Any, float]:
        return {
            (row["checkpoint"], row["stage"], row["data"], row["metric"]): row["mean"]
            for row in rows
            if row["checkpoint"] == "latest"
        }

    assert means(found) and means(found) == pytest.approx(means(expected))
    assert {row["stage"] for row in found if row["checkpoint"] == "onboarded"} == ({"L1", "L2"} if epochs else set())


def test_a_run_with_jobs_in_flight_lets_clients_join_from_its_folder(tmp_path: Path):
    module, data = Toy(), toy_data(SIZES)
    given = {"loop": loop(), "max_rounds": 3, "held_out": ["3"]}
    trainer = federate(module, data, [FedBuff(2)], tmp_path, **given)
    here = trainer.onboard(verbose=False)
    again = make_trainer(tmp_path, [FedBuff(2)], **given)
    assert again.onboard(model=module, datamodule=data, run=trainer.run.path, verbose=False) == here

"""LD-SGD: sheet B entry 3.4; what all gossip shares is in test_dfedavg.py."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import LDSGD, DFedAvg
from fedlightning.tensors import module_state
from tests.callbacks.test_dfedavg import RING, A, B, nodes
from tests.conformance.case import Case, Kept
from tests.helpers import Quadratic, Toy, close, federate, quadratic_data, toy_data

STEPS = {"local_steps": 2}
CASES = {
    "LDSGD": Case(
        LDSGD(), arguments=STEPS, skip={"one_client": "a round has i2 steps more than the trainer's local_steps"}
    )
}
KEPT = {"LDSGD": Kept("LDSGD", server=("models",))}


@pytest.mark.parametrize("i2", [1, 3])
def test_rounds_by_hand(i2):
    trainer = federate(Quadratic(), quadratic_data(A, B), [LDSGD(i2=i2)], max_rounds=3, **STEPS)
    a, b, w = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B, RING))
    x = torch.zeros_like(a)
    for _ in range(3):
        for step in range(2 + i2):
            x = x - 0.1 * a * (x - b)
            x = x if step < 2 else w @ x
    torch.testing.assert_close(nodes(trainer), x, atol=1e-14, rtol=0)
    assert trainer.server.costs.steps == 3 * 5 * (2 + i2)
    assert trainer.server.costs.bytes_up == 3 * i2 * 10 * 24


def test_with_one_average_it_is_local_steps_and_an_average():
    module, data = Toy("sgd"), toy_data()
    ours = federate(module, data, [LDSGD(i2=1)], max_rounds=3, local_steps=2)
    other = federate(module, data, [DFedAvg()], max_rounds=3, local_steps=3)
    for client in ("0", "1", "2"):
        close(module_state(ours.module(client)), module_state(other.module(client)), atol=0, rtol=0)


def test_a_round_has_one_score_of_the_trained_model(tmp_path):
    trainer = federate(Toy(), toy_data(), [LDSGD(i2=3)], tmp_path, max_rounds=2, evaluation=1, **STEPS)
    rows = [row for row in trainer.rows if row.stage == "L2" and row.metric == "val_acc" and row.data == "local"]
    assert len(rows) == 6
    assert {row.model for row in rows} == {"personal"}


def test_epochs_and_senseless_settings_are_refused():
    with pytest.raises(ValueError, match=r"LDSGD counts steps.*Set local_steps=I1"):
        federate(Toy(), toy_data(), [LDSGD()])
    with pytest.raises(ValueError, match="LDSGD got i2=0"):
        LDSGD(i2=0)

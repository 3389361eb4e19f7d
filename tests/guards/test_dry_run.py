"""A dry run says what a run would do, and leaves no trace."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from fedlightning.callbacks import SCAFFOLD, ClientDP, FedAdam, FedBABU, LocalCheckpoint, SampleDP
from fedlightning.client.data_summary import describe
from fedlightning.guards.dry_run import DISTINCT, distinct_clients
from tests.helpers import Toy, federate, global_state, make_trainer, same, toy_data


def test_it_says_what_the_run_then_does(tmp_path):
    trainer = make_trainer(tmp_path, [SCAFFOLD(), LocalCheckpoint()], max_rounds=3)
    found = trainer.dry_run(Toy(), toy_data([24, 40, 16]))
    assert not list(tmp_path.iterdir())
    trainer.fit(Toy(), datamodule=toy_data([24, 40, 16]))
    assert (found.rounds, found.participants, found.model) == (3, 3, "Toy")
    assert found.parameters == sum(value.numel() for value in global_state(trainer).values())
    assert (found.bytes_down, found.bytes_up) == tuple(
        int(trainer.federation.history[-1][name]) for name in ("bytes_down", "bytes_up")
    )
    assert [(client.id, client.train, client.batches) for client in found.clients] == [
        ("0", 24, 3),
        ("1", 40, 5),
        ("2", 16, 2),
    ]
    assert found.callbacks[0].key == "SCAFFOLD"
    assert "correct_gradient" in found.callbacks[0].hooks
    assert (found.callbacks[0].down, found.callbacks[0].up) == (["c"], ["delta_c"])
    assert found.metrics == sorted({row["metric"].removeprefix("test_") for row in trainer.test()})
    assert json.loads(json.dumps(found.as_dict()))["training_bytes"] == 2 * 4 * found.parameters
    text = str(found)
    assert "SCAFFOLD(option=2" in text and "3 of 3 clients" in text and "rounds     3" in text


def test_it_leaves_no_trace(tmp_path):
    callbacks = [FedAdam(), FedBABU()]
    trainer = make_trainer(tmp_path, callbacks)
    module, data = Toy(), toy_data()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kept = [dict(vars(callback)) for callback in callbacks]
    draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    trainer.dry_run(module, data)
    assert draws == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert trainer.federation is None and trainer.run is None
    assert [dict(vars(callback)) for callback in callbacks] == kept
    same(before, module.state_dict())
    trainer.fit(module, datamodule=data)
    same(global_state(trainer), global_state(federate(module, toy_data(), [FedAdam(), FedBABU()])))


def test_a_client_that_fails_is_a_problem():
    class Picky(Toy):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 7:
                raise RuntimeError("seven")
            return super().training_step(batch, batch_idx)

    found = make_trainer(None).dry_run(Picky(), toy_data([7, 8]))
    assert found.problems == ["client '0' failed: RuntimeError: seven"]
    assert "problems" in str(found)


def test_a_wrong_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"got the class Toy, not an instance"):
        make_trainer(tmp_path).dry_run(Toy, toy_data())


def test_clients_that_differ_are_tried():
    data = toy_data([8] * 12 + [5])
    data.setup()
    chosen = distinct_clients(describe(data, details=DISTINCT))
    assert "12" in chosen and 2 <= len(chosen) < 13
    few = toy_data([8] * 4)
    few.setup()
    assert distinct_clients(describe(few, details=DISTINCT)) == few.client_ids


@pytest.mark.filterwarnings("ignore:SampleDP", "ignore:ClientDP", "ignore:Optimal order", "ignore:.*LeafSpec")
@pytest.mark.parametrize("kind", [SampleDP, ClientDP])
def test_a_rehearsal_spends_nothing_of_a_ledger(kind, tmp_path):
    """It stood there as a run: `compare` found the budget spent by its own rehearsal of the method before."""
    pytest.importorskip("opacus")
    options = {"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 0, "ledger": str(tmp_path / "ledger")}
    callback = kind(**options)
    trainer = make_trainer(None, [callback], max_rounds=2)
    assert not trainer.dry_run(Toy(), toy_data([24, 40, 16])).problems
    assert callback.ledger == options["ledger"] and not (tmp_path / "ledger").exists()
    trainer.fit(Toy(), toy_data([24, 40, 16]))
    assert list((tmp_path / "ledger").glob("*.json"))


@pytest.mark.filterwarnings("ignore:SampleDP", "ignore:Optimal order", "ignore:.*LeafSpec")
def test_a_rehearsal_does_not_end_by_a_budget_that_lasts_for_the_run():
    """Noise was solved for the rehearsal's visits of one step, and its last round has several."""
    pytest.importorskip("opacus")
    trainer = make_trainer(None, [SampleDP(delta=1e-3, epsilon=8.0, noise_seed=0)], max_rounds=4)
    assert not trainer.dry_run(Toy(), toy_data([24, 40, 16])).problems

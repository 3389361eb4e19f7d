"""SampleDP by patient: batches, gradients, the count of patients; and what is spent where a server refuses updates."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")

from fedlightning.callbacks import Central, FedAvg, SampleDP
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches
from fedlightning.callbacks.shared.record_gradients import RecordGradients
from fedlightning.datamodules import IIDPartitioner, Partitioned
from fedlightning.engines.attempts import FederationError
from tests.callbacks.test_sample_dp import SIZES, TINY, Plain, dp, module, plain_trainer
from tests.helpers import Toy, federate, global_state, make_trainer, samples, toy_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:SampleDP"),
    pytest.mark.filterwarnings("ignore:Optimal order"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
GROUPS = np.array([5, 5, 5, 2, 2, 9, 7, 7, 7, 7])


def by_patient(count=60, clients=2, **options):
    x, y = samples("0", "train", count)
    patients = np.arange(count) // 4
    data = {"val_fraction": 0.0, "test_fraction": 0.0, "group": patients, "batch_size": 8} | options
    return Partitioned.from_datasets(TensorDataset(x, y), partitioner=IIDPartitioner(clients), **data)


# -- batches -----------------------------------------------------------------------------------------------------------
def test_patients_are_drawn_with_all_their_records_or_as_many_as_are_allowed():
    sampler = PoissonBatches(10, 3, "s", "a", GROUPS, most=2)
    found, drawn = np.zeros(4), np.zeros(10)
    for _ in range(400):
        for place, batch in enumerate(sampler):
            owners, size = sampler.owners[place], sampler.sizes[place]
            assert size == len(owners) and (not size or len(batch) == size)
            patients = GROUPS[batch] if size else np.array([])
            assert all(1 <= np.sum(patients == one) <= min(2, np.sum(one == GROUPS)) for one in np.unique(patients))
            assert all(len(np.unique(patients[owners == one])) == 1 for one in np.unique(owners))
            found += np.isin(np.unique(GROUPS), patients)
            np.add.at(drawn, batch if size else [], 1)
    draws = 400 * 3
    assert sampler.units == 4 and abs(found / draws - 1 / 3).max() < 5 * (2 / 9 / draws) ** 0.5
    assert abs(drawn[6:] / draws - 1 / 6).max() < 0.06  # each of four records is in half of its patient's batches


# -- a step ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_a_step_is_the_clipped_means_of_patients_over_the_expected_number(clip):
    net, draw = Plain(), torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 4, generator=draw), torch.randint(0, 3, (10,), generator=draw)
    expected = [torch.zeros_like(parameter) for parameter in net.layer.parameters()]
    for patient in np.unique(GROUPS):
        held = torch.from_numpy(patient == GROUPS)
        gradient = torch.autograd.grad(F.cross_entropy(net.layer(x[held]), y[held]), list(net.layer.parameters()))
        norm = float(torch.cat([one.flatten() for one in gradient]).norm())
        expected = [sum_ + one * min(1.0, clip / norm) / 4 for sum_, one in zip(expected, gradient, strict=True)]
    sampler = PoissonBatches(10, 1, "s", "a", GROUPS, most=9)
    (batch,) = list(sampler)
    fit = RecordGradients(net, sampler, clip=clip, noise_multiplier=TINY, secret="s", address="a", room=9)
    fit.begin()
    net.training_step((x[batch], y[batch]), 0).backward()
    fit.privatise(net.configure_optimizers())
    fit.close()
    for parameter, one in zip(net.layer.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, one, atol=1e-5)


def test_whatever_a_patients_records_are_they_move_the_step_by_the_clip_at_most():
    net, found = Plain(), []
    for patient in (None, 7):
        sampler = PoissonBatches(10, 1, "s", "a", GROUPS, most=9)
        (batch,) = list(sampler)
        x = torch.ones(10, 4)
        x[torch.from_numpy(GROUPS[batch] == patient) if patient else []] *= 1e4
        fit = RecordGradients(net, sampler, clip=0.1, noise_multiplier=TINY, secret="s", address="a", room=9)
        fit.begin()
        net.zero_grad()
        net.training_step((x, torch.zeros(10, dtype=torch.long)), 0).backward()
        fit.privatise(net.configure_optimizers())
        fit.close()
        found.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    assert 0 < float((found[0] - found[1]).norm()) * 4 <= 2 * 0.1 * (1 + 1e-5)


# -- a run -------------------------------------------------------------------------------------------------------------
def test_a_run_by_patient_says_so_and_counts_by_the_batches(tmp_path):
    callback = dp(noise_seed=None, unit="patient")
    trainer = make_trainer(tmp_path, [FedAvg(), callback], max_rounds=2)
    trainer.fit(module(), datamodule=by_patient())
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    assert told["unit"] == "patient of a client" and told["private"]
    (noise, rate, steps), *others = trainer.store.get("0").state["SampleDP"]["history"]
    assert not others and told["epsilon_by_client"]["0"] == pytest.approx(callback.epsilon_of([(noise, rate, steps)]))


def test_a_sample_of_nobody_is_no_patient(monkeypatch):
    """All of these as one patient, or as none: the one that it belongs to would count twice, or the sample would be lost."""
    data = by_patient()
    monkeypatch.setattr(type(data), "sample_groups", lambda self, client, split="train": np.array([1.0, np.nan] * 15))
    with pytest.raises(FederationError, match="Of 15 training samples of client '0' nobody knows whose they are"):
        make_trainer(None, [dp(unit="patient")], max_rounds=1).fit(module(), datamodule=data)


def test_patients_of_all_clients_are_those_of_the_union():
    """The union of the data was said to know no groups, in round 1."""
    found = []
    for clients in (1, 3):  # in one batch of all: who holds a patient does not matter
        algorithm = dp(unit="patient", noise_multiplier=TINY, clip=1e6)
        trainer = make_trainer(None, [Central(), algorithm], max_rounds=1)
        trainer.fit(module(), datamodule=by_patient(clients=clients, batch_size=64))
        found.append(global_state(trainer))
    assert all(torch.allclose(value, found[1][name], atol=1e-5) for name, value in found[0].items())


def test_where_nobody_knows_patients_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the data module knows no groups"):
        make_trainer(None, [dp(unit="patient")], max_rounds=1).fit(module(), datamodule=toy_data(SIZES))
    with pytest.raises(ValueError, match="In a plain Trainer nobody knows whose"):
        plain_trainer(dp(unit="patient")).fit(Plain(), torch.utils.data.DataLoader(TensorDataset(torch.ones(4, 4))))


def test_a_ledger_counts_by_one_unit(tmp_path):
    def run(unit):
        callback = dp(unit=unit, ledger=str(tmp_path / "ledger"))
        make_trainer(None, [callback], max_rounds=1).fit(module(), datamodule=by_patient())

    run("patient")
    assert {path.name for path in (tmp_path / "ledger").glob("*.json")} == {
        "0%20by%20patient.json",
        "1%20by%20patient.json",
    }
    with pytest.raises(FederationError, match="by the other unit than record"):
        run("record")


# -- what is spent -----------------------------------------------------------------------------------------------------
class Refuses(FedAvg):
    """Takes in nothing of client 0 in round 1."""

    def check_update(self, server, message, update):
        if (update.client, server.round) == ("0", 0):
            raise ValueError("no")


def spent(folder, *callbacks, rounds=2):
    trainer = make_trainer(folder, [*callbacks, dp(noise_seed=None)], max_rounds=rounds)
    trainer.fit(module(), datamodule=toy_data(SIZES))
    return json.loads((trainer.run.path / "privacy.json").read_text())["epsilon_by_client"]


def test_visits_whose_updates_were_refused_are_spent_all_the_same(tmp_path):
    with pytest.warns(UserWarning, match="was refused: no"):
        refused = spent(tmp_path / "refused", Refuses())
    assert refused["0"] == pytest.approx(spent(tmp_path / "taken", FedAvg())["0"], rel=1e-5)


def test_a_ledger_counts_clients_with_the_same_data(tmp_path):
    """A record that was with the smaller client each time had spent 6.5, and no file had more than 5.6."""

    def run(sizes):
        callback = dp(ledger=str(tmp_path), noise_seed=None)
        federate(module(), toy_data(sizes), [FedAvg(), callback], max_rounds=1)

    run({"0": 16, "1": 96})
    run({"0": 16, "1": 96})
    with pytest.raises(FederationError, match="counts what was spent on 16 records or patients, and here are 96"):
        run({"0": 96, "1": 16})
    for client, size in (("0", 96), ("1", 16)):
        path = tmp_path / f"{client}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"units": size}))
    run({"0": 96, "1": 16})


class Fails(Toy):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("stop")
        return super().training_step(batch, batch_idx)


def test_a_visit_that_fails_counts_the_steps_that_it_took(tmp_path):
    trainer = make_trainer(tmp_path, [dp()], max_rounds=1)
    with pytest.raises(FederationError, match="stop"):
        trainer.fit(module(Fails), datamodule=toy_data(SIZES))
    (file,) = tmp_path.rglob("clients/0/privacy.json")
    (steps,) = json.loads(file.read_text())["runs"].values()
    assert steps[0][-1] == 1


def test_a_resumed_run_keeps_its_unit(tmp_path):
    make_trainer(tmp_path, [dp(noise_seed=None)], max_rounds=1, name="a").fit(module(), datamodule=by_patient())
    again = make_trainer(tmp_path, [dp(noise_seed=None, unit="patient")], max_rounds=2, name="a")
    with pytest.raises(ValueError, match=r"cannot go on with another configuration \(SampleDP\.unit"):
        again.fit(module(), datamodule=by_patient(), resume="last", allow_config_change=True)


@pytest.mark.parametrize(("scores", "splits"), [("withheld", {"test"}), ("in the clear", {"val", "test"})])
def test_scores_on_validation_data_leave_only_if_the_user_says_so(tmp_path, scores, splits):
    trainer = make_trainer(tmp_path, [SampleDP(delta=1e-3, noise_multiplier=1.0, scores=scores)], max_rounds=1)
    trainer.fit(module(), datamodule=toy_data(SIZES))
    assert {row.split for row in trainer.rows} == splits - {"test"} or {row.split for row in trainer.rows} == splits
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    assert any("validation scores" in text for text in told[scores.replace(" ", "_")])

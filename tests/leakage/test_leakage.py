"""Attacks on the models of a run: what they find where there is something, and where there is nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import FedAvg, Local
from fedlightning.cli import main
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.leakage import basic_attacks, describe_attacks, leakage, membership, site_inference
from fedlightning.study.predicted import members_of
from tests.helpers import Toy, federate, make_trainer, toy_data

SIZES = {"a": 30, "b": 20}


def test_auc_is_that_of_scikit_learn_with_ties_counted_half():
    draw = np.random.default_rng(0)
    members, others = draw.integers(0, 12, 80) / 4, draw.integers(1, 14, 120) / 4
    found = membership("global", members, others)
    truth, score = np.r_[np.ones(80), np.zeros(120)], -np.r_[members, others]
    assert found.auc == pytest.approx(roc_auc_score(truth, score))
    assert found.low < found.auc < found.high and (found.members, found.others) == (80, 120)


def test_hits_are_counted_at_one_false_alarm_in_a_hundred():
    others = np.arange(100.0)
    assert membership("m", np.array([-1.0, -1.0, 0.5, 50.0]), others).hits == 0.75  # one other lies below 1.0
    draw = np.random.default_rng(1)
    assert membership("m", draw.normal(size=2000), draw.normal(size=2000)).hits == pytest.approx(0.01, abs=0.012)


@pytest.mark.parametrize("count", [2, 20, 99, 100, 150])
def test_what_chance_finds(count, monkeypatch):
    monkeypatch.setattr(basic_attacks, "RESAMPLES", 2)  # the interval is not looked at
    draw = np.random.default_rng(count)
    rows = [membership("m", draw.normal(size=40), draw.normal(size=count)) for _ in range(300)]
    chance, hits = rows[0].chance, np.array([row.hits for row in rows])
    assert chance == (count // 100 + 1) / (count + 1)
    assert abs(hits.mean() - chance) < 4 * hits.std() / np.sqrt(len(hits))
    ratio = {"shadows": 4, **asdict(rows[0])}
    assert f"(chance finds {chance:.1%})" in describe_attacks({"likelihood_ratio": ratio})[0]
    assert "chance" not in describe_attacks({"likelihood_ratio": {k: v for k, v in ratio.items() if k != "chance"}})[0]


def test_intervals_hold_chance_where_there_is_nothing():
    draw, holds = np.random.default_rng(2), 0
    for seed in range(30):
        found = membership("m", draw.normal(size=60), draw.normal(size=60), seed)
        holds += found.low <= 0.5 <= found.high
    assert holds >= 25  # 28.5 expected of 30


def test_too_few_samples():
    with pytest.raises(ValueError, match="too few to compare"):
        membership("m", np.array([1.0, np.nan]), np.ones(5))


def test_sites_are_found_where_probabilities_differ_beyond_labels():
    draw = np.random.default_rng(3)
    clients, labels = np.repeat([0, 1], 60), np.tile([0, 1, 0], 40)
    same = draw.dirichlet(np.ones(3), 120)
    shifted = same + 5.0 * clients[:, None]
    planted, nothing = site_inference(shifted, clients, labels), site_inference(same, clients, labels)
    assert planted.accuracy == 1.0 and planted.p < 0.01 and 0.4 < planted.chance < 0.6
    assert nothing.p > 0.02 and nothing.accuracy < 0.7


def test_labels_alone_are_chance():
    draw = np.random.default_rng(4)
    clients = np.repeat([0, 1], 60)
    labels = clients.copy()  # each client has a class of its own
    found = site_inference(np.eye(2)[labels] + draw.normal(0, 0.01, (120, 2)), clients, labels)
    assert found.accuracy == found.chance == 1.0 and found.p == 1.0


class Probable(Toy):
    def predict_step(self, batch, batch_idx):
        return self.logits(batch[0]).softmax(1)


def test_a_model_that_has_learnt_its_samples_by_heart_gives_them_away():
    torch.manual_seed(0)

    def loaders(sizes):
        return {
            name: DataLoader(TensorDataset(torch.randn(size, 6), torch.randint(0, 3, (size,))), batch_size=32)
            for name, size in sizes.items()
        }

    data = LoaderDataModule(
        loaders(SIZES), test=loaders({"a": 100, "b": 100})
    )  # labels that can only be learnt by heart
    trainer = federate(Probable("adam", lr=0.02, hidden=128), data, [Local()], max_rounds=1, local_epochs=60)
    found = leakage(trainer, data)
    rows = {row["model"]: row for row in found["membership"]}
    assert set(rows) == {"a", "b"} and all(row["low"] > 0.55 for row in rows.values())
    assert [row["members"] for row in rows.values()] == [30, 20]
    assert any(why.startswith("global:") for why in found["missing"])  # Local has none
    assert "2 of 2 models" in describe_attacks(found)[0]


def test_clients_that_deploy_the_global_model_are_tried_once():
    data = toy_data(SIZES)
    found = leakage(federate(Probable(), data, [FedAvg()], max_rounds=1), data)
    assert [row["model"] for row in found["membership"]] == ["global"] and found["sites"]["clients"] == 2


def test_what_cannot_be_tried_is_said():
    data = toy_data(SIZES)
    found = leakage(federate(Toy(), data, [FedAvg()], max_rounds=1), data)  # its predict_step gives classes
    assert found["sites"] is None and "no probabilities" in found["missing"][0]
    nobody = toy_data(SIZES, test=0)
    with pytest.raises(ValueError, match="no test samples"):
        leakage(federate(Toy(), nobody, [FedAvg()], max_rounds=1), nobody)


def test_members_are_as_the_run_had_them():
    """With the statistics that its clients agreed on, where there are any."""
    agreed, plain = object(), SimpleNamespace(drifts=False, wanted_statistics=None)
    trainer = SimpleNamespace(federation=SimpleNamespace(engine=SimpleNamespace(runner=SimpleNamespace(data=agreed))))
    assert members_of(trainer, SimpleNamespace(drifts=False, wanted_statistics=object())) is agreed
    assert members_of(trainer, plain) is plain


def test_trying_changes_nothing(tmp_path):
    data = toy_data(SIZES)
    trainer = make_trainer(tmp_path, [FedAvg()], max_rounds=1)
    trainer.fit(Probable(), datamodule=data)
    before = {name: value.clone() for name, value in trainer.server.model.items()}
    assert leakage(trainer, data) == leakage(trainer, data)
    assert all(torch.equal(before[name], value) for name, value in trainer.server.model.items())


def test_the_command_writes_what_it_found(tmp_path, capsys):
    run = [f"--trainer.default_root_dir={tmp_path}", "--trainer.max_rounds=1", "--trainer.local_epochs=1"]
    assert main(["fit", "--config", "configs/quickstart.yaml", *run]) == 0
    capsys.readouterr()
    folder = tmp_path / "quickstart" / "version_0"
    assert main(["leakage", "--run", str(folder), "--samples", "100", "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said.strip().splitlines()[-1])
    assert found["membership"] == json.loads((folder / "leakage.json").read_text())["membership"]
    assert "class probabilities name a sample's client" in said and "AUC" in said

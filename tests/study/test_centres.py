"""Every centre on every group's hold-out data."""

from __future__ import annotations

import csv

import pytest
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import CFL, IFCA, FedSoft
from fedlightning.datamodules import DigitsDataModule, MixtureDataModule
from fedlightning.models import MLP, Classifier
from fedlightning.study.centres import score_centres
from tests.helpers import QUIET, Toy, federate, toy_data


def test_each_centre_is_best_on_its_own_group(tmp_path):
    data = MixtureDataModule(DigitsDataModule(batch_size=16), 6, "rotation", "0:100")
    trainer = FederatedTrainer(
        callbacks=[IFCA()], max_rounds=3, accelerator="cpu", default_root_dir=tmp_path, evaluation=0, **QUIET
    )
    torch.manual_seed(0)
    trainer.fit(Classifier(MLP(64, [16], 10), num_classes=10, lr=0.1), datamodule=data)
    with pytest.raises(ValueError, match="metric='test_acc', but testing gives"):
        score_centres(trainer, data, "test_acc")
    models = trainer.server.models
    rows = score_centres(trainer, data, path=tmp_path / "centres.csv")
    assert {(row["model"], row["group"]) for row in rows} == {
        (key, g) for key in ("global", "centre 1") for g in (0, 1)
    }
    module = trainer.server.module_with(models["centre 1"]).eval()
    x, y = (torch.cat(parts) for parts in zip(*data.group_dataloader(1), strict=True))
    right = float((module(x).argmax(-1) == y).float().mean())
    (row,) = [row for row in rows if (row["model"], row["group"]) == ("centre 1", 1)]
    assert row["value"] == pytest.approx(right, abs=1e-6)
    matched = sum(row["value"] for row in rows if row["matched"])
    assert sum(row["matched"] for row in rows) == 2
    assert matched >= sum(row["value"] for row in rows if not row["matched"])
    with (tmp_path / "centres.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4


def test_data_without_groups_are_refused():
    trainer = federate(Toy(), toy_data(), [IFCA()], max_rounds=1)
    with pytest.raises(ValueError, match="ToyData has no group_dataloader"):
        score_centres(trainer, toy_data())


class Groups:
    """Data with groups, from a method that has trained on others."""

    num_groups = 2

    def __init__(self, data):
        self.data = data

    def group_dataloader(self, group):
        return self.data.client_dataloader(str(group), "test")


def test_every_centre_of_ifca_is_scored_however_many_there_are():
    data = toy_data()
    trainer = federate(Toy(), data, [IFCA(num_clusters=3)], max_rounds=1)
    rows = score_centres(trainer, Groups(data), "test_acc")
    assert [row["model"] for row in rows[::2]] == ["global", "centre 1", "centre 2"]


def test_clusters_that_were_split_are_not_scored():
    data = toy_data([8] * 6)
    trainer = federate(Toy(), data, [CFL(gap=0.0, eps1=10, eps2=0, start_round=1)], max_rounds=3)
    parents = set(trainer.server.state["CFL"]["parents"].values())
    assert len(parents) > 1
    rows = score_centres(trainer, Groups(data), "test_acc")
    assert {row["model"] for row in rows} == set(trainer.server.models) - parents


def test_the_common_start_of_other_methods_is_not_scored():
    data = toy_data()
    trainer = federate(Toy(), data, [FedSoft(num_clusters=1)], max_rounds=1)
    assert {row["model"] for row in score_centres(trainer, Groups(data), "test_acc")} == {"centre 1"}

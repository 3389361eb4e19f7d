"""Many loaders of one model: the scores are those of one by one, and what the loaders share is done once."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics.classification import MulticlassAccuracy

from fedlightning.callbacks import FedAvg
from fedlightning.client import requests
from fedlightning.datamodules import ArrayDataset, ArrayFederatedDataModule, IIDPartitioner
from fedlightning.fast import fast_evaluation
from fedlightning.fast.module_copier import Copier
from fedlightning.fast.trainer_view import FastTrainer
from fedlightning.models import MLP, Classifier
from tests.helpers import make_trainer, mostly_slow


class Points(ArrayFederatedDataModule):
    def load(self):
        generator = torch.Generator().manual_seed(0)
        count = 14 * self.partitioner.num_clients
        x, y = torch.randn(count, 4, generator=generator), torch.arange(count) % 3
        return ArrayDataset(x, y), ArrayDataset(x[: count // 2], y[: count // 2])


class Busy(LightningModule):
    """A module whose evaluation draws, logs in every way, and changes modes, gradients and the trainer."""

    breaks = False

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout())
        self.accuracy = MulticlassAccuracy(3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        x, y = batch
        assert batch_idx > 0 or not (self.training or self.net[1].training)
        if isinstance(self.trainer, FastTrainer):
            assert batch_idx > 0 or not hasattr(self.trainer, "seen")
            self.trainer.seen = True
        self.net[1].train()  # dropout draws
        drawn = self.net(x)
        self.accuracy(drawn, y)
        self.log("accuracy", self.accuracy)
        self.log("drawn", drawn.mean())
        self.log("total", drawn.sum(), reduce_fx="sum")
        if self.breaks and float(x[0, 0]) > 1:
            raise RuntimeError("broken data")
        if len(y) == 3:  # of some clients only
            self.log("late", drawn.max(), reduce_fx="max", batch_size=2)

    def on_test_epoch_end(self):
        self.log("end", self.accuracy.compute() * 3 - 0.1)


def scored(monkeypatch, module, clients=9, one_by_one=False, before_test=lambda: None, **options):
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if one_by_one:
            patch.setattr(requests, "MAX_WAITING", 1)
        trainer = make_trainer(None, [FedAvg()], max_rounds=1, evaluation=0, **options)
        trainer.fit(module, Points(IIDPartitioner(clients, stratified=False), batch_size=4))
        before_test()
        trainer.test()
    return [row.cells for row in trainer.rows]


@pytest.mark.parametrize("breaks", mostly_slow([False, True], [True]))
def test_a_series_of_loaders_gives_the_scores_of_one_after_another(monkeypatch, breaks):
    monkeypatch.setattr(Busy, "breaks", breaks)
    module = Busy()
    together = scored(monkeypatch, module)
    assert len(together) > 20
    assert together == scored(monkeypatch, module, one_by_one=True)
    if not breaks:
        module.net[1].p = 0.0  # Lightning's loop draws other numbers after a fit
        assert scored(monkeypatch, module) == scored(monkeypatch, module, local_loop="trainer")


def test_what_clients_share_is_done_once(monkeypatch):
    counts: dict[str, int] = {}

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (fast_evaluation, "Hooks"),
        (fast_evaluation, "LogSheet"),
        (fast_evaluation, "to_device"),
        (Copier, "copy"),
    ):
        count(owner, name)
    found = []
    for clients in (5, 25):
        scored(monkeypatch, Classifier(MLP(4, [5], 3), 3), clients, participation=2, before_test=counts.clear)
        found.append(dict(counts))
    assert {"Hooks", "LogSheet", "to_device"} <= set(found[0])
    assert found[0] == found[1]

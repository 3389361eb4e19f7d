"""Toy federations with public data and models of two architectures, for methods that share predictions."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning import FederatedTrainer
from fedlightning.models import ClientModels
from fedlightning.tensors import State, module_state
from tests.helpers import CLASSES, FEATURES, Toy, ToyData, make_trainer, samples, toy_data


class PublicToyData(ToyData):
    """Toy data beside samples that no client holds."""

    public = 20

    def public_dataloader(self):
        return DataLoader(TensorDataset(*samples("public", "train", self.public)), batch_size=self.batch_size)


def public_data(sizes=(24, 40, 16), batch_size=64, public=20, **options):
    data = PublicToyData(toy_data(sizes).tensors, batch_size=batch_size, **options)
    data.public = public
    return data


def public_x(data):
    """The inputs of the public samples."""
    return data.public_dataloader().dataset.tensors[0]


class Deep(Toy):
    """Two hidden layers."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 8), nn.Linear(8, CLASSES))


def two_models(optimizer="sgd", lr=0.3, **options):
    """Clients in turn have a ``Toy`` and a ``Deep``."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        models = {"small": Toy(optimizer, lr=lr), "deep": Deep(optimizer, lr=lr)}
    return ClientModels(models, **options)


def own_models(trainer: FederatedTrainer) -> dict[str, State]:
    """What each client deploys."""
    return {client: module_state(trainer.module(client)) for client in trainer.server.clients}


def resumed(trainer: FederatedTrainer, module, data, callbacks, rounds: int, **options) -> FederatedTrainer:
    """Go on with the run of a trainer, in a new one."""
    run = trainer.recorder.run.path
    another = make_trainer(run.parent.parent, callbacks, max_rounds=rounds, **options)
    another.fit(module, datamodule=data, resume=run)
    return another

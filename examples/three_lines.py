"""A Lightning project, federated: three lines at the end, and no change above them.

python examples/three_lines.py [--rounds 10] [--out runs/three_lines]
"""

from __future__ import annotations

import argparse

import fedlightning  # noqa: F401  before lightning

# isort: split
import lightning as L
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


# The project as it was: a model and its data, as in Lightning's own tutorials.
class LitDigits(L.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


class DigitsData(L.LightningDataModule):
    def setup(self, stage: str | None = None):
        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.images).float() / 16, torch.tensor(digits.target))
        parts = random_split(data, [1300, 200, 297], torch.Generator().manual_seed(0))
        self.train, self.val, self.test = parts

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", default="runs/three_lines")
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)

    from fedlightning import FederatedTrainer
    from fedlightning.datamodules import DirichletPartitioner, Partitioned

    trainer = FederatedTrainer(max_rounds=options.rounds, default_root_dir=options.out)  # was: L.Trainer(max_epochs=10)
    trainer.fit(LitDigits(), Partitioned(DigitsData(), DirichletPartitioner(num_clients=5, alpha=0.5)))
    trainer.test()

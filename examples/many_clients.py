"""A hundred thousand clients, each made when it is visited; a hundred of them are scored (docs/how-to/many_clients.md).

python examples/many_clients.py [--clients 100000] [--rounds 20] [--out runs/many_clients]
"""

from __future__ import annotations

import argparse

import fedlightning  # noqa: F401  before lightning

# isort: split
import torch
from torch.utils.data import TensorDataset

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import LazyClients
from fedlightning.models import Classifier
from fedlightning.options import Evaluation

RULE = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
SIZES = {"train": 20, "val": 10}


def make(number: int) -> dict[str, TensorDataset]:
    """Return the data of a client. Read a file of its own here; the same number must always give the same samples."""
    drawn = torch.Generator().manual_seed(number)
    place = torch.randn(8, generator=drawn)  # every client has points elsewhere
    points = {split: place + torch.randn(size, 8, generator=drawn) for split, size in SIZES.items()}
    return {split: TensorDataset(x, (x @ RULE).argmax(1)) for split, x in points.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", default="runs/many_clients")
    options = parser.parse_args()
    torch.manual_seed(0)

    data = LazyClients(options.clients, make, SIZES, batch_size=10)
    trainer = FederatedTrainer(
        max_rounds=options.rounds,
        participation=10,
        evaluation=Evaluation(clients=100, every=5),
        callbacks=[FedAvg()],
        default_root_dir=options.out,
    )
    trainer.fit(Classifier(torch.nn.Linear(8, 3), num_classes=3, lr=0.1), data)
    for row in trainer.results:
        if (row["stage"], row["metric"]) == ("G", "val_accuracy"):
            print(f"accuracy of the global model on {len(row['per_client'])} of {len(trainer.client_ids)} clients: "
                  f"{row['mean']:.3f}")  # fmt: skip

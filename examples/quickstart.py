"""Eight methods on ten clients, compared on the same data, seeds and steps.

    python examples/quickstart.py [--rounds 15] [--out runs/quickstart]

Data: scikit-learn's 1797 handwritten digits, split over 10 clients by Dirichlet(0.5) label skew. Every method trains
the same small CNN for the same number of epochs. The table shows test accuracy, the figure that of each client.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from fedlightning import FederatedTrainer  # first: it repairs torchvision beside a CPU build of torch

# isort: split
from lightning.pytorch import Callback, seed_everything
from torch.optim import SGD

from fedlightning.callbacks import (
    APFL,
    FENDA,
    FLIU,
    Central,
    FedAvg,
    FedProx,
    GlobalCheckpoint,
    Local,
    LocalCheckpoint,
    PLayerFL,
)
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner, describe, plot_partition
from fedlightning.models import Classifier, DigitsCNN
from fedlightning.study.comparison import Comparison

METHODS: dict[str, list[Callback]] = {
    "Local": [Local()],
    "Central": [Central(), GlobalCheckpoint()],
    "FedAvg": [FedAvg(), GlobalCheckpoint()],
    "FedProx": [FedProx(mu=0.01), GlobalCheckpoint()],
    "APFL": [APFL()],
    "FENDA": [FENDA(head="net.fc")],
    "FLIU": [FLIU()],
    "PLayer-FL": [PLayerFL()],
}


def main() -> None:
    """Train every method, print the table, draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    options = parser.parse_args()

    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.5), batch_size=16)
    data.setup()
    print(describe(data))
    figures = options.out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    plot_partition(data).savefig(figures / "partition.png", dpi=150)

    comparison = Comparison(metric="accuracy")
    started = time.monotonic()
    for name, callbacks in METHODS.items():
        seed_everything(0, verbose=False)
        model = Classifier(DigitsCNN(), num_classes=10, optimizer=partial(SGD, lr=0.05, momentum=0.9))
        trainer = FederatedTrainer(
            max_rounds=options.rounds,
            local_epochs=2,
            callbacks=[*callbacks, LocalCheckpoint()],
            default_root_dir=options.out,
            name=name,
        )
        trainer.fit(model, data)
        trainer.test(verbose=False)
        comparison.add(name, trainer.summary)
    comparison.print()
    comparison.plot_clients(figures / "per_client.png")
    comparison.write(options.out)
    print(f"{len(METHODS)} runs in {time.monotonic() - started:.0f} s. Runs, figures and checkpoints: {options.out}/")


if __name__ == "__main__":
    main()

"""Eight methods on ten clients, compared on the same data, seeds and steps.

    python examples/quickstart.py [--rounds 15] [--seeds 2] [--jobs 2] [--out runs/quickstart]

Data: scikit-learn's 1797 handwritten digits, split over 10 clients by Dirichlet(0.5) label skew. Every method trains
the same small CNN for the same number of epochs, a run on each core. The table shows test accuracy, the figure that
of each client.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from fedlightning import FederatedTrainer  # first: it repairs torchvision beside a CPU build of torch

# isort: split
import torch
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
    "FedProx": [FedProx(mu=0.1), GlobalCheckpoint()],
    "APFL": [APFL()],
    "FENDA": [FENDA(head="net.fc")],
    "FLIU": [FLIU(weighting="samples")],  # as the others weigh
    "PLayer-FL": [PLayerFL()],
}


def data_module() -> DigitsDataModule:
    """Return the data of all methods."""
    return DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.5), batch_size=16)


def run(name: str, seed: int, rounds: int, out: Path) -> dict[str, Any]:
    """Train and test one method with one seed; return the summary of its run."""
    torch.set_num_threads(1)  # more of them would make a network of this size slower
    seed_everything(seed, verbose=False)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=2,
        seed=seed,
        optimizer_state="reset",  # the same for all; Local and Central would keep theirs
        callbacks=[*METHODS[name], LocalCheckpoint()],
        default_root_dir=out,
        name=name,
        version=f"seed_{seed}",
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(DigitsCNN(), num_classes=10, optimizer=partial(SGD, lr=0.05, momentum=0.9)), data_module())
    trainer.test(verbose=False)
    return trainer.summary


def main() -> None:
    """Train every method, print the table, draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time; default: one for each core")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    options = parser.parse_args()
    figures = options.out / "figures"
    figures.mkdir(parents=True, exist_ok=True)

    started = time.monotonic()
    how = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")  # a fork has imported everything
    runs = [(name, seed) for seed in range(options.seeds) for name in METHODS]
    with ProcessPoolExecutor(min(options.jobs, len(runs)), mp_context=how) as pool:
        going = {pool.submit(run, name, seed, options.rounds, options.out): (name, seed) for name, seed in runs}
        data = data_module()
        data.setup()
        print(describe(data))
        plot_partition(data).savefig(figures / "partition.png", dpi=150)
        for done in as_completed(going):
            print("{}, seed {}: trained for {:.0f} s".format(*going[done], done.result()["seconds"]), flush=True)
    comparison = Comparison(metric="accuracy")
    for done, (name, _) in going.items():
        comparison.add(name, done.result())
    comparison.print()
    comparison.plot_clients(figures / "per_client.png")
    comparison.write(options.out)
    print(f"{len(runs)} runs in {time.monotonic() - started:.0f} s. Runs, figures and checkpoints: {options.out}/")


if __name__ == "__main__":
    main()

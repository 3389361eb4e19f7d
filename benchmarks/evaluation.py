"""Cost of `test()` with many clients that deploy one global model, as a ratio to a fit with few of them a round.

    python -m benchmarks.evaluation [--clients 1000] [--samples 20] [--rounds 100] [--participants 10] [--engine sequential]

Both are CPU times of this process, so the ratio does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings

import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import ArrayDataset, ArrayFederatedDataModule, IIDPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation


class Points(ArrayFederatedDataModule):
    """Ten classes of points of 64 numbers, as many training samples as test samples.

    Args:
        clients: Number of clients.
        samples: Samples of each client in each of both parts.
    """

    def __init__(self, clients: int, samples: int) -> None:
        super().__init__(IIDPartitioner(clients, stratified=False), batch_size=32)
        self.count = clients * samples

    def load(self) -> tuple[ArrayDataset, ArrayDataset]:
        """Draw the samples."""
        drawn = torch.Generator().manual_seed(0)

        def part() -> ArrayDataset:
            y = torch.randint(0, 10, (self.count,), generator=drawn)
            x = torch.randn(self.count, 64, generator=drawn)
            x[torch.arange(self.count), y] += 2
            return ArrayDataset(x, y)

        return part(), part()


def measure(clients: int, samples: int, rounds: int, participants: int, engine: str) -> tuple[float, float]:
    """Return the CPU seconds of the fit and of the test."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = FederatedTrainer(
            max_rounds=rounds,
            callbacks=[FedAvg()],
            participation=participants,
            evaluation=Evaluation(every=0, test_data=["local"]),
            engine=engine,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
        )
        start = time.process_time()
        trainer.fit(Classifier(MLP(64, [32], 10), 10), Points(clients, samples))
        middle = time.process_time()
        trainer.test(verbose=False)
        return middle - start, time.process_time() - middle


def main() -> None:
    """Measure once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 1000), ("samples", 20), ("rounds", 100), ("participants", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--engine", default="sequential")
    given = parser.parse_args()
    torch.set_num_threads(1)
    fit, test = measure(given.clients, given.samples, given.rounds, given.participants, given.engine)
    each = 1000 * test / given.clients
    print(f"fit {fit:.2f} s, test {test:.2f} s of CPU time: ratio {test / fit:.2f}, {each:.2f} ms a client")


if __name__ == "__main__":
    main()

"""What a run costs with many clients of which few take part: start, rounds and memory, beside the same with fewer clients.

    python -m benchmarks.scale [--clients 1000,100000] [--participants 10] [--rounds 20] [--evaluate 0] [--profile]

Logistic regression on `SyntheticDataModule`, whose clients are drawn when they are visited. Each measurement is a process of
its own; times are CPU times of that process. The start is all of `fit` before round 1 (assembling and checking), the end all
of it after the last round (summary, exported models). Files are written as by default, a saved state after every round.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from fedlightning import FederatedCallback, FederatedTrainer
from fedlightning.algorithm import Facts
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import SyntheticDataModule
from fedlightning.models import Classifier
from fedlightning.options import Evaluation


class Clock(FederatedCallback):
    """Notes CPU times of this process at the start of each round."""

    facts = Facts(takes_part=False)

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_round_start(self, server: Any) -> None:
        self.times.append(time.process_time())


def measure(clients: int, participants: int, rounds: int, evaluate: int) -> dict[str, float]:
    """Run a federation; return CPU seconds of start, a round and the end, peak megabytes, and megabytes written.

    Args:
        clients: Number of clients.
        participants: Clients of a round.
        rounds: Number of rounds.
        evaluate: Clients that are scored after each round; 0: none, and no round is.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clock = Clock()
        options: dict[str, Any] = (
            {"evaluation": Evaluation(every=1, clients=evaluate)} if evaluate else {"evaluation": 0}
        )
        trainer = FederatedTrainer(
            max_rounds=rounds + 1,
            participation=participants,
            callbacks=[FedAvg(), clock],
            evaluation=Evaluation(test_data=[]),
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            **options,
        )
        start = time.process_time()
        trainer.fit(Classifier(torch.nn.Linear(60, 10), 10), SyntheticDataModule(clients))
        end = time.process_time()
        files = [path.stat() for path in Path(folder).rglob("*") if path.is_file()]
    each = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "clients": clients,
        "start": clock.times[0] - start,
        "round": statistics.median(each),
        "end": end - clock.times[-1],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "written_mb": sum({file.st_ino: file.st_size for file in files}.values()) / 1e6,
        "files": len(files),
    }


def main() -> None:
    """Measure each number of clients in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1000,100000")
    for name, default in (("participants", 10), ("rounds", 20), ("evaluate", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, for one number of clients")
    parser.add_argument("--json", action="store_true", help="measure in this process and print JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rest = given.participants, given.rounds, given.evaluate
    if given.json:
        print(json.dumps(measure(int(given.clients), *rest)))
        return
    if given.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, int(given.clients), *rest)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
        return
    for clients in given.clients.split(","):
        command = [sys.executable, "-m", "benchmarks.scale", "--json", "--clients", clients]
        for name, value in zip(("participants", "rounds", "evaluate"), rest, strict=True):
            command += [f"--{name}", str(value)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
        print(
            f"{found['clients']} clients: start {found['start']:.2f} s, round {1000 * found['round']:.1f} ms, end "
            f"{found['end']:.2f} s of CPU time; peak {found['peak_mb']:.0f} MB; {found['files']} files, "
            f"{found['written_mb']:.1f} MB"
        )


if __name__ == "__main__":
    main()

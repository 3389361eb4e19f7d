"""Rounds of many clients of which few take part, as ratios of CPU times to the bare loop.

    python -m benchmarks.cross_device [--works device_logistic,device_cnn] [--rounds 60] [--engine sequential] [--profile]

Each federated round is followed by a round of the bare loop in the same process, so that a machine that slows down slows
both. The ratio is that of the medians; the first five pairs are not counted.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch

from benchmarks.engines import Data, Module
from benchmarks.work import WORKS, BareLoop, Work
from fedlightning import FederatedCallback, FederatedTrainer
from fedlightning.algorithm import Facts
from fedlightning.callbacks import FedAvg
from fedlightning.options import Evaluation

WARM = 5
"""Pairs that are not counted."""


class Pairs(FederatedCallback):
    """Measures rounds, and after each a round of the bare loop; the times are the class's, as the trainer copies callbacks.

    Args:
        profiled: Whether federated rounds are profiled.
    """

    facts = Facts(takes_part=False)
    work: Work
    loop: BareLoop | None
    began: float
    own: list[float]
    bare: list[float]
    profile: cProfile.Profile | None = None

    def on_round_start(self, server: Any) -> None:
        if Pairs.profile is not None and server.round >= WARM:
            Pairs.profile.enable()
        Pairs.began = time.process_time()

    def on_round_end(self, server: Any) -> None:
        ended = time.process_time()
        if Pairs.profile is not None:
            Pairs.profile.disable()
        state = torch.get_rng_state()
        Pairs.own.append(ended - Pairs.began)
        if Pairs.loop is None:
            Pairs.loop = BareLoop(Pairs.work)
        started = time.process_time()
        Pairs.loop.round(server.round)
        Pairs.bare.append(time.process_time() - started)
        torch.set_rng_state(state)


def measure(work: Work, rounds: int, **options: Any) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of federated rounds and of those of the bare loop beside them.

    Args:
        work: The federation.
        rounds: Number of pairs.
        options: Arguments of the trainer, such as `engine`.
    """
    Pairs.work, Pairs.loop, Pairs.own, Pairs.bare = work, None, [], []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = FederatedTrainer(
            max_rounds=rounds + WARM,
            participation=work.participants or 1.0,
            callbacks=[FedAvg(), Pairs()],
            evaluation=Evaluation(every=0, test_data=[]),
            save_state=0,
            logger=False,
            enable_progress_bar=False,
            accelerator="cpu",
            default_root_dir=folder,
            **options,
        )
        trainer.fit(Module(work.make, work.lr), Data(work))
    return Pairs.own[WARM:], Pairs.bare[WARM:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default="device_logistic,device_cnn", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--engine", default="sequential")
    parser.add_argument("--profile", action="store_true", help="print where federated rounds spend their time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.works.split(","):
        Pairs.profile = cProfile.Profile() if given.profile else None
        own, bare = measure(WORKS[name], given.rounds, engine=given.engine)
        ratios = [a / b for a, b in zip(own, bare, strict=True)]
        print(
            f"{name}: {1000 * statistics.median(own):.2f} ms a round, bare {1000 * statistics.median(bare):.2f} ms; ratio "
            f"{statistics.median(own) / statistics.median(bare):.3f} (median of pairs {statistics.median(ratios):.3f})"
        )
        if Pairs.profile is not None:
            pstats.Stats(Pairs.profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

"""An algorithm of your own, from the paper to a comparison: FedCM, written outside the package.

    python examples/own_algorithm.py [--rounds 10] [--alpha 0.5] [--out runs/own_algorithm]

docs/how-to/write_an_algorithm.md explains what it uses. The script runs the conformance checks on the callback, then trains
it and FedAvg on scikit-learn's digits, split over 10 clients by Dirichlet(0.1) label skew.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Annotated

from fedlightning import FederatedCallback, FederatedTrainer  # fedlightning before lightning
from fedlightning.algorithm import Extra, Wire
from fedlightning.ranges import Range

# isort: split
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.optim import SGD

from fedlightning.algorithm import Client, GradientContext, Job, Message, Server, Setup, State, Update
from fedlightning.callbacks import FedAvg, GlobalCheckpoint
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import Classifier, DigitsCNN
from fedlightning.study.comparison import Comparison
from fedlightning.tensors import add, select, subtract, zeros_like
from fedlightning.testing import check_algorithm


# [algorithm]
class FedCM(FederatedCallback):
    """Every local step goes along the last round's mean direction too: a momentum that all clients share.

    Xu, Wang, Wang, Yao, "FedCM: federated learning with client-level momentum", 2021 (arXiv 2106.10874).

    Down: `w` and `Delta`. Up: `w_i` and `s_i`, one number. State: `Delta` at the server; it starts at zero.

    * client: `y <- y - eta (alpha g(y) + (1 - alpha) Delta)` from `y = w`; `s_i` is the sum of its learning rates
    * server: `Delta <- mean((w - w_i) / s_i)`, then `w <- mean(w_i)`

    Args:
        alpha: Share of the client's own gradient (the paper: 0.05 to 0.1). Default 0.1; 1 is FedAvg.
    """

    weighting = "uniform"  # the paper's means count every participant once
    rank = -1  # it scales the task's gradient, to which others add

    def __init__(self, alpha: Annotated[float, Range("(0, 1]", "1 is FedAvg.")] = 0.1) -> None:
        self.alpha = alpha

    def check(self, setup: Setup) -> None:
        for optimizer in setup.optimizers:
            if not isinstance(optimizer, SGD) or optimizer.defaults["momentum"]:
                setup.warn(
                    f"FedCM is stated for plain SGD; this {type(optimizer).__name__} has a momentum or scale of its own."
                )

    def wire(self, module: nn.Module) -> Wire:
        return Wire(down={"delta": "parameters"}, up={"s": Extra("scalar", low=0.0)})

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        delta = server.state.get(self.key, {}).get("delta") or zeros_like(server.model, server.trainable)
        message.extras[self.key] = {"delta": select(delta, message.state)}

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        if name not in ctx.payload["delta"]:  # it does not travel
            return gradient
        return self.alpha * gradient + (1.0 - self.alpha) * ctx.payload["delta"][name].to(gradient.device)

    def on_send(self, client: Client, update: Update) -> None:
        update.extras[self.key] = {"s": client.lr_sum}

    def on_update(self, server: Server, update: Update) -> None:
        s = update.extras.get(self.key, {}).get("s", 0.0)
        if s > 0.0:
            own = server.state.setdefault(self.key, {})
            moved = subtract(server.model, select(update.state, server.trainable))
            own["sum"] = add(own.get("sum", zeros_like(moved)), moved, alpha=1.0 / s)
            own["count"] = own.get("count", 0) + 1

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        own = server.state.get(self.key, {})
        if "sum" in own:  # else nobody took part
            server.state[self.key] = {"delta": {name: value / own["count"] for name, value in own["sum"].items()}}
        return reduced


# [/algorithm]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=0.5, help="the paper's 0.1 takes hundreds of rounds")
    parser.add_argument("--checks", nargs="*", help="names of the conformance checks to run; all of them by default")
    parser.add_argument("--out", type=Path, default=Path("runs/own_algorithm"))
    options = parser.parse_args()

    # With one client FedCM has momentum, unless its share of the own gradient is 1: then it is plain training.
    passed = check_algorithm(FedCM(), neutral=FedCM(alpha=1.0), only=options.checks)
    print(f"FedCM passes {len(passed)} checks: {', '.join(passed)}")

    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.1), batch_size=16)
    comparison = Comparison(metric="accuracy")
    for name, algorithm in {"FedAvg": FedAvg(weighting="uniform"), "FedCM": FedCM(options.alpha)}.items():
        seed_everything(0, verbose=False)
        trainer = FederatedTrainer(
            max_rounds=options.rounds,
            local_epochs=2,
            callbacks=[algorithm, GlobalCheckpoint()],
            default_root_dir=options.out,
            name=name,
        )
        trainer.fit(Classifier(DigitsCNN(), num_classes=10, optimizer=partial(SGD, lr=0.2)), data)
        trainer.test(verbose=False)
        comparison.add(name, trainer.summary)
    comparison.print()


if __name__ == "__main__":
    main()

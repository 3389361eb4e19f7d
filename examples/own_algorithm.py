"""An algorithm of your own, from the paper to a comparison: FedDyn, written outside the package.

    python examples/own_algorithm.py [--rounds 15] [--alpha 0.1] [--out runs/own_algorithm]

docs/how-to/write_an_algorithm.md explains what it uses. The script runs the conformance checks on the callback, then trains
it and FedAvg on scikit-learn's digits, split over 10 clients by Dirichlet(0.1) label skew.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Annotated

from fedlightning import FederatedCallback, FederatedTrainer  # fedlightning before lightning
from fedlightning.algorithm import Facts, Range

# isort: split
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.optim import SGD

from fedlightning.algorithm import Client, GradientContext, Server, Setup, State, Update
from fedlightning.callbacks import FedAvg, GlobalCheckpoint
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import Classifier, DigitsCNN
from fedlightning.study.comparison import Comparison
from fedlightning.tensors import add, select, subtract, zeros_like
from fedlightning.testing import check_algorithm


# [algorithm]
class FedDyn(FederatedCallback):
    """Every client's objective is corrected so that its minimiser agrees with the server's.

    Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic regularization", ICLR 2021.

    Down: `theta`. Up: `theta_k`. State: `g_k` at each client, `h` at the server; both start at zero.

    * client: minimise `L_k(theta_k) - <g_k, theta_k> + (alpha/2) ||theta_k - theta||^2`, then
      `g_k <- g_k - alpha (theta_k - theta)`
    * server: `h <- h - (alpha/m) sum_k (theta_k - theta)` with m all clients, then
      `theta <- mean(theta_k) - h / alpha`

    Args:
        alpha: Strength of the regulariser (the paper tunes it in {0.1, 0.01, 0.001}). Default 0.1.
    """

    weighting = "uniform"  # the paper's mean counts every participant once
    facts = Facts(keeps=True)  # g_k, which every visit changes

    def __init__(self, alpha: Annotated[float, Range("(0, inf)", "Use FedAvg() for no regulariser.")] = 0.1) -> None:
        self.alpha = alpha

    def check(self, setup: Setup) -> None:
        for optimizer in setup.optimizers:
            if not isinstance(optimizer, SGD):
                setup.warn(f"FedDyn is stated for SGD; {type(optimizer).__name__} rescales its correction.")

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        if name not in ctx.anchor:  # it does not travel
            return gradient
        g = ctx.state.get("g", {}).get(name, gradient.new_zeros(()))
        return gradient - g.to(gradient.device) + self.alpha * (parameter - ctx.anchor[name])

    def on_send(self, client: Client, update: Update) -> None:
        moved = subtract(update.state, select(client.received, set(update.state) & set(client.lr_sums)))
        g = zeros_like(moved) | client.state.get(self.key, {}).get("g", {})
        client.state[self.key] = {"g": add(g, moved, alpha=-self.alpha)}

    def on_update(self, server: Server, update: Update) -> None:
        old = server.state.get(self.key, {}).get("h") or zeros_like(server.model, server.trainable)
        moved = subtract(update.state, select(server.model, set(update.state) & set(old)))
        server.state[self.key] = {"h": add(old, moved, alpha=-self.alpha / len(server.clients))}

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        return add(reduced, select(server.state[self.key]["h"], reduced), alpha=-1 / self.alpha)


# [/algorithm]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--checks", nargs="*", help="names of the conformance checks to run; all of them by default")
    parser.add_argument("--out", type=Path, default=Path("runs/own_algorithm"))
    options = parser.parse_args()

    # With one client FedDyn extrapolates (theta_k - h / alpha): it cannot equal plain training, and skips that check.
    passed = check_algorithm(FedDyn(), only=options.checks, skip=["one_client"])
    print(f"FedDyn passes {len(passed)} checks: {', '.join(passed)}")

    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.1), batch_size=16)
    comparison = Comparison(metric="accuracy")
    for name, algorithm in {"FedAvg": FedAvg(weighting="uniform"), "FedDyn": FedDyn(options.alpha)}.items():
        seed_everything(0, verbose=False)
        trainer = FederatedTrainer(
            max_rounds=options.rounds,
            local_epochs=2,
            callbacks=[algorithm, GlobalCheckpoint()],
            default_root_dir=options.out,
            name=name,
        )
        trainer.fit(Classifier(DigitsCNN(), num_classes=10, optimizer=partial(SGD, lr=0.05)), data)
        trainer.test(verbose=False)
        comparison.add(name, trainer.summary)
    comparison.print()


if __name__ == "__main__":
    main()

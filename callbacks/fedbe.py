"""FedBE: Bayesian model ensemble, distilled into the mean model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import update_bn

from fedlightning.algorithm import Server, State, WeightingName, isolated
from fedlightning.callbacks.shared.distillation import inputs_of
from fedlightning.callbacks.shared.ensemble_fusion import EnsembleFusion, Member
from fedlightning.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Range, idle_with, make_init, needs
from fedlightning.tensors import WeightedMean, narrow, widen


@idle_with("swa_start", "swa_every", 0, "nothing is averaged. Leave it out, or set swa_every.")
@needs("alpha", "distribution", value="dirichlet", why="a Gaussian has no concentration. Leave it out.")
@make_init
class FedBE(EnsembleFusion):
    """FedAvg; then clients, their mean and models sampled around it teach the mean, by stochastic weight averaging.

    Chen, Chao, "FedBE: making Bayesian model ensemble applicable to federated learning", ICLR 2021.

    * Client: local training, as in FedAvg.
    * Server: a distribution of models from those that came back, with weights `p_i`:

      * `"gaussian"`: `N(m, diag(v))` with `m = sum_i p_i w_i`, `v = sum_i p_i (w_i - m)^2`, elementwise;
      * `"dirichlet"`: `sum_i g_i p_i w_i / sum_i g_i p_i` with `g ~ Dirichlet(alpha, ..., alpha)`.

      The ensemble is `samples` models drawn from it, the clients' models and the mean. Its mean probabilities on public data
      without labels are the targets of the mean model: `loss = KL(p || softmax(f(x)))`, SGD with momentum. After a share
      `swa_start` of the steps, the student joins an average every `swa_every` steps; the average is the next model (SWA).
    * Down: the model of the client's architecture. Up: `w_i`. State: none.
    * Deployed: the model of the client's architecture.

    Draws are of trainable parameters; batch statistics of a drawn model are the mean's (Gaussian ones may be negative)
    or, by Dirichlet, the same combination. The authors' code draws from a Gaussian of the clients' *normalised* changes of
    each tensor, and Dirichlet without sizes (here `weighting="uniform"`); this is the paper's. The paper has one
    architecture; clients of several have a distribution, a mean and a student for each, and one ensemble of all (of an
    architecture that one client has, only its model). With `epochs=0` it is FedAvg. Where a
    single client came back, its model stays.

    Args:
        distribution: `"gaussian"` (paper's main choice) or `"dirichlet"`.
        samples: Models drawn for each architecture. Default 10 (paper).
        alpha: Concentration of the Dirichlet distribution. Default 1.
        epochs: Passes over the public data in a round. Default 20 (authors).
        lr: Learning rate of the student. Default 1e-3 (authors).
        batch_size: Public samples of a step. Default 128.
        swa_start: Share of the steps before the average begins, in [0, 1). Default 0.25 (authors: 500 steps).
        swa_every: Steps between two models of the average. Default 25 (authors). The rate falls by half in each such
            cycle. 0: no average, the last model.
        combine: `"probabilities"` (paper) or `"logits"`.
        temperature: `T` of both softmax.
        update_statistics: Let batch statistics (BatchNorm) of students move with public data, and find those of the
            average by one more pass over them. `False`: normalisation layers stay in eval mode.
        weighting: `p_i`: `"samples"` (default), or `"uniform"`.

    Raises:
        ValueError: If a number is negative or 0 where it cannot be, or `distribution` or `combine` is unknown.

    Example:
        >>> from fedlightning.callbacks import FedBE
        >>> FedBE("dirichlet", samples=5)  # doctest: +ELLIPSIS
        FedBE(distribution='dirichlet', samples=5, alpha=1.0, epochs=20, ...)
    """

    validation = 0.0

    distribution: Literal["gaussian", "dirichlet"] = "gaussian"
    samples: NonNegativeInt = 10
    alpha: PositiveFloat = 1.0
    epochs: NonNegativeInt = 20
    lr: PositiveFloat = 1e-3
    batch_size: PositiveInt = 128
    swa_start: Annotated[float, Range("[0, 1)", "A share of the steps.")] = 0.25
    swa_every: NonNegativeInt = 25
    combine: Literal["logits", "probabilities"] = "probabilities"
    temperature: PositiveFloat = 1.0
    update_statistics: bool = True
    weighting: WeightingName | None = None

    @property
    def distils(self) -> bool:
        """Whether there are steps to take."""
        return self.epochs > 0

    # -- the ensemble --------------------------------------------------------------------------------------------------
    def ensemble(self, server: Server) -> list[Member]:
        """Return the clients' models, the mean of each architecture, and models drawn around it."""
        members = list(server.state[self.key]["members"].values())
        ensemble: list[Member] = [(member["model"], member["state"]) for member in members]
        for model in dict.fromkeys(member["model"] for member in members):
            states = [member["state"] for member in members if member["model"] == model]
            weights = [member["weight"] for member in members if member["model"] == model]
            mean = weighted(states, weights)
            draw = server.rng(f"{self.key} {model}")
            if len(states) == 1:  # all of them would be that client's model once more
                continue
            if self.distribution == "gaussian":
                tied = server.architecture(model).tied
                names = {name: min(tied.get(name, (name,))) for name in server.architecture(model).trainable}
                drawn = gaussian(states, weights, mean, names, self.samples, draw)
            else:
                drawn = dirichlet(states, weights, self.alpha, self.samples, draw)
            ensemble += [(model, mean), *((model, state) for state in drawn)]
        return ensemble

    # -- the student ---------------------------------------------------------------------------------------------------
    def distil(self, server: Server, student: LightningModule, loader: Any, loss: Any) -> None:
        """Take the steps with SGD, and put the average of the student's models in its place."""
        steps = self.epochs * len(loader)
        average = Average(int(self.swa_start * steps), self.swa_every, steps)

        def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
            sgd = SGD(parameters, lr=self.lr, momentum=0.9, weight_decay=1e-5)
            if self.swa_every:
                sgd.register_step_post_hook(lambda *_: average.after_step(parameters))
            return sgd

        server.training.fit(
            student,
            loader,
            loss,
            steps=steps,
            optimizer=optimizer,
            scheduler=partial(LambdaLR, lr_lambda=average.factor) if self.swa_every else None,
            purpose=f"{self.key} {server.combining}",
        )
        if not average.count:
            return
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        with torch.no_grad():
            for parameter, total in zip(trained, average.totals, strict=True):
                parameter.copy_(narrow(total / average.count, parameter))
        if self.update_statistics:
            ids = self.ids(server)[0]
            with torch.no_grad(), isolated(server.seed, server.round, self.key, server.combining):
                update_bn(
                    (inputs_of(batch) for batch in server.training.public(ids, batch_size=self.batch_size)), student
                )


class Average:
    """Stochastic weight averaging: which steps' models count, and the learning rate between them.

    Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, "Averaging weights leads to wider optima and better generalization", UAI
    2018. The models after `start + every` steps, `start + 2 every` and so on count, and the last one always.

    Args:
        start: Steps before the first model.
        every: Steps between two models.
        steps: Steps in all.

    Example:
        >>> average, parameter = Average(2, 2, 5), nn.Parameter(torch.zeros(1))
        >>> for step in range(5):
        ...     parameter.data += 1
        ...     average.after_step([parameter])
        >>> average.count, average.totals[0] / average.count
        (2, tensor([4.5000], dtype=torch.float64))
    """

    def __init__(self, start: int, every: int, steps: int) -> None:
        self.start, self.every, self.steps = start, every, steps
        self.step, self.count, self.totals = 0, 0, list[Tensor]()

    def after_step(self, parameters: list[nn.Parameter]) -> None:
        """Count the model after a step, if it is its turn."""
        self.step += 1
        past = self.step - self.start
        if self.step == self.steps or (past > 0 and past % self.every == 0):
            now = [widen(parameter.detach()) for parameter in parameters]
            self.totals = [a + b for a, b in zip(self.totals, now, strict=True)] if self.count else now
            self.count += 1

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate of a step: 1 before the average begins, then from 1 to 1/2 in each cycle."""
        return 1.0 if step < self.start else 1.0 - 0.5 * ((step - self.start) % self.every) / max(self.every - 1, 1)


def weighted(states: list[State], weights: Iterable[float]) -> State:
    """Return the weighted mean of models; integer entries are the first one's.

    Example:
        >>> weighted([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], [1.0, 3.0])
        {'w': tensor([0.7500])}
    """
    mean = WeightedMean()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean.result()


def gaussian(
    states: list[State], weights: list[float], mean: State, names: Mapping[str, str], count: int, draw: torch.Generator
) -> list[State]:
    """Draw models around a mean, each entry with the clients' weighted variance."""
    whole, deviation = sum(weights), dict[str, Tensor]()
    for name in dict.fromkeys(names.values()):
        variance = torch.zeros_like(widen(mean[name]))
        for state, weight in zip(states, weights, strict=True):
            variance += weight / whole * (widen(state[name]) - widen(mean[name])).square()
        deviation[name] = variance.sqrt()
    drawn_models = []
    for _ in range(count):
        drawn = {
            name: widen(mean[name]) + spread * torch.randn(spread.shape, generator=draw, dtype=torch.float64)
            for name, spread in deviation.items()
        }
        drawn_models.append({**mean, **{name: narrow(drawn[source], mean[name]) for name, source in names.items()}})
    return drawn_models


def dirichlet(
    states: list[State], weights: list[float], alpha: float, count: int, draw: torch.Generator
) -> list[State]:
    """Draw convex combinations of models, by Dirichlet(alpha) weights times theirs."""
    numbers = np.random.default_rng(int(torch.randint(2**62, (), generator=draw)))
    shares = numbers.dirichlet(np.full(len(states), alpha), size=count).tolist()
    return [weighted(states, [g * w for g, w in zip(row, weights, strict=True)]) for row in shares]

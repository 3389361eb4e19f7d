"""Contestants: each trains rounds of a :class:`~benchmarks.work.Work` and returns the time after each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.work import BareLoop, Work
from fedlightning.options import Processes

Times = list[float]
"""Wall-clock seconds at the start and after every round."""


def bare(work: Work, rounds: int) -> Times:
    """Train with the hand-written loop, which has ratio 1 by definition."""
    loop, times = BareLoop(work), [time.perf_counter()]
    for number in range(rounds):
        loop.round(number)
        times.append(time.perf_counter())
    return times


def fedlightning(work: Work, rounds: int, **options: Any) -> Times:
    """Train with `FederatedTrainer` and FedAvg, without evaluation, files or a progress bar.

    Args:
        work: Federation to train.
        rounds: Number of rounds.
        options: Arguments of the trainer, such as `engine` or `local_loop`; `loaders` for plain loaders.
    """
    from benchmarks.engines import train

    return train(work, rounds, **options)[0]


def pfl(work: Work, rounds: int) -> Times:
    """Train with Apple's pfl-research in one process (`pip install pfl`)."""
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.make()

        def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
            times.append(time.perf_counter())
            return False, Metrics()

    data = work.data()
    users = [str(index) for index in range(len(data))]
    federated = FederatedDataset(
        lambda user: Dataset(raw_data=list(data[int(user)]), user_id=user), get_user_sampler("minimize_reuse", users)
    )
    torch.manual_seed(0)
    np.random.seed(0)
    model = Model()
    wrapped = PyTorchModel(
        model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    times = [time.perf_counter()]
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=work.participants or len(users),
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=federated, val_data=None),
        wrapped,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        NNEvalHyperParams(local_batch_size=work.batch),
        [Clock()],
        send_metrics_to_platform=False,
    )
    return times


def flower(work: Work, rounds: int) -> Times:
    """Train with Flower's simulation on Ray with two actors (`pip install "flwr[simulation]"`)."""
    import logging

    from flwr.client import NumPyClient
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server.strategy import FedAvg
    from flwr.simulation import start_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    data = work.data()
    torch.manual_seed(0)
    first = [value.numpy() for value in work.make().state_dict().values()]

    class Client(NumPyClient):
        def __init__(self, index: int) -> None:
            self.index = index

        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            torch.set_num_threads(1)
            x, y = data[self.index]
            model = work.make()
            names = list(model.state_dict())
            model.load_state_dict(dict(zip(names, map(torch.tensor, parameters), strict=True)))
            optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
            order = torch.randperm(len(y))
            for start in range(0, len(y), work.batch):
                chosen = order[start : start + work.batch]
                optimizer.zero_grad()
                F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
            return [value.numpy() for value in model.state_dict().values()], len(y), {}

    class Clocked(FedAvg):
        def aggregate_fit(self, *args: Any, **kwargs: Any) -> Any:
            result = super().aggregate_fit(*args, **kwargs)
            times.append(time.perf_counter())
            return result

    def client_fn(context: Context) -> Any:
        return Client(int(context.node_config["partition-id"])).to_client()

    from flwr.server import ServerConfig

    times = [time.perf_counter()]
    start_simulation(
        client_fn=client_fn,
        num_clients=len(data),
        config=ServerConfig(num_rounds=rounds),
        strategy=Clocked(
            fraction_fit=(work.participants or len(data)) / len(data),
            min_fit_clients=1,
            fraction_evaluate=0.0,
            initial_parameters=ndarrays_to_parameters(first),
        ),
        client_resources={"num_cpus": 1, "num_gpus": 0.0},
        ray_init_args={"num_cpus": 2, "include_dashboard": False, "log_to_driver": False},
    )
    return times


CONTESTANTS: dict[str, Callable[[Work, int], Times]] = {
    "bare loop": bare,
    "fedlightning": fedlightning,
    "fedlightning (trainer loop)": lambda work, rounds: fedlightning(work, rounds, local_loop="trainer"),
    "fedlightning (2 processes)": lambda work, rounds: fedlightning(work, rounds, engine=Processes(2)),
    "fedlightning (vectorized)": lambda work, rounds: fedlightning(work, rounds, engine="vectorized"),
    "fedlightning (from loaders)": lambda work, rounds: fedlightning(work, rounds, loaders=True),
    "fedlightning (vectorized from loaders)": lambda work, rounds: fedlightning(
        work, rounds, loaders=True, engine="vectorized"
    ),
    "pfl": pfl,
    "flower (2 ray actors)": flower,
}
"""Name -> function. Other frameworks are skipped if they are not installed."""

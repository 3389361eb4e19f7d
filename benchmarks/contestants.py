"""Contestants: each trains rounds of a :class:`~benchmarks.work.Work`, and returns times and what it has counted.

Each imports what it needs itself, so that peers may have environments of their own.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.work import BareLoop, Work


@dataclass
class Course:
    """What a contestant did.

    Attributes:
        times: Wall-clock seconds at the start, when everything is imported, and after every round.
        steps: Optimizer steps.
        samples: Samples in these.
    """

    times: list[float] = field(default_factory=lambda: [time.perf_counter()])
    steps: int = 0
    samples: int = 0

    def end_round(self) -> None:
        """Take the time."""
        self.times.append(time.perf_counter())


def bare(work: Work, rounds: int) -> Course:
    """Train with the hand-written loop, which has ratio 1 by definition."""
    course, loop = Course(), BareLoop(work)
    for number in range(rounds):
        loop.round(number)
        course.end_round()
    course.steps, course.samples = loop.steps, loop.samples
    return course


def fedlightning(work: Work, rounds: int, workers: int | None = None, **options: Any) -> Course:
    """Train with `FederatedTrainer` and FedAvg, without evaluation, files or a progress bar.

    Args:
        work: Federation to train.
        rounds: Number of rounds.
        workers: Number of worker processes; `None`: none.
        options: Arguments of the trainer, such as `engine` or `local_loop`; `loaders` for plain loaders.
    """
    from benchmarks.engines import train
    from fedlightning.options import Processes

    times, trainer = train(work, rounds, **options if workers is None else {**options, "engine": Processes(workers)})
    assert trainer.server is not None
    samples = sum(trainer.store.get(client).visits * work.sizes[int(client)] for client in trainer.store)
    return Course(times, trainer.server.costs.steps, samples)


def pfl(work: Work, rounds: int) -> Course:
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
            course.steps, course.samples = course.steps + 1, course.samples + len(y)
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
            course.end_round()
            return False, Metrics()

    course, data = Course(), work.data()
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
    return course


def flower(work: Work, rounds: int) -> Course:
    """Train with Flower's simulation on Ray with an actor for each of two cores (`pip install "flwr[simulation]"`).

    Apps are written as in its PyTorch quickstart, without evaluation; clients find their data in the memory of the actor.
    """
    import logging

    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    course, client_app, server_app = Course(), ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y = data_of(work)[int(context.node_config["partition-id"])]
        model = work.make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer, order, steps = torch.optim.SGD(model.parameters(), lr=work.lr), torch.randperm(len(y)), 0
        for start in range(0, len(y), work.batch):
            chosen = order[start : start + work.batch]
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            steps += 1
        counts = MetricRecord({"num-examples": len(y), "steps": steps})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": counts}), reply_to=message)

    class Clocked(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            result = super().aggregate_train(server_round, replies)
            counts = [reply.content["metrics"] for reply in replies if reply.has_content()]
            course.steps += sum(int(one["steps"]) for one in counts)
            course.samples += sum(int(one["num-examples"]) for one in counts)
            course.end_round()
            return result

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        count, everybody = work.participants or len(work.sizes), len(work.sizes)
        # nodes still join while the first round is planned: without the least numbers it would have fewer
        least = {"min_train_nodes": count, "min_available_nodes": everybody}
        strategy = Clocked(fraction_train=count / everybody, fraction_evaluate=0.0, **least)
        strategy.start(grid, ArrayRecord(work.make().state_dict()), num_rounds=rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app, client_app, num_supernodes=len(work.sizes), backend_config=resources)
    return course


@functools.cache
def data_of(work: Work) -> list[tuple[Tensor, Tensor]]:
    """Return the data of a work, made once in a process."""
    return work.data()


CONTESTANTS: dict[str, Callable[[Work, int], Course]] = {
    "bare loop": bare,
    "fedlightning": fedlightning,
    "fedlightning (trainer loop)": lambda work, rounds: fedlightning(work, rounds, local_loop="trainer"),
    "fedlightning (2 processes)": lambda work, rounds: fedlightning(work, rounds, workers=2),
    "fedlightning (vectorized)": lambda work, rounds: fedlightning(work, rounds, engine="vectorized"),
    "fedlightning (from loaders)": lambda work, rounds: fedlightning(work, rounds, loaders=True),
    "fedlightning (vectorized from loaders)": lambda work, rounds: fedlightning(
        work, rounds, loaders=True, engine="vectorized"
    ),
    "pfl": pfl,
    "flower (2 ray actors)": flower,
}
"""Name -> function. Other frameworks are skipped if they are not installed."""

"""
Stragglers, and rounds that do not wait
=======================================

On a virtual clock every visit takes as long as its device says. Two of ten clients are ten times slower here. A synchronous
round waits for them; FedBuff takes updates in as they arrive.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg, FedBuff
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation
from fedlightning.server.loop import Synchronous
from fedlightning.study.finished_runs import load_run
from fedlightning.study.learning_curves import cumulative_costs, round_means
from fedlightning.virtual_time import Asynchronous, SampleSpeed, VirtualClock

# %%
# Both have the same devices. A round of FedBuff is five arrivals, so it gets more, shorter rounds.

clock = VirtualClock(SampleSpeed(0.01, slowdown={"2": 10, "5": 10}))
runs = {
    "FedAvg, synchronous": (FedAvg(), Synchronous(clock), 6),
    "FedBuff": (FedBuff(buffer_size=5), Asynchronous(clock, concurrency=10), 120),
}
for name, (method, loop, rounds) in runs.items():
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        callbacks=[method],
        loop=loop,
        evaluation=Evaluation(stages=["G"], every=max(1, rounds // 12)),
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
        save_state=0,
    )
    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.5), batch_size=16)
    trainer.fit(Classifier(MLP(64, [32], 10), num_classes=10, lr=0.1), data)
    run = load_run(trainer.run.path)
    costs = cumulative_costs(run)
    points = [(costs[number]["time"], value) for (_, _, number), value in round_means(run, "accuracy").items()]
    plt.plot(*zip(*points, strict=True), marker="o", label=name)
    print(f"{name}: {points[-1][1]:.3f} after {points[-1][0]:.0f} virtual seconds")

# %%
# Compare at equal *time*: at equal rounds asynchronous methods look bad.

plt.xlabel("virtual seconds")
plt.ylabel("accuracy of the global model")
plt.legend()
plt.show()

"""
Compare methods properly
========================

One seed says little. Train each method with several seeds on the same split, compare them seed by seed, and look at
intervals. ``fedlightning compare`` does this in one command and writes a report; here are its parts.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import APFL, FedAvg, Local, LocalCheckpoint
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation
from fedlightning.study.finished_runs import load_run
from fedlightning.study.study import Study

# %%
# The data's seed stays, so that all methods meet the same split; the trainer's seed changes everything else.

runs = []
for name, method in {"Local": Local, "FedAvg": FedAvg, "APFL": APFL}.items():
    for seed in range(3):
        torch.manual_seed(seed)
        trainer = FederatedTrainer(
            max_rounds=5,
            local_epochs=2,
            seed=seed,
            callbacks=[method(), LocalCheckpoint()],
            evaluation=Evaluation(stages=["L1"], test_data=["local", "pooled"]),
            optimizer_state="reset",
            default_root_dir=Path(tempfile.mkdtemp()),
            enable_progress_bar=False,
        )
        data = DigitsDataModule(DirichletPartitioner(num_clients=6, alpha=0.3), batch_size=16, val_seed=seed)
        trainer.fit(Classifier(MLP(64, [32], 10), num_classes=10, lr=0.1), data)
        trainer.test(verbose=False)
        runs.append(load_run(trainer.run.path, name=name))

# %%
# ``overview`` has a line for each method, ``differences`` the paired differences to a reference that was fixed beforehand.

study = Study(runs, metric="accuracy")
for row in study.overview():
    print(
        f"{row['method']:7} {row['mean']:.3f}, 95 % {[round(end, 3) for end in row['ci95']]}, worst {row['worst']:.3f}"
    )
for row in study.differences("Local"):
    print(f"{row['method']} minus Local: {row['mean']:+.3f}, p = {row['p']:.2f}")
for problem in study.problems:
    print("!", problem.text)

# %%
# With three seeds intervals are wide. That is what three seeds can say.

rows = study.overview()
radius = [(row["ci95"][1] - row["ci95"][0]) / 2 for row in rows]
plt.errorbar([row["mean"] for row in rows], range(len(rows)), xerr=radius, fmt="o", capsize=4)
plt.yticks(range(len(rows)), [row["method"] for row in rows])
plt.xlabel("test accuracy of the deployed models, 95 % interval over seeds")
plt.margins(0.2)
plt.show()

"""
Clients whose data differ, and what that does
=============================================

FedAvg averages models that were trained on different data. Here ten clients share 1797 handwritten digits, first evenly
and then so that each has only a few kinds of digits; the same network is trained in the same way on both splits.
"""

import tempfile

import matplotlib.pyplot as plt

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner, IIDPartitioner, plot_partition
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation
from fedlightning.study.finished_runs import load_run
from fedlightning.study.learning_curves import round_means

# %%
# A partitioner says who has which samples. The smaller ``alpha`` of a Dirichlet split is, the fewer classes a client has.

splits = {"even": IIDPartitioner(num_clients=10), "skewed": DirichletPartitioner(num_clients=10, alpha=0.1)}
skewed = DigitsDataModule(splits["skewed"])
skewed.setup()
plot_partition(skewed)
plt.show()

# %%
# The same eight rounds on both. Stage G is the server's model after aggregation, scored on each client's own validation
# data. ``round_means`` reads them from the
# files that a run leaves.

curves = {}
for name, partitioner in splits.items():
    trainer = FederatedTrainer(
        max_rounds=8,
        local_epochs=2,
        callbacks=[FedAvg()],
        evaluation=Evaluation(stages=["G"]),
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(MLP(64, [64], 10), num_classes=10, lr=0.1), DigitsDataModule(partitioner, batch_size=16))
    means = round_means(load_run(trainer.run.path), "accuracy")
    curves[name] = [value for (stage, _, _), value in means.items() if stage == "G"]
    print(f"{name:8} {curves[name][-1]:.3f}")

# %%
# With skewed data the models were trained towards different goals, and their mean is behind for many rounds.

for name, values in curves.items():
    plt.plot(range(1, len(values) + 1), values, marker="o", label=name)
plt.xlabel("round")
plt.ylabel("accuracy of the global model")
plt.legend()
plt.show()

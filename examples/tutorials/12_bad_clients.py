"""
Clients that send the opposite: robust rules of aggregation
===========================================================

One client that sends nonsense can spoil a mean. Robust rules bear a few bad clients; what they cost where everybody is
honest is the other half of the question. Two of ten clients send the opposite of what they have learnt here, five times as
long.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg, GeometricMedian, TrimmedMean
from fedlightning.callbacks.attacks import SignFlip
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation

# %%
# A rule stands in the list like any callback, and so does an attack.

rules = {"mean": FedAvg, "trimmed mean": TrimmedMean, "geometric median": GeometricMedian}
scores = {}
for name, rule in rules.items():
    for bad in ([], ["1", "4"]):
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            max_rounds=8,
            local_epochs=2,
            callbacks=[rule(), *([SignFlip(clients=bad, scale=5.0)] if bad else [])],
            evaluation=Evaluation(stages=["G"], test_data=["pooled"]),
            default_root_dir=tempfile.mkdtemp(),
            enable_progress_bar=False,
        )
        data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=1.0), batch_size=16)
        trainer.fit(Classifier(MLP(64, [32], 10), num_classes=10, lr=0.1), data)
        trainer.test(verbose=False)
        row = next(row for row in trainer.results if row["metric"] == "test_accuracy")
        scores[name, bool(bad)] = row["mean"]
    print(f"{name:17} honest {scores[name, False]:.3f}, two bad clients {scores[name, True]:.3f}")

# %%
# Robust rules take outliers for bad. Where clients differ much, an honest client is an outlier too.

for place, (label, bad) in enumerate({"all honest": False, "two bad clients": True}.items()):
    values = [scores[name, bad] for name in rules]
    plt.bar([number + 0.4 * (place - 0.5) for number in range(len(rules))], values, 0.38, label=label)
plt.xticks(range(len(rules)), list(rules))
plt.ylabel("test accuracy of the global model")
plt.legend(loc="lower right")
plt.show()

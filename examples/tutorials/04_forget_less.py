"""
Forget less: FLIU
=================

A client that trains on its own data forgets what the others know; a client that takes the global model forgets its own. FLIU
merges the two by how sure each is. The figure has both sides: a client's own data, and everybody's.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FLIU, FedAvg, Local
from fedlightning.datamodules import DigitsDataModule, PathologicalPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation

# %%
# Each client has digits of two classes only. ``pooled`` is the union of all clients' test data. Stage L1 is the model that a
# client holds as it receives it (and, with FLIU, merges it), stage G the server's.

bars = {}
for name, method in {"alone": Local(), "FedAvg": FedAvg(), "FLIU": FLIU()}.items():
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=8,
        local_epochs=2,
        callbacks=[method],
        evaluation=Evaluation(stages=["G", "L1"], test_data=["local", "pooled"]),
        optimizer_state="reset",
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    data = DigitsDataModule(PathologicalPartitioner(num_clients=10, classes_per_client=2), batch_size=16)
    trainer.fit(Classifier(MLP(64, [64], 10), num_classes=10, lr=0.1), data)
    trainer.test(verbose=False)
    found = {(row["stage"], row["data"]): row["mean"] for row in trainer.results if row["metric"] == "test_accuracy"}
    bars[name] = [found.get(key, 0.0) for key in (("L1", "local"), ("L1", "pooled"), ("G", "pooled"))]
    print(f"{name:8} own data {bars[name][0]:.3f}, everybody's {bars[name][1]:.3f}, server's model {bars[name][2]:.3f}")

# %%
# FedAvg's clients lose much of what fits their own data; FLIU's keep most of it. After so
# few rounds its server's model is behind FedAvg's. (Training alone makes none.)

labels = ["client, own data", "client, everybody's", "server, everybody's"]
for place, (name, values) in enumerate(bars.items()):
    plt.bar([number + 0.27 * (place - 1) for number in range(3)], values, 0.25, label=name)
plt.xticks(range(3), labels)
plt.ylabel("test accuracy")
plt.legend()
plt.show()

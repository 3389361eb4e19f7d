"""
A model of each client's own: FENDA beside FedAvg and training alone
====================================================================

Where clients have different classes, one model for all gives up what each client knows of its own data. FENDA trains two
feature extractors, one that travels and one that stays, under a head that stays.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FENDA, FedAvg, Local, LocalCheckpoint
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation

# %%
# Only the callback differs. ``head`` names the layer that turns features into predictions; everything before it is the
# extractor. ``LocalCheckpoint`` keeps each client's best model by its own validation data.

methods = {"alone": Local(), "FedAvg": FedAvg(), "FENDA": FENDA(head="net.fc2")}
scores = {}
for name, method in methods.items():
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=8,
        local_epochs=2,
        callbacks=[method, LocalCheckpoint()],
        evaluation=Evaluation(stages=["L1"], test_data=["local"]),
        optimizer_state="reset",
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.3), batch_size=16)
    trainer.fit(Classifier(MLP(64, [64], 10), num_classes=10, lr=0.1), data)
    trainer.test(verbose=False)
    row = next(r for r in trainer.results if r["metric"] == "test_accuracy" and r["checkpoint"] == "best_local")
    scores[name] = row["per_client"]
    sent = (trainer.summary["bytes_up"] + trainer.summary["bytes_down"]) / 1e6
    print(f"{name:8} mean {row['mean']:.3f}, worst client {row['worst']:.3f}, {sent:.1f} MB sent")

# %%
# Each client has a few dozen test images, so single bars move by several points: look at all of them.

clients = list(scores["FedAvg"])
for offset, (name, found) in enumerate(scores.items()):
    places = [number + 0.27 * (offset - 1) for number in range(len(clients))]
    plt.bar(places, [found[client] for client in clients], width=0.25, label=name)
plt.xticks(range(len(clients)), clients)
plt.xlabel("client")
plt.ylabel("test accuracy of the deployed model")
plt.legend(loc="lower right")
plt.show()

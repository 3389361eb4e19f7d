"""
Different networks for different clients
========================================

A phone cannot train what a server can. ``ClientModels`` gives each client a network of its own; with FedProto they learn
from one another by the mean representation of each class, and no weight travels.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedProto, Local
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier, ClientModels
from fedlightning.options import Evaluation

# %%
# Two networks whose representations have one width (32). ``cycle`` deals them to the clients in turn.

scores = {}
for name, method in {"alone": Local(), "FedProto": FedProto()}.items():
    torch.manual_seed(0)
    models = ClientModels(
        {
            "small": Classifier(MLP(64, [32], 10), num_classes=10, lr=0.1),
            "large": Classifier(MLP(64, [128, 32], 10), num_classes=10, lr=0.1),
        },
        assign="cycle",
    )
    trainer = FederatedTrainer(
        max_rounds=8,
        local_epochs=2,
        callbacks=[method],
        evaluation=Evaluation(stages=["L2"], test_data=["local"]),
        optimizer_state="reset",
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    data = DigitsDataModule(DirichletPartitioner(num_clients=8, alpha=0.5), batch_size=16)
    trainer.fit(models, data)
    trainer.test(verbose=False)
    row = next(r for r in trainer.results if r["metric"] == "test_accuracy")
    scores[name] = row["per_client"]
    sent = (trainer.summary["bytes_up"] + trainer.summary["bytes_down"]) / 1e6
    print(f"{name:8} {row['mean']:.3f}, {sent:.2f} MB sent")

# %%
# Clients with even numbers have the small network.

clients = list(scores["alone"])
for offset, (name, found) in enumerate(scores.items()):
    places = [number + 0.4 * (offset - 0.5) for number in range(len(clients))]
    plt.bar(places, [found[client] for client in clients], width=0.38, label=name)
plt.xticks(range(len(clients)), [f"{client}\n{'large' if int(client) % 2 else 'small'}" for client in clients])
plt.ylabel("test accuracy")
plt.legend(loc="lower right")
plt.show()

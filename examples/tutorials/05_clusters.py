"""
Clusters of clients, and tokens: PI-FL
======================================

Half of the clients have upright digits, half have them turned by 90 degrees. PI-FL keeps a model for each cluster, lets
clients bid for a place in one, and pays those who contribute in tokens.
"""

import csv
import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import PIFL
from fedlightning.datamodules import DigitsDataModule, MixtureDataModule
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation

torch.manual_seed(0)
data = MixtureDataModule(DigitsDataModule(), num_clients=8, groups="rotation", mixture="0:100")
trainer = FederatedTrainer(
    max_rounds=6,
    local_epochs=2,
    callbacks=[PIFL(num_clusters=2, utility="gradient")],
    evaluation=Evaluation(stages=["L1"]),
    default_root_dir=tempfile.mkdtemp(),
    enable_progress_bar=False,
)
trainer.fit(Classifier(MLP(64, [64], 10), num_classes=10, lr=0.1), data)

# %%
# Who is in which cluster, round by round, is in ``clusters.csv``; what was paid and earned in ``ledger.csv``.

with (trainer.run.path / "ledger.csv").open() as file:
    ledger = list(csv.DictReader(file))
balances: dict[str, list[float]] = {}
for row in ledger:
    before = balances.setdefault(row["client"], [0.0])
    before.append(before[-1] - float(row["paid"]) + float(row["refunded"]) + float(row["rewarded"]))
print({client: round(values[-1], 2) for client, values in balances.items()})

# %%
# Tokens move between clients; their sum is always the same.

for client, values in sorted(balances.items()):
    plt.plot(values, label=f"client {client}")
plt.xlabel("entry in the ledger")
plt.ylabel("tokens earned")
plt.legend(ncols=2, fontsize="small")
plt.show()

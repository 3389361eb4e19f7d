"""
No server: clients that talk to their neighbours
================================================

In D-FedAvg each client mixes its model with those of its neighbours in a graph. How fast news travels depends on the graph.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import DFedAvg
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation
from fedlightning.topology import contraction, make_graph, mixing_weights

# %%
# The second-largest eigenvalue of the mixing weights says how much of the disagreement is left after a mixing: 0 means none.

nodes = [str(number) for number in range(10)]
for graph in ("ring", "torus", "star", "complete"):
    left = contraction(mixing_weights("metropolis", make_graph(graph, nodes)))
    print(f"{graph:9} {left:.2f}")

# %%
# The same training on three graphs. ``local`` is a node's own test data, ``pooled`` everybody's.

found = {}
for graph in ("ring", "torus", "complete"):
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=8,
        callbacks=[DFedAvg(topology=graph)],
        evaluation=Evaluation(stages=["L1"], test_data=["local", "pooled"]),
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.3), batch_size=16)
    trainer.fit(Classifier(MLP(64, [32], 10), num_classes=10, lr=0.1), data)
    trainer.test(verbose=False)
    rows = [row for row in trainer.results if row["metric"] == "test_accuracy" and row["model"] == "personal"]
    found[graph] = [row["mean"] for data in ("local", "pooled") for row in rows if row["data"] == data]
    found[graph].append(trainer.summary["bytes_up"] / 1e6)
    print(f"{graph:9} own data {found[graph][0]:.3f}, everybody's {found[graph][1]:.3f}, {found[graph][2]:.1f} MB")

# %%
# The better the graph is connected, the more each node knows of the others' data, and the more is sent.

for place, (label, number) in enumerate({"own data": 0, "everybody's data": 1}.items()):
    plt.bar(
        [n + 0.4 * (place - 0.5) for n in range(len(found))], [v[number] for v in found.values()], 0.38, label=label
    )
plt.xticks(range(len(found)), [f"{graph}\n{values[2]:.0f} MB" for graph, values in found.items()])
plt.ylabel("test accuracy")
plt.legend(loc="lower right")
plt.show()

"""
Which layers to share: PLayer-FL
================================

Early layers of a network are often alike for all clients, late ones are not. PLayer-FL measures in round 1 how sensitive
each layer is, shares the first ones and leaves the others to each client.
"""

import json
import tempfile

import matplotlib.pyplot as plt
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import PLayerFL
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import Classifier, DigitsCNN
from fedlightning.options import Evaluation

torch.manual_seed(0)
trainer = FederatedTrainer(
    max_rounds=5,
    callbacks=[PLayerFL(threshold=1.05)],
    evaluation=Evaluation(stages=["L1"]),
    default_root_dir=tempfile.mkdtemp(),
    enable_progress_bar=False,
)
data = DigitsDataModule(DirichletPartitioner(num_clients=5, alpha=0.5), batch_size=16)
trainer.fit(Classifier(DigitsCNN(), num_classes=10, lr=0.05), data)

# %%
# The run wrote what it measured: the cumulative sensitivity ``F`` of the layers, and how many of them it shares.

found = json.loads((trainer.run.path / "sensitivity.json").read_text())
print(json.dumps(found, indent=1)[:600])

# %%
# And a figure. Its third panel says how much the threshold matters: where the step is long, hardly.

picture = plt.imread(trainer.run.path / "figures" / "sensitivity.png")
plt.figure(figsize=(10, 10 * picture.shape[0] / picture.shape[1]))
plt.imshow(picture)
plt.axis("off")
plt.show()

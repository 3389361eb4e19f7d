"""
Clients whose data differ, and what that does
=============================================

FedAvg averages models that were trained on different data. Here ten clients share 1797 handwritten digits, first evenly and then
so that each has only a few kinds of digits, and the same network is trained in the same way on both splits.
"""

import matplotlib.pyplot as plt

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner, IIDPartitioner, plot_partition
from fedlightning.models import Classifier, DigitsCNN

# %%
# A partitioner says who has which samples. The smaller `alpha` of a Dirichlet split is, the fewer classes a client has.

even = DigitsDataModule(IIDPartitioner(num_clients=10), batch_size=16)
skewed = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.1), batch_size=16)
skewed.setup()
plot_partition(skewed)
plt.show()

# %%
# The same six rounds on both. `stage="G"` is the server's model after aggregation, scored on each client's own validation data.

curves = {}
for name, data in {"even": even, "skewed": skewed}.items():
    trainer = FederatedTrainer(
        max_rounds=6, local_epochs=1, callbacks=[FedAvg()], logger=False, enable_progress_bar=False, save_state=0
    )
    trainer.fit(Classifier(DigitsCNN(), num_classes=10, lr=0.1), data)
    curves[name] = [row["mean"] for row in trainer.results if row["stage"] == "G" and row["metric"] == "val_accuracy"]
print({name: [round(value, 3) for value in values] for name, values in curves.items()})

# %%
# With skewed data the mean of ten models is worse than each of them: they were trained towards different goals.

for name, values in curves.items():
    plt.plot(range(1, len(values) + 1), values, marker="o", label=name)
plt.xlabel("round")
plt.ylabel("validation accuracy of the global model")
plt.legend()
plt.show()

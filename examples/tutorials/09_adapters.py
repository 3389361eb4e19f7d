"""
Fine-tune a pretrained network with adapters
============================================

A large pretrained network need not travel. FedIT trains low-rank adapters and sends only these. The network here is small
and was trained on digits that lie on their side; the clients have upright ones. Needs ``peft`` (the extra ``lora``).
"""

import tempfile

from fedlightning import FederatedTrainer  # before lightning

# isort: split
import lightning as L
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import FedAvg, FedIT
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation
from fedlightning.study.finished_runs import load_run
from fedlightning.study.learning_curves import round_means

# %%
# The pretrained network: an ordinary Lightning training, on digits that are transposed.

L.seed_everything(0, verbose=False)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).transpose(1, 2).unsqueeze(1) / 16
loader = DataLoader(TensorDataset(images.contiguous(), torch.tensor(digits.target)), batch_size=32, shuffle=True)
pretrained = Classifier(MLP(64, [128, 64], 10), num_classes=10, lr=0.1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
L.Trainer(max_epochs=5, **quiet).fit(pretrained, loader)
weights = {name: value.clone() for name, value in pretrained.state_dict().items()}

# %%
# Federate it twice: the whole network, and adapters of rank 4.

curves, sent = {}, {}
for name, method in {"FedAvg, all weights": FedAvg(), "FedIT, adapters": FedIT(r=4)}.items():
    L.seed_everything(0, verbose=False)
    module = Classifier(MLP(64, [128, 64], 10), num_classes=10, lr=0.05)
    module.load_state_dict(weights)
    trainer = FederatedTrainer(
        max_rounds=6,
        local_epochs=2,
        callbacks=[method],
        evaluation=Evaluation(stages=["G"]),
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    trainer.fit(module, DigitsDataModule(DirichletPartitioner(num_clients=6, alpha=1.0), batch_size=16))
    means = round_means(load_run(trainer.run.path), "accuracy")
    curves[name] = [value for (stage, _, _), value in means.items() if stage == "G"]
    sent[name] = (trainer.summary["bytes_up"] + trainer.summary["bytes_down"]) / 1e6
    print(f"{name:20} {curves[name][-1]:.3f}, {sent[name]:.2f} MB sent")

# %%
# Adapters send a fraction. That they learn less here is expected: a small network has to change a lot.

for name, values in curves.items():
    plt.plot(range(1, len(values) + 1), values, marker="o", label=f"{name}: {sent[name]:.1f} MB")
plt.xlabel("round")
plt.ylabel("accuracy of the global model")
plt.legend()
plt.show()

# %%
# A network of ``transformers`` goes the same way: ``HFModule.from_trainer(model, args)`` around the model, ``TextDataModule``
# around each client's rows. ``examples/finetune_texts.py`` fine-tunes one that lies in a folder, on texts of eight clients
# (Dirichlet 0.3): adapters for all, adapters with a head of one's own, FedSA-LoRA, each client alone, and pooled data, over
# as many seeds as you name, with a report:
#
# .. code-block:: bash
#
#    python examples/finetune_texts.py --model MiniLM --texts mails --seeds 0 1 2
#
# With eight clients and MiniLM-L6 (91 MB) there are 91 MB of frozen numbers in memory and not 727, and 4.8 MB travel a round.
#
# The same in YAML, on mails in folders ``ham`` and ``spam``: ``configs/language/mails.yaml``; ``mails_methods.yaml`` beside
# it compares the methods. On three splits of 800 mails one of FedIT's three runs learnt nothing (0.37; Local has 0.93); with
# a head or factors of their own clients have 0.95 and 0.96, intervals that overlap Local's.

"""
Write an algorithm: FedDyn in 24 lines of code
==============================================

An algorithm is one class, a ``FederatedCallback``. This tutorial takes one published method from its pseudocode to a
comparison: FedDyn (Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
regularization", ICLR 2021). What to look up beside it is in :doc:`/how-to/write_an_algorithm`.

.. code-block:: text

    server: h <- 0;  every client: g_k <- 0
    for each round, with participants P out of m clients:
        every k in P receives theta and finds
            theta_k = argmin  L_k(w) - <g_k, w> + (alpha/2) ||w - theta||^2
            g_k <- g_k - alpha (theta_k - theta)
        server:
            h     <- h - (alpha/m) sum_{k in P} (theta_k - theta)
            theta <- mean_{k in P} theta_k - h / alpha

Four questions lead from here to code.

* What travels? ``theta`` down, ``theta_k`` up: the whole model. That is the default.
* What is kept, and where? ``g_k`` at each client for ever, ``h`` at the server: ``client.state``, ``server.state``.
* What does a client do differently? Two more terms in its objective: ``correct_gradient``, then ``on_send``.
* What does the server do differently? A correction of the mean: ``on_update``, then ``server_step``.

The client's step
-----------------

The gradient of FedDyn's objective is the task's, minus ``g_k``, plus ``alpha (w - theta)``. ``correct_gradient`` runs for
every parameter before each optimizer step: after unscaling, before clipping. ``ctx.anchor`` is what the server sent.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedDyn.correct_gradient

After training, before the update leaves, ``g_k`` moves. ``client.lr_sums`` has the names of the parameters that were stepped.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedDyn.on_send

The server's step
-----------------

``on_update`` sees each update once, in client order. The paper divides by all ``m`` clients, not by the participants.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedDyn.on_update

The core then averages, and ``server_step`` gets the old and the averaged entries.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedDyn.server_step

The whole class, with its option, is in `examples/own_algorithm.py`:

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedDyn
"""

import sys
import tempfile
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch.optim import SGD

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import Classifier, DigitsCNN
from fedlightning.study.curves import round_means
from fedlightning.study.runs import load_run
from fedlightning.testing import check_algorithm

sys.path.insert(0, "..")  # examples/, where own_algorithm.py is
from own_algorithm import FedDyn

# %%
# Conformance checks train small federations and hold the callback to what every algorithm must keep. Here are three of them;
# a test of yours runs them all.

print(check_algorithm(FedDyn(), only=["arguments", "copies", "identical_clients"]))

# %%
# Beside FedAvg, on ten clients with very different digits.

for name, algorithm in {"FedAvg": FedAvg(weighting="uniform"), "FedDyn": FedDyn(alpha=0.1)}.items():
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=8,
        local_epochs=2,
        callbacks=[algorithm],
        stages=["G"],
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.1), batch_size=16)
    trainer.fit(Classifier(DigitsCNN(), num_classes=10, optimizer=partial(SGD, lr=0.05)), data)
    means = round_means(load_run(trainer.run.path), "accuracy")
    plt.plot([number for _, _, number in means], list(means.values()), marker="o", label=name)
plt.xlabel("round")
plt.ylabel("accuracy of the global model")
plt.legend()
plt.show()

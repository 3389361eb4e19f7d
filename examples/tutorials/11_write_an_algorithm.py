"""
Write an algorithm: FedCM in 34 lines of code
=============================================

An algorithm is one class, a ``FederatedCallback``. This tutorial takes one published method from its pseudocode to a
comparison: FedCM (Xu, Wang, Wang, Yao, "FedCM: federated learning with client-level momentum", 2021). What to look up beside
it is in :doc:`/how-to/write_an_algorithm`.

.. code-block:: text

    server: Delta <- 0
    for each round, with m participants:
        every participant i receives w and Delta, and begins from y = w
            for each step with learning rate eta:
                y <- y - eta (alpha g(y) + (1 - alpha) Delta)
            w_i = y,  s_i = the sum of its etas
        server:
            Delta <- (1/m) sum_i (w - w_i) / s_i
            w     <- (1/m) sum_i w_i

``Delta`` is the direction in which all clients went last. A client that follows it strays less towards its own data.

Four questions lead from here to code.

* What travels? ``w`` down, ``w_i`` up: the whole model, which is the default. Beside it ``Delta`` down, which is as large as
  the model, and ``s_i`` up, a number: ``wire``.
* What is kept, and where? ``Delta`` at the server: ``server.state``. Clients keep nothing, so one may be there only once.
* What does a client do differently? Another gradient: ``correct_gradient``.
* What does the server do differently? It works out ``Delta``: ``on_update``, then ``server_step``.

What travels
------------

Whatever is sent beside the model is declared, checked on arrival and counted in bytes.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedCM.wire

The server adds ``Delta`` to every message. Entries that stay with the client are left out.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedCM.on_broadcast

The client's step
-----------------

``correct_gradient`` runs for every parameter before each optimizer step: after unscaling, before clipping. ``ctx.payload`` is
what ``on_broadcast`` added. FedCM scales the task's gradient, so its ``rank`` puts it before callbacks that add to it.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedCM.correct_gradient

After training, ``client.lr_sum`` is the sum of the learning rates of the steps really taken.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedCM.on_send

The server's step
-----------------

``on_update`` sees each update once, in client order. It only adds up: messages of this round may still be made, and all
clients of a round are to get one ``Delta``.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedCM.on_update

The core then averages, and ``server_step`` gets the old and the averaged entries.

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedCM.server_step

The whole class, with its option, is in `examples/own_algorithm.py`:

.. literalinclude:: ../../examples/own_algorithm.py
   :pyobject: FedCM
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
from fedlightning.options import Evaluation
from fedlightning.study.finished_runs import load_run
from fedlightning.study.learning_curves import round_means
from fedlightning.testing import check_algorithm

sys.path.insert(0, "..")  # examples/, where own_algorithm.py is
from own_algorithm import FedCM

# %%
# Conformance checks train small federations and hold the callback to what every algorithm must keep. Here are three of them;
# a test of yours runs them all.

print(check_algorithm(FedCM(), only=["arguments", "copies", "identical_clients"]))

# %%
# Beside FedAvg, on ten clients with very different digits. The paper's ``alpha`` is 0.1, for hundreds of rounds: ``Delta``
# starts at 0, so that first steps are a tenth as long.

for name, algorithm in {"FedAvg": FedAvg(weighting="uniform"), "FedCM": FedCM(alpha=0.5)}.items():
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=9,
        local_epochs=2,
        callbacks=[algorithm],
        evaluation=Evaluation(stages=["G"]),
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
    )
    data = DigitsDataModule(DirichletPartitioner(num_clients=10, alpha=0.1), batch_size=16)
    trainer.fit(Classifier(DigitsCNN(), num_classes=10, optimizer=partial(SGD, lr=0.2)), data)
    means = round_means(load_run(trainer.run.path), "accuracy")
    plt.plot([number for _, _, number in means], list(means.values()), marker="o", label=name)
plt.xlabel("round")
plt.ylabel("accuracy of the global model")
plt.legend()
plt.show()

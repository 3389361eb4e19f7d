"""FedAvg without FederatedTrainer: what a federated run is, on one page, from top to bottom.

Six clients with unlike digits train, the server averages what they send, and three stages are scored: the server's model
(G), what a client holds after receiving it (L1), and after training (L2). Model and scores are FederatedTrainer's, bit for
bit: tests/test_essay.py. Of the package this page takes data, arithmetic and the addresses of random numbers.

    python examples/essay.py
"""

import copy
import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fedlightning.client.data_summary import EPOCHS_OF_A_VISIT
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.seeding import first_of_permutation, generator, isolated, seed_all
from fedlightning.tensors import State, WeightedMean, clone, load_state, module_state

SEED, ROUNDS, EPOCHS, SHARE = 0, 3, 2, 0.5
SHOWN = ("checkpointing", "progress_bar", "model_summary")
QUIET: dict[str, Any] = {"logger": False} | {f"enable_{name}": False for name in SHOWN}


class SeedEpochs(Callback):
    """Every epoch draws by its own address: seed, round, client, epoch. So it does not matter who trains before whom."""

    def __init__(self, round_number: int, client: str) -> None:
        self.address = (SEED, round_number, client, "fit")

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        seed_all(*self.address, trainer.current_epoch)


def visit(template: LightningModule, sent: State, data: Any, client: str, round_number: int) -> LightningModule:
    """A client fills a module with what was sent and trains it on its own data."""
    module, loader = copy.deepcopy(template), data.client_dataloader(client, "train")
    load_state(module, sent)
    seed_all(SEED, round_number, client, "visit")
    loader.sampler.start(seed=SEED, round=round_number, epochs_per_round=EPOCHS_OF_A_VISIT)  # the order of its batches
    trainer = Trainer(max_epochs=EPOCHS, limit_val_batches=0, callbacks=[SeedEpochs(round_number, client)], **QUIET)
    trainer.fit(module, loader)
    return module


def score(module: LightningModule, data: Any, client: str) -> float:
    """Score a model by its own validation step on a client's data; nobody else's random numbers move."""
    with isolated(SEED, "score"):
        results = Trainer(**QUIET).validate(copy.deepcopy(module), data.client_dataloader(client, "val"), verbose=False)
        return results[0]["val_accuracy"]


def federate(template: LightningModule, data: Any) -> tuple[State, dict[tuple[str, str], float]]:
    """The server draws clients, visits them, averages what they send, scores. Returns its model; scores by stage, client."""
    data.prepare_data()
    data.setup("fit")
    server, clients, scores = clone(module_state(template)), data.client_ids, {}
    for round_number in range(ROUNDS):
        draws = generator(SEED, round_number, "server", "participation")
        participants = sorted(first_of_permutation(len(clients), round(SHARE * len(clients)), draws))
        mean, scores = WeightedMean(), {}
        for client in (clients[place] for place in participants):
            module = visit(template, server, data, client, round_number)
            mean.add(
                clone(module_state(module)), weight=data.num_samples(client)
            )  # in float64, in the order of clients
            scores["L2", client] = score(module, data, client)
        server |= mean.result()
        deployed = copy.deepcopy(template)
        load_state(deployed, server)
        for client in clients:  # in FedAvg a client deploys what the server has
            scores["G", client] = scores["L1", client] = score(deployed, data, client)
    return server, scores


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(SEED)
    digits = DigitsDataModule(DirichletPartitioner(6, alpha=0.5), batch_size=32, seed=SEED)
    _, scores = federate(Classifier(MLP(64, [16], 10), num_classes=10, lr=0.1), digits)
    for (stage, client), accuracy in sorted(scores.items()):
        print(f"{stage}  client {client}  {accuracy:.3f}")

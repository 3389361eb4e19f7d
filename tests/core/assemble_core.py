"""A federation of the core alone: no checks, no saving, no fast loop, no clock. It trains and scores as the whole does.

python -m tests.core.assemble_core SCAFFOLD     # prints digests of the model and of the scores
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule

from fedlightning import callbacks
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.requests import LocalSettings
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import CallbackList, FederatedCallback
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.engines.contract import ClientRecords
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.models import MLP, Classifier
from fedlightning.run.recorder import Recorder
from fedlightning.scores.rows import LOCAL, Row
from fedlightning.server.federation import Federation
from fedlightning.server.population import Population
from fedlightning.server.server import Server
from fedlightning.tensors import State

ROUNDS = 2


def assemble_core(
    model: LightningModule, data: FederatedDataModule, methods: list[FederatedCallback], max_rounds: int = ROUNDS
) -> Federation:
    """Put a federation together out of what trains and scores."""
    settings = LocalSettings(seed=0, max_rounds=max_rounds, trainer_arguments={"accelerator": "cpu", "devices": 1})
    blueprint, store = Blueprint(model, CallbackList(methods), settings), ClientRecords()
    engine = SequentialEngine(ClientRuntime(blueprint, data), store)
    engine.set_up("fit")
    known = engine.describe()
    samples = {client: known.num_samples(client) for client in known.client_ids}
    population = Population(samples, sizes=known.sizes, public_source=engine.public)
    server = Server(blueprint, population, max_rounds=max_rounds, participation=0.5)
    stages, local = ("G", "L1", "L2"), (LOCAL,)
    return Federation(server, store, engine, Recorder(), stages, local, test_data=(), evaluate_every=1)


def scene(method: str) -> tuple[LightningModule, FederatedDataModule, list[FederatedCallback]]:
    """Return module, data and callbacks of a small run."""
    torch.manual_seed(0)
    data = DigitsDataModule(DirichletPartitioner(4, alpha=0.5), batch_size=32, seed=0, max_train=200)
    return Classifier(MLP(64, [8], 10), num_classes=10, lr=0.1), data, [getattr(callbacks, method)()]


def digests(model: State, rows: list[Row]) -> dict[str, str]:
    """Return a digest of a model's entries, and of all scores."""
    entries = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(model.items()))
    scores = sorted(repr((*row.address, row.value)) for row in rows)
    return {"model": hashlib.sha256(entries).hexdigest(), "scores": hashlib.sha256(repr(scores).encode()).hexdigest()}


def run(method: str) -> dict[str, Any]:
    """Train and score with the core alone."""
    federation = assemble_core(*scene(method))
    federation.begin()
    while not federation.is_over:
        federation.round()
    federation.finish()
    return digests(federation.server.model, list(federation.recorder.rows))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rooms = sorted({name.split(".")[1] for name in sys.modules if name.startswith("fedlightning.")})
    print(json.dumps({"rooms": rooms} | {method: run(method) for method in sys.argv[1:]}))

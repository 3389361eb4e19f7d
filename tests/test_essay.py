"""The essay is a whole federated run on one page; its model and scores are FederatedTrainer's, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation
from tests.helpers import same

ESSAY = Path(__file__).parents[1] / "examples" / "essay.py"


@pytest.fixture
def essay():
    spec = importlib.util.spec_from_file_location("essay", ESSAY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("local_loop", ["fast", "trainer"])
def test_the_essay_is_what_the_trainer_does(essay, local_loop, tmp_path):
    def digits():
        return DigitsDataModule(DirichletPartitioner(6, alpha=0.5), batch_size=32, seed=essay.SEED, max_train=300)

    torch.manual_seed(essay.SEED)
    essay.ROUNDS = 2
    template = Classifier(MLP(64, [16], 10, dropout=0.2), num_classes=10, lr=0.1)
    model, scores = essay.federate(template, digits())
    trainer = FederatedTrainer(
        max_rounds=essay.ROUNDS,
        local_epochs=essay.EPOCHS,
        participation=essay.SHARE,
        seed=essay.SEED,
        callbacks=[FedAvg()],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        local_loop=local_loop,
        evaluation=Evaluation(test_data=[]),
        default_root_dir=tmp_path,
    )
    trainer.fit(template, digits())
    same(model, trainer.server.model)
    rows = [row for row in trainer.rows if row.round == essay.ROUNDS and row.metric == "val_accuracy"]
    assert {(row.stage, row.client): row.value for row in rows} == scores
    assert {stage for stage, _ in scores} == {"G", "L1", "L2"}


def test_the_essay_is_short():
    assert len(ESSAY.read_text().splitlines()) <= 85, "One page."

"""Evaluation under ``vectorized`` gives the rows of ``sequential``, from a stack."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedlightning  # noqa: F401  before lightning
from fedlightning.algorithm import ModelSelection

# isort: split
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fedlightning import FederatedCallback
from fedlightning.callbacks import APFL, FENDA, Ditto, FedAvg, FedPer, LocalCheckpoint, pFedMe
from fedlightning.client.requests import Evaluate
from fedlightning.models import Classifier
from fedlightning.server import evaluation as stages
from fedlightning.stacked import stacked_evaluation
from tests.helpers import CLASSES, FEATURES, NormNet, PiecesStyle, Toy, toy_data
from tests.stacked.scored import (
    SIZES,
    TRIALS,
    Federation,
    all_of,
    assert_same,
)


class Plain(Toy):
    """Logs in every way that has a value for the epoch."""

    def score(self, batch: Any, split: str) -> None:
        x, y = batch
        loss = F.cross_entropy(self(x), y, reduction="none")
        self.log(f"{split}_loss", loss.mean())
        self.log(f"{split}_sum", loss.sum(), reduce_fx="sum")
        self.log_dict({f"{split}_max": loss.max(), f"{split}_n": len(y)}, reduce_fx=torch.max)
        self.log(f"{split}_min", loss.min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.log(f"{split}_weighted", loss.mean(), batch_size=3)
        self.log(f"{split}_right", (self(x).argmax(1) == y).sum())
        self.log(f"{split}_hidden", loss.mean(), logger=False)


class LossOnly(Toy):
    """Logs nothing and returns its loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self(batch[0]), batch[1]), "other": 1}

    def test_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class ByIndex(Toy):
    """Logs more in the first batch than in others."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.log("first", F.cross_entropy(self(batch[0]), batch[1]))
        self.log("index", float(batch_idx))


class Metrics(Toy):
    """Logs torchmetrics objects, or their values in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.inner = nn.ModuleDict({"f1": MulticlassF1Score(CLASSES, average="macro")})
        self.hand = MulticlassAccuracy(CLASSES, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("loss", F.cross_entropy(logits, batch[1]))
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.inner["f1"].update(preds=logits, target=batch[1])
        self.log("f1", self.inner["f1"])
        self.hand.update(logits, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("hand", self.hand.compute())
        self.hand.reset()


def digits(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


STACKED: dict[str, tuple[Any, list[FederatedCallback]]] = {
    "plain": (Plain(), [FedAvg()]),
    "pieces": (PiecesStyle(), [FedAvg()]),
    "norm": (NormNet(dropout=0.5), [FedAvg()]),
    "loss-only": (LossOnly(), [FedAvg()]),
    "by-index": (ByIndex(), [FedAvg()]),
    "metrics": (Metrics(), [FedAvg()]),
    "classifier": (Classifier(digits(), CLASSES), [FedAvg()]),
    "personal": (Plain(), [FedPer(personal=["net.3"])]),
    "ditto": (Toy(), [Ditto(lam=0.5)]),
    "fenda": (NormNet(), [FENDA(head="net.3")]),
    "apfl": (Toy(), [APFL(alpha=0.3)]),
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.fast_cases(6)
def test_rows_are_those_of_sequential(name: str) -> None:
    module, callbacks = copy.deepcopy(STACKED[name])
    assert Federation(module, callbacks).compare() <= TRIALS


@pytest.mark.parametrize("size", [2, 3])
def test_the_size_of_a_stack_does_not_matter(size: int) -> None:
    Federation(Classifier(digits(), CLASSES)).compare(size=size)


def test_pooled_and_foreign_data() -> None:
    data = ("local", "pooled", "clients")
    assert Federation(Plain(), [FedPer(personal=["net.3"])]).compare(Evaluate(("val",), data)) <= TRIALS


@pytest.mark.parametrize(
    "options",
    [
        {"limit_val_batches": 2, "limit_test_batches": 1},
        {"precision": "64-true"},
        {"inference_mode": False},
    ],
    ids=str,
)
def test_trainer_arguments(options: dict[str, Any]) -> None:
    assert Federation(Plain(), **options).compare() <= TRIALS


def test_mixed_precision() -> None:
    Federation(LossOnly(), precision="bf16-mixed").compare(tolerance=1e-2)


def test_personal_modules_that_are_trained_for_the_evaluation() -> None:
    Federation(Toy(), [pFedMe()]).compare()


# -- what is around the scores -----------------------------------------------------------------------------------------
def test_metrics_that_would_be_fed_with_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_evaluation, "MAX_OUTPUT_BYTES", 100)
    clients = len(SIZES["val"])
    assert Federation(Metrics()).compare(Evaluate(("val",)), tolerance=0.0) in all_of(clients)


# -- loaders -----------------------------------------------------------------------------------------------------------


class Listens(ModelSelection):
    """Notes who was evaluated, and what its own client and its module's head were."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_client_evaluated(self, client: Any, stage: str, split: str, metrics: Any, module: Any) -> None:
        head = module.net[3].bias.tolist()
        self.heard.append((client.id, self.client_of_mine, stage, split, sorted(metrics), head))

    @property
    def client_of_mine(self) -> str:
        return str(self._client.id)


def test_callbacks_are_told_client_by_client() -> None:
    federation = Federation(Toy(), [FedPer(personal=["net.3"]), Listens()])
    heard = next(callback for callback in federation.server.callbacks if isinstance(callback, Listens)).heard
    told = []
    for engine in federation.engines():
        heard.clear()
        stages.score_received_models(federation.server, engine, Evaluate(("val", "test"), ("local", "pooled")))
        told.append(list(heard))
    assert told[0] == told[1]
    assert [(client, split) for client, _, _, split, *_ in told[0]] == [
        (client, split) for client in federation.server.clients for split in ("val", "test")
    ]
    assert all(client == mine for client, mine, *_ in told[1])


def test_scores_of_the_global_model_are_taken_over() -> None:
    federation = Federation(Toy())
    evaluate = Evaluate(("val",))
    _, engine = federation.engines()
    known = stages.score_global_model(federation.server, engine, evaluate)
    scored: list[int] = []
    engine._evaluation.scores = lambda requests: scored.append(len(requests)) or []  # type: ignore[method-assign,func-returns-value]
    rows = stages.score_received_models(federation.server, engine, evaluate, known)
    assert not scored
    assert [(row.client, row.metric, row.value) for row in rows] == [
        (row.client, row.metric, row.value) for row in known
    ]


def test_kept_checkpoints_are_those_of_sequential() -> None:
    federation = Federation(Toy(), [FedPer(personal=["net.3"]), LocalCheckpoint()])
    one, stacked = federation.engines()
    for engine in (one, stacked):
        stages.score_received_models(federation.server, engine, Evaluate(("val",)))
    rows = [stages.checkpoint_rows(federation.server, engine, Evaluate(("test",))) for engine in (one, stacked)]
    assert_same(*rows)
    assert {row.checkpoint for row in rows[1]} == {"best_local"}


def test_nothing_is_drawn_and_nothing_is_changed() -> None:
    federation = Federation(Metrics(), [FedPer(personal=["net.3"])])
    _, engine = federation.engines()
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    first, again = (stages.score_received_models(federation.server, engine, Evaluate(("val",))) for _ in range(2))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and np.array_equal(before[2], after[2])
    assert_same(first, again)
    module = federation.server.module_with(federation.server.model)
    known = copy.deepcopy(module.state_dict()), module.training, vars(module).keys()
    stages.score_global(federation.server, engine, module, Evaluate(("val",)), stages.ScoredModel(1, "G", "global"))
    assert all(torch.equal(value, known[0][name]) for name, value in module.state_dict().items())
    assert (module.training, vars(module).keys()) == known[1:]
    assert not module.hand.update_called and isinstance(module.accuracy, MulticlassAccuracy)


def test_a_client_with_bad_data_fails_as_it_does_alone() -> None:
    data = toy_data((8, 8, 8, 8))
    data.tensors["2"]["val"][1][3] = CLASSES + 4
    federation = Federation(Classifier(digits(), CLASSES), data=data)
    messages = []
    for engine in federation.engines():
        with pytest.warns(UserWarning, match=f"client '2' was not scored .* Label {CLASSES + 4}") as caught:
            rows = stages.score_received_models(federation.server, engine, Evaluate(("val",)))
        assert {row.client for row in rows} == {"0", "1", "3"}
        messages.append([str(warning.message) for warning in caught])
        assert all("_client" not in vars(callback) for callback in federation.server.callbacks)
    assert messages[0] == messages[1]

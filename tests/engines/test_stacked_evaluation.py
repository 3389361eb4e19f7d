"""Evaluation under ``vectorized`` gives the rows of ``sequential``: from a stack where it can, one by one where not."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedlightning  # noqa: F401  before lightning

# isort: split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fedlightning import FederatedCallback
from fedlightning.callbacks import APFL, FENDA, Ditto, FedAvg, FedPer, LocalCheckpoint, PFedMe
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.datamodules.views import ArrayDataset, IndexView, collate_rows
from fedlightning.engines import stacked_evaluation
from fedlightning.engines.base import Engine
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.engines.vectorized import VectorizedEngine
from fedlightning.evaluation import stages
from fedlightning.evaluation.results import Row
from fedlightning.local import Evaluate
from fedlightning.models import Classifier
from tests.helpers import CLASSES, FEATURES, NormNet, PiecesStyle, Toy, ToyData, federate, samples, toy_data

SIZES = {"val": (10, 16, 3, 8, 1, 20, 16), "test": (8, 5, 24, 16, 9, 3, 5)}
"""In batches of 8: whole ones, ragged last ones (some of them alike), a single sample."""
TOLERANCE = 1e-6


def unequal_data() -> ToyData:
    """Seven clients whose validation and test data differ in size."""
    counts = [{"train": 12, "val": val, "test": test} for val, test in zip(SIZES["val"], SIZES["test"], strict=True)]
    named = {str(i): count for i, count in enumerate(counts)}
    return ToyData({c: {split: samples(c, split, n) for split, n in count.items()} for c, count in named.items()})


@dataclass
class Outcome:
    """What an engine made of an evaluation, and how many models it scored one by one."""

    rows: list[Row]
    alone: int


class Federation:
    """A federation that was trained by ``sequential``, to be scored by any engine."""

    def __init__(self, module: Any, callbacks: Sequence[Any] = (), data: Any = None, **options: Any) -> None:
        data = unequal_data() if data is None else data
        self.trainer = federate(module, data, list(callbacks) or [FedAvg()], max_rounds=1, local_epochs=1, **options)
        assert self.trainer.server is not None
        self.server, self.runner, self.store = self.trainer.server, self.trainer.server.runner, self.trainer.store

    def engines(self, size: int = 64) -> tuple[Engine, VectorizedEngine]:
        """One after another, and stacked."""
        return (
            SequentialEngine(self.runner, copy.deepcopy(self.store)),
            VectorizedEngine(self.runner, copy.deepcopy(self.store), size),
        )

    def outcome(self, engine: Engine, evaluate: Evaluate) -> Outcome:
        """Rows of stage G, and of stage L1 without taking anything over from G."""
        scorer, alone = self.runner.scorer, 0
        score = scorer.score

        def counted(*args: Any) -> dict[str, float]:
            nonlocal alone
            alone += 1
            return score(*args)

        scorer.score = counted  # type: ignore[method-assign]
        try:
            rows = stages.stage_g(self.server, engine, evaluate) + stages.stage_l1(self.server, engine, evaluate)
        finally:
            del scorer.score
        return Outcome(rows, alone)

    def compare(self, evaluate: Evaluate | None = None, size: int = 64, tolerance: float = TOLERANCE) -> int:
        """Assert that both engines give the same rows; how many models were scored alone when stacked."""
        evaluate = Evaluate(("val", "test")) if evaluate is None else evaluate
        one, stacked = (self.outcome(engine, evaluate) for engine in self.engines(size))
        assert_same(one.rows, stacked.rows, tolerance)
        return stacked.alone


def assert_same(one: list[Row], other: list[Row], tolerance: float = TOLERANCE) -> None:
    """Assert the same rows in the same order, and values that differ by rounding only."""
    assert one
    assert [place(row) for row in one] == [place(row) for row in other]
    expected, found = (torch.tensor([row.value for row in rows]) for rows in (one, other))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def place(row: Row) -> tuple[Any, ...]:
    """All of a row but its value."""
    return tuple(value for name, value in vars(row).items() if name != "value")


TRIALS = 4
"""Two modules are scored both ways, once for validation and once for test."""


# -- what is stacked ---------------------------------------------------------------------------------------------------
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


# -- what is not -------------------------------------------------------------------------------------------------------
class BatchHook(Toy):
    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("in_hook", 1.0)


class Transfer(Toy):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]


class Draws(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x + torch.randn_like(x))


class DrawsInPython(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x * random.random() + np.random.rand())


class Branches(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * (2 if x.sum() > 0 else 1)


class Collects(Toy):
    """Keeps outputs in a list until the epoch's end, as people did without metrics."""

    def on_validation_epoch_start(self) -> None:
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.append((self(batch[0]).argmax(1) == batch[1]).float())

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", torch.cat(self.kept).mean())


class Counts(Toy):
    """Keeps a count in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def on_validation_epoch_start(self) -> None:
        self.seen = torch.zeros(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count(len(batch[1]))
        self.log("seen", self.seen, reduce_fx="max")

    def count(self, number: int) -> None:
        self.seen = self.seen + number


class CountsInPlace(Counts):
    """Changes the buffer in place."""

    def count(self, number: int) -> None:
        self.seen += number


class CountsInPython(Toy):
    """Keeps a plain number."""

    seen = 0

    def on_validation_epoch_start(self) -> None:
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[1])
        self.log("seen", float(self.seen), reduce_fx="max")


class AsksTheTrainer(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("batches", float(self.trainer.num_val_batches[0]))


class Collection(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.scores = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute())
        self.scores.reset()


ALONE = (
    BatchHook,
    Transfer,
    Draws,
    DrawsInPython,
    Branches,
    Collects,
    Counts,
    CountsInPlace,
    CountsInPython,
    AsksTheTrainer,
    Collection,
)


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_what_a_stack_cannot_do_is_scored_one_by_one(kind: type[Toy]) -> None:
    clients = len(SIZES["val"])
    assert Federation(kind()).compare(Evaluate(("val",)), tolerance=0.0) == 2 * clients


class Gain(FederatedCallback):
    """Each client's model has a plain value of its own."""

    def on_receive(self, client: Any, message: Any) -> None:
        client.module.lr = float(client.id)


class Gained(Toy):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.lr


class HookOnClients(FederatedCallback):
    """Odd clients' models have a forward hook."""

    def on_receive(self, client: Any, message: Any) -> None:
        if int(client.id) % 2:
            client.module.net.register_forward_hook(lambda module, args, output: 3 * output)


class OwnTensor(FederatedCallback):
    """Each client's model has a tensor of its own that is neither parameter nor buffer."""

    def on_receive(self, client: Any, message: Any) -> None:
        client.module.shift = torch.full((), float(client.id))


class Shifted(Toy):
    shift: Any = 0.0

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x + self.shift)


@pytest.mark.parametrize(
    ("module", "callback"),
    [(Gained(), Gain()), (Toy(), HookOnClients()), (Shifted(), OwnTensor())],
    ids=lambda value: type(value).__name__,
)
def test_models_that_differ_in_more_than_tensors(module: Toy, callback: FederatedCallback) -> None:
    Federation(module, [FedAvg(), callback]).compare()


class Late(Toy):
    """Its third batch cannot be stacked."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scale = 1.0 if batch_idx < 2 or batch[0].sum() > 0 else 2.0
        self.log("val_loss", scale * F.cross_entropy(self(batch[0]), batch[1]))


def test_a_class_that_fails_late_is_scored_one_by_one_from_then_on() -> None:
    sizes = (10, 16, 20, 20)
    named = {str(i): {"train": 8, "val": val, "test": 1} for i, val in enumerate(sizes)}
    data = ToyData({c: {split: samples(c, split, n) for split, n in count.items()} for c, count in named.items()})
    assert Federation(Late(), data=data).compare(Evaluate(("val",)), tolerance=0.0) == 2 * len(sizes)


@pytest.mark.parametrize("kind", [Counts, CountsInPlace, CountsInPython])
def test_what_steps_leave_behind_is_noticed_where_clients_are_alike(kind: type[Toy]) -> None:
    data = toy_data((8, 8, 8, 8), val=16)
    assert Federation(kind(), data=data).compare(Evaluate(("val",)), tolerance=0.0) == 2 * 4


def test_metrics_that_would_be_fed_with_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_evaluation, "HELD", 100)
    clients = len(SIZES["val"])
    assert Federation(Metrics()).compare(Evaluate(("val",)), tolerance=0.0) == 2 * clients


# -- what is around the scores -----------------------------------------------------------------------------------------
class Listens(FederatedCallback):
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
        stages.stage_l1(federation.server, engine, Evaluate(("val", "test"), ("local", "pooled")))
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
    known = stages.stage_g(federation.server, engine, evaluate)
    scored: list[int] = []
    engine._evaluation.scores = lambda wanted: scored.append(len(wanted)) or []  # type: ignore[method-assign,func-returns-value]
    rows = stages.stage_l1(federation.server, engine, evaluate, known)
    assert not scored
    assert [(row.client, row.metric, row.value) for row in rows] == [
        (row.client, row.metric, row.value) for row in known
    ]


def test_kept_checkpoints_are_those_of_sequential() -> None:
    federation = Federation(Toy(), [FedPer(personal=["net.3"]), LocalCheckpoint()])
    one, stacked = federation.engines()
    for engine in (one, stacked):
        stages.stage_l1(federation.server, engine, Evaluate(("val",)))
    rows = [stages.checkpoint_rows(federation.server, engine, Evaluate(("test",))) for engine in (one, stacked)]
    assert_same(*rows)
    assert {row.checkpoint for row in rows[1]} == {"best_local"}


def test_nothing_is_drawn_and_nothing_is_changed() -> None:
    federation = Federation(Metrics(), [FedPer(personal=["net.3"])])
    _, engine = federation.engines()
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    first, again = (stages.stage_l1(federation.server, engine, Evaluate(("val",))) for _ in range(2))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and np.array_equal(before[2], after[2])
    assert_same(first, again)
    module = federation.server.module_with(federation.server.model)
    known = copy.deepcopy(module.state_dict()), module.training, vars(module).keys()
    stages.score_global(federation.server, engine, module, Evaluate(("val",)), stages.Mark(1, "G", "global"))
    assert all(torch.equal(value, known[0][name]) for name, value in module.state_dict().items())
    assert (module.training, vars(module).keys()) == known[1:]
    assert not module.hand.update_called and isinstance(module.accuracy, MulticlassAccuracy)


def test_a_client_with_bad_data_fails_as_it_does_alone() -> None:
    data = toy_data((8, 8, 8, 8))
    data.tensors["2"]["val"][1][3] = CLASSES + 4
    federation = Federation(Classifier(digits(), CLASSES), data=data)
    messages = []
    for engine in federation.engines():
        with pytest.raises(ValueError, match=f"Label {CLASSES + 4}") as caught:
            stages.stage_l1(federation.server, engine, Evaluate(("val",)))
        messages.append(str(caught.value))
        assert all("_client" not in vars(callback) for callback in federation.server.callbacks)
    assert messages[0] == messages[1]


# -- loaders -----------------------------------------------------------------------------------------------------------
class Noisy(Dataset[Any]):
    """Samples that are drawn anew whenever they are looked at."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.tensors[0][index] + torch.randn(FEATURES) + random.random(), "y": self.tensors[1][index]}


class OfDicts(Toy):
    """Batches are dicts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx)

    def score(self, batch: Any, split: str) -> None:
        super().score((batch["x"], batch["y"]), split)


def loaders(make: Any, shuffle: bool = False, generator: torch.Generator | None = None) -> LoaderDataModule:
    """The unequal data as ready-made loaders; those for evaluation share a generator."""
    tensors, made = unequal_data().tensors, {}
    for split in ("train", "val", "test"):
        made[split] = {
            client: DataLoader(
                make(own[split]),
                batch_size=8,
                shuffle=shuffle and split != "train",
                generator=None if split == "train" else generator,
            )
            for client, own in tensors.items()
        }
    return LoaderDataModule(made["train"], made["val"], made["test"])


def test_loaders_that_draw() -> None:
    assert Federation(OfDicts(), data=loaders(Noisy)).compare() <= TRIALS


def test_a_generator_of_the_loaders_goes_on_as_under_sequential() -> None:
    shared = torch.Generator()
    federation = Federation(OfDicts(), data=loaders(Noisy, generator=shared))
    states = []
    for engine in federation.engines():
        shared.manual_seed(5)
        assert stages.stage_l1(federation.server, engine, Evaluate(("val", "test")))
        states.append(shared.get_state())
    assert torch.equal(*states)


def test_loaders_without_an_order_are_iterated_one_by_one() -> None:
    clients = len(SIZES["val"])
    federation = Federation(Toy(), data=loaders(lambda tensors: TensorDataset(*tensors), shuffle=True))
    assert federation.compare(Evaluate(("val",)), tolerance=0.0) == 2 * clients


def test_data_with_a_transform() -> None:
    class Scaled(ToyData):
        def build(self) -> Any:
            clients, splits = super().build()
            for split in splits.values():
                split.dataset = ArrayDataset(*split.dataset.tensors, transform=lambda x: 2 * x + torch.rand(()))
                assert IndexView(split.dataset, split.indices[0]).whole and collate_rows is not None
            return clients, splits

    assert Federation(Toy(), data=Scaled(unequal_data().tensors)).compare() <= TRIALS


def test_personal_modules_that_are_trained_for_the_evaluation() -> None:
    Federation(Toy(), [PFedMe()]).compare()

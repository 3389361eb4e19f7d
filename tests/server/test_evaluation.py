"""Scores: what they are computed on, at which stage, and how they are summed up."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F
from torchmetrics import Accuracy

from fedlightning.callbacks import FLIU, FedAvg, FedPer
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.requests import LocalSettings
from fedlightning.client.runtime import Scorer
from fedlightning.contract import CallbackList
from fedlightning.options import Evaluation
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import COLUMNS, Row, read_rows, write_rows
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, federate, spied, toy_data

LOADED = {"val": 10, "test": 12}


def score_by_hand(state, data, client, split, kind=Toy):
    model = kind()
    model.load_state_dict(state)
    model.eval()
    x, y = data.tensors[client][split]
    with torch.no_grad():
        logits = model(x)
        return {
            f"{split}_loss": F.cross_entropy(logits, y).item(),
            f"{split}_acc": (logits.argmax(-1) == y).float().mean().item(),
        }


def union_of(data):
    """All clients' validation data as that of one client ``u``."""
    return type(data)({"u": {"val": tuple(torch.cat([data.tensors[c]["val"][i] for c in "012"]) for i in (0, 1))}})


def values(rows, **wanted):
    found = [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]
    return {(row.client, row.metric): row.value for row in found}


def test_every_stage_scores_its_own_model():
    """G: after aggregation; L1: blended; L2: trained, of this round."""
    data = toy_data()
    trainer, spy = spied(Toy("adam"), data, [FLIU(gamma=0.5)], max_rounds=2, evaluation=1)
    for number in (1, 2):
        for stage in ("G", "L1", "L2"):
            found = values(trainer.rows, round=number, stage=stage, split="val", data="local")
            assert len(found) == 6
            for client in "012":
                theta, trained = spy.rounds[number - 1], spy.of_round(number - 1)[client].state
                blend = {name: 0.5 * trained[name] + 0.5 * theta[name] for name in theta}
                state = {"G": theta, "L1": blend, "L2": trained}[stage]
                for metric, value in score_by_hand(state, data, client, "val").items():
                    assert found[client, metric] == pytest.approx(value, abs=1e-5)


def test_what_training_logged_is_kept_apart():
    trainer = federate(Toy(), toy_data(), evaluation=1, max_rounds=1)
    found = [row for row in trainer.rows if row.split == "train"]
    assert {(row.stage, row.metric, row.client) for row in found} == {("L2", "train_loss", c) for c in "012"}
    assert not [row for row in trainer.results if row["split"] == "train"]


def test_pooled_scores_are_of_the_union():
    data = toy_data()
    trainer = federate(
        Toy("adam"), data, [FLIU(gamma=0.5)], max_rounds=1, evaluation=Evaluation(every=1, data=["pooled"])
    )
    union = union_of(data)
    pooled = values(trainer.rows, stage="G", split="val", data="pooled")
    for metric, value in score_by_hand(trainer.server.model, union, "u", "val").items():
        assert pooled["all", metric] == pytest.approx(value, abs=1e-5)
    own = values(trainer.rows, stage="L1", split="val", data="pooled")
    for client in "012":
        expected = score_by_hand(module_state(trainer.module(client)), union, "u", "val")
        assert own[client, "val_loss"] == pytest.approx(expected["val_loss"], abs=1e-5)
    assert not values(trainer.rows, data="local", split="val")


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_that_holds_the_global_model_has_its_pooled_scores(engine):
    """Its local scores are taken over from stage G; those on everybody's data are others."""
    data = toy_data()
    options = {"evaluation": Evaluation(every=1, data=["local", "pooled"]), "engine": engine}
    trainer = federate(Toy("adam"), data, [FedAvg()], max_rounds=1, **options)
    union = score_by_hand(trainer.server.model, union_of(data), "u", "val")
    for kind in ("local", "pooled"):
        found = values(trainer.rows, stage="L1", split="val", data=kind)
        assert len(found) == 6
        for client in "012":
            own = score_by_hand(trainer.server.model, data, client, "val")
            assert abs(own["val_loss"] - union["val_loss"]) > 1e-2
            for metric, value in (own if kind == "local" else union).items():
                assert found[client, metric] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("stages", "every", "expected"),
    [
        (["G"], 1, {(1, "G"), (2, "G"), (3, "G")}),
        (["L2"], 2, {(2, "L2"), (3, "L2")}),
        (["L1", "G"], 3, {(3, "L1"), (3, "G")}),
        ([], 1, set()),
        (["G", "L1", "L2"], 0, set()),
    ],
)
def test_stages_and_cadence(stages, every, expected):
    trainer = federate(Toy(), toy_data(), evaluation=Evaluation(stages=stages, every=every), max_rounds=3)
    assert {(row.round, row.stage) for row in trainer.rows if row.split == "val"} == expected


def test_trained_models_are_tested_in_the_last_round_only():
    """They are gone afterwards; test scores of other rounds would invite selection."""
    trainer = federate(Toy(), toy_data(), max_rounds=3, evaluation=1)
    assert {(row.round, row.stage) for row in trainer.rows if row.split == "test"} == {(3, "L2")}


def test_a_method_without_a_global_model_has_no_stage_g():
    trainer = federate(Toy(), toy_data(), [FedPer()], evaluation=1, max_rounds=1)
    assert {row.stage for row in trainer.rows} == {"L1", "L2"}
    trainer.test()
    assert {row["stage"] for row in trainer.results} == {"L1", "L2"}


def test_clients_without_validation_or_test_data_are_left_out():
    data = toy_data()
    x, y = data.tensors["1"]["val"]
    data.tensors["1"] = data.tensors["1"] | {"val": (x[:0], y[:0]), "test": (x[:0], y[:0])}
    trainer = federate(Toy(), data, [FLIU(gamma=0.5)], evaluation=1, max_rounds=1)
    trainer.test()
    for split in ("val", "test"):
        rows = [row for row in trainer.rows if row.split == split and row.data == "local"]
        assert rows and {row.client for row in rows} == {"0", "2"}


# -- the scorer ------------------------------------------------------------------------------------------------------


def scorer():
    return Scorer(Blueprint(Toy(), CallbackList(), LocalSettings(0, 1, trainer_arguments={"accelerator": "cpu"})))


def test_scores_are_those_of_trainer_validate():
    data, module = toy_data([24], val=21), NormNet()
    data.setup("fit")
    loader = data.client_dataloader("0", "val")
    ours = scorer().score(module, loader, "val")
    (theirs,) = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(
        module, loader, verbose=False
    )
    assert ours == theirs


def test_scoring_leaves_modes_and_parameters():
    data, module = toy_data([24]), NormNet(dropout=0.5)
    data.setup("fit")
    module.net[1].eval()
    before = {name: value.clone() for name, value in module_state(module).items()}
    modes = [child.training for child in module.modules()]
    scoring = scorer()
    torch.manual_seed(5)
    scoring.score(module, data.client_dataloader("0", "val"), "val")
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert modes == [child.training for child in module.modules()]
    assert all(torch.equal(value, before[name]) for name, value in module_state(module).items())
    assert module._trainer is None


def test_metric_objects_start_anew_for_every_client():
    class Metrics(Toy):
        def __init__(self):
            super().__init__()
            self.accuracy = Accuracy("multiclass", num_classes=3)

        def validation_step(self, batch, batch_idx):
            self.accuracy(self(batch[0]), batch[1])
            self.log("val_acc", self.accuracy)

    data = toy_data(val=13)
    trainer = federate(Metrics(), data, max_rounds=2, evaluation=1)
    found = values(trainer.rows, stage="G", round=2, metric="val_acc")
    for client in "012":
        state = dict(trainer.server.model.items())
        assert found[client, "val_acc"] == pytest.approx(score_by_hand(state, data, client, "val")["val_acc"])


def test_a_returned_loss_is_a_score_and_no_step_is_no_score():
    class Returns(Toy):
        def validation_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

        test_step = None

    class Nothing(Toy):
        pass

    data = toy_data([24], val=21)
    data.setup("fit")
    module = Returns()
    ours = scorer().score(module, data.client_dataloader("0", "val"), "val")
    expected = score_by_hand(module.state_dict(), data, "0", "val")["val_loss"]
    assert ours == {"loss": pytest.approx(expected, abs=1e-6)}


def test_without_a_test_step_the_validation_step_is_used():
    from lightning.pytorch import LightningModule

    class OnlyVal(Toy):
        test_step = LightningModule.test_step

    trainer = federate(OnlyVal(), toy_data(), max_rounds=1)
    trainer.test()
    assert {row["metric"] for row in trainer.results if row["split"] == "test"} == {"val_loss", "val_acc"}


# -- rows and statistics ---------------------------------------------------------------------------------------------


def row(client, value, size, metric="loss"):
    return Row(3, "G", "global", "latest", "local", "val", client, metric, value, size)


def test_statistics_over_clients():
    (found,) = summarise([row("a", 1.0, 10), row("b", 3.0, 30), row("c", float("nan"), 60)])
    assert found["mean"] == 2.0
    assert found["weighted_mean"] == pytest.approx(2.5)
    assert found["std"] == found["variance"] == 1.0
    assert (found["median"], found["worst"], found["tenth_percentile"]) == (2.0, 3.0, pytest.approx(2.8))
    (accuracy,) = summarise([row("a", 0.1, 10, "acc"), row("b", 0.5, 30, "acc"), row("d", 0.9, 30, "acc")])
    assert (accuracy["median"], accuracy["worst"], accuracy["tenth_percentile"]) == (0.5, 0.1, pytest.approx(0.18))
    assert found["per_client"] == {"a": 1.0, "b": 3.0, "c": None}
    (nothing,) = summarise([row("a", float("nan"), 10)])
    assert nothing["mean"] is nothing["weighted_mean"] is nothing["std"] is None


def test_rows_survive_a_file(tmp_path):
    rows = [row("a,b", 0.1 + 0.2, 3), row('"q"', 1e-300, 4), row("ü", -5.0, 0), row("n", float("nan"), 1)]
    write_rows(tmp_path / "m.csv", rows[:2])
    write_rows(tmp_path / "m.csv", rows[2:])
    back = read_rows(tmp_path / "m.csv")
    assert back[:3] == rows[:3]
    assert math.isnan(back[3].value)
    assert [r.address for r in back] == [r.address for r in rows]
    assert (tmp_path / "m.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert read_rows(tmp_path / "none.csv") == []


def test_undefined_scores_are_not_written_twice():
    class Undefined(Toy):
        def test_step(self, batch, batch_idx):
            self.log("auroc", float("nan"))

    trainer = federate(Undefined(), toy_data(), max_rounds=1)
    trainer.test()
    count = len(trainer.rows)
    trainer.test()
    assert len(trainer.rows) == count

"""Metrics of torchmetrics in users' modules: what is undefined on a client's data is a gap, however it is logged."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from rich.console import Console
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import Metric, MetricCollection, regression
from torchmetrics import classification as of

from fedlightning.client.logged_metrics import nan_where_undefined
from fedlightning.scores.table import print_results
from tests.helpers import FEATURES, Toy, make_trainer, toy_data

NONE = math.nan


def value(metric, *data):
    metric.update(*data)
    raw = copy.deepcopy(metric)
    with nan_where_undefined(nn.ModuleList([metric])), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The variance of predictions or target is close to zero")
        found = metric.compute()
    assert "marked" not in getattr(metric.compute, "__qualname__", "")  # as it was
    return found, raw


def chances(count, classes, seed=0):
    return torch.rand(count, classes, generator=torch.Generator().manual_seed(seed)).softmax(1)


SCORES = torch.tensor([0.1, 0.8, 0.4, 0.7])
NO, YES, BOTH = torch.zeros(4).long(), torch.ones(4).long(), torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("metric", "target", "expected"),
    [
        (of.BinaryAUROC(), NO, NONE),
        (of.BinaryAUROC(), YES, NONE),
        (of.BinaryAUROC(thresholds=5), NO, NONE),
        (of.AUROC("binary"), YES, NONE),
        (of.BinaryAUROC(), BOTH, 0.75),
        (of.BinaryAveragePrecision(), NO, NONE),
        (of.BinaryAveragePrecision(thresholds=5), NO, NONE),
        (of.BinaryAveragePrecision(), YES, 1.0),
        (of.BinaryRecall(), NO, NONE),
        (of.BinarySpecificity(), YES, NONE),
        (of.BinaryF1Score(), NO, 0.0),  # false positives
        (of.BinaryF1Score(threshold=0.9), NO, NONE),
        (of.BinaryF1Score(threshold=0.9, zero_division=1), NO, 1.0),  # as the user says
        (of.BinaryPrecision(threshold=0.9), YES, 0.0),  # nothing found of what is there
        (of.BinaryPrecision(threshold=0.9), NO, NONE),
        (of.BinaryJaccardIndex(threshold=0.9), NO, NONE),
        (of.BinaryMatthewsCorrCoef(), NO, NONE),
        (of.BinaryAccuracy(), NO, 0.5),
        (regression.R2Score(), NO.float(), NONE),
        (regression.ExplainedVariance(), NO.float(), NONE),
        (regression.RelativeSquaredError(), NO.float(), NONE),
        (regression.PearsonCorrCoef(), NO.float(), NONE),
        (regression.SpearmanCorrCoef(), NO.float(), NONE),
        (regression.KendallRankCorrCoef(), NO.float(), NONE),
        (regression.ConcordanceCorrCoef(), NO.float(), NONE),
        (regression.MeanSquaredError(), NO.float(), 0.325),
    ],
)
def test_what_is_not_defined_is_nan(metric, target, expected):
    found, _ = value(metric, SCORES, target)
    assert float(found) == pytest.approx(expected, nan_ok=True)


def test_one_sample_is_no_regression():
    found, _ = value(regression.R2Score(), SCORES[:1], SCORES[:1])
    assert found.isnan()


def test_a_macro_average_is_over_the_classes_that_are_defined():
    """As scikit-learn computes them on the classes that the client has."""
    preds, target = chances(40, 5), torch.arange(40) % 3
    areas = [roc_auc_score(target == c, preds[:, c]) for c in range(3)]
    for thresholds in (None, 1001):
        found, _ = value(of.MulticlassAUROC(5, thresholds=thresholds), preds, target)
        assert float(found) == pytest.approx(sum(areas) / 3, abs=0.02 if thresholds else 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prediction of a class that no label has
        balanced = balanced_accuracy_score(target, preds.argmax(1))
    for kind in (of.MulticlassRecall, of.MulticlassAccuracy):
        assert float(value(kind(5), preds, target)[0]) == pytest.approx(balanced)
    assert float(value(of.MulticlassAUROC(5), preds, target * 0)[0].isnan())
    precision, _ = value(of.MulticlassAveragePrecision(5), preds, target)
    each, _ = value(of.MulticlassAveragePrecision(5, average="none"), preds, target)
    assert each.isnan().tolist() == [False] * 3 + [True] * 2 and float(precision) == pytest.approx(
        float(each[:3].mean())
    )


@pytest.mark.parametrize("average", ["macro", "weighted", "micro", "none"])
@pytest.mark.parametrize(
    "name", ["AUROC", "AveragePrecision", "Recall", "Specificity", "F1Score", "JaccardIndex", "Accuracy"]
)
def test_where_every_class_is_there_torchmetrics_decides(name, average):
    for kind, preds, target in (
        ("Multiclass", chances(30, 3), torch.arange(30) % 3),
        ("Multilabel", chances(30, 3, 1), (chances(30, 3, 2) > 0.33).long()),
    ):
        if (kind, name, average) == ("Multiclass", "AUROC", "micro") or (name, average) == (
            "AveragePrecision",
            "micro",
        ):
            if kind == "Multiclass":
                continue  # no such average
        metric = getattr(of, f"{kind}{name}")(3, average=average)
        found, raw = value(metric, preds, target)
        assert torch.equal(found, raw.compute())


def test_labels_that_nobody_has_are_nan_one_by_one_and_left_out_of_means():
    preds, target = chances(12, 3), (chances(12, 3, 5) > 0.33).long()
    target[:, 1] = 0
    each, _ = value(of.MultilabelRecall(3, average="none"), preds, target)
    mean, _ = value(of.MultilabelRecall(3), preds, target)
    assert each.isnan().tolist() == [False, True, False] and float(mean) == pytest.approx(float(each[[0, 2]].mean()))
    assert float(value(of.MultilabelAUROC(3, average="micro"), preds, target * 0)[0].isnan())


class Own(Metric):
    """A metric that scikit-learn computes."""

    def __init__(self):
        super().__init__()
        self.add_state("target", default=[], dist_reduce_fx="cat")

    def update(self, preds, target):
        self.target.append(target)

    def compute(self):
        if len(torch.cat(self.target).unique()) < 2:
            text = "Only one class is present in y_true: the score is not defined"
            warnings.warn(text, UndefinedMetricWarning, stacklevel=2)
        return torch.tensor(0.0)


def test_a_metric_without_a_rule_is_judged_by_its_warning():
    assert float(value(Own(), SCORES, NO)[0].isnan()) and float(value(Own(), SCORES, BOTH)[0]) == 0


class Logs(Toy):
    """Logs an area in one of the ways that modules have."""

    def __init__(self, way="object"):
        super().__init__()
        self.way = way
        areas = MetricCollection({"auroc": of.BinaryAUROC(), "recall": of.BinaryRecall()}, prefix="test_")
        self.areas = [of.BinaryAUROC()] if way == "list" else areas

    def test_step(self, batch, batch_idx):
        chance, target = self(batch[0]).softmax(1)[:, 1], (batch[1] == 1).long()
        self.log("test_loss", nn.functional.mse_loss(chance, target.float()))
        if self.way == "list":
            return self.areas[0].update(chance, target)
        area = self.areas["auroc"]
        if self.way == "object":
            area(chance, target)
            self.log("test_auroc", area)
        elif self.way == "batch":
            self.log("test_auroc", area(chance, target))
        else:
            self.areas.update(chance, target)
            if self.way == "collection":
                self.log_dict(self.areas)
        return None

    def on_test_epoch_end(self):
        if self.way == "value":
            self.log_dict(self.areas.compute())
            self.areas.reset()
        if self.way == "list":
            self.log("test_auroc", self.areas[0].compute())
            self.areas[0].reset()


def one_class(client):
    draw = torch.Generator().manual_seed(int(client))
    y = torch.ones(12).long() if client == "2" else torch.arange(12) % 2
    return TensorDataset(torch.randn(12, FEATURES, generator=draw), y)


@pytest.mark.parametrize("way", ["object", "collection", "value", "list", "batch"])
@pytest.mark.parametrize(
    ("loop", "engine"), [("fast", "sequential"), ("trainer", "sequential"), ("fast", "vectorized")]
)
def test_a_client_of_one_class_is_a_gap_however_the_module_logs(way, loop, engine):
    trainer = make_trainer(None, local_loop=loop, engine=engine, max_rounds=1, evaluation=0)
    data = toy_data([12, 12, 12])
    for client, splits in data.tensors.items():
        splits["test"] = one_class(client).tensors
    trainer.fit(Logs(way), data)
    results = trainer.test()
    area = next(row for row in results if (row["stage"], row["metric"], row["data"]) == ("G", "test_auroc", "local"))
    last = data.client_ids[-1]
    assert area["per_client"][last] is None and area["clients"] == 2
    assert all(0 <= area["per_client"][client] <= 1 for client in data.client_ids[:2])
    console = Console(width=140, record=True)
    print_results(results, console=console)
    assert "(2/3)" in console.export_text()

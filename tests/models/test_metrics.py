"""The scores are scikit-learn's, whatever the batches."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor

from fedlightning.models import ClassificationMetrics


def scores(logits: Tensor, target: Tensor, batch: int = 7) -> dict[str, float]:
    metric = ClassificationMetrics(logits.shape[1])
    for x, y in zip(logits.split(batch), target.split(batch), strict=True):
        metric.update(x, y, torch.nn.functional.cross_entropy(x, y))
    return {name: float(value) for name, value in metric.compute().items()}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(2, 6),
    samples=st.integers(1, 40),
    ties=st.booleans(),
    batch=st.integers(1, 50),
)
def test_equal_to_sklearn(seed: int, classes: int, samples: int, ties: bool, batch: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator)
    logits = logits.round() if ties else logits
    target = torch.randint(0, classes, (samples,), generator=generator)
    got = scores(logits, target, batch)
    truth, guess = target.numpy(), logits.argmax(1).numpy()
    assert got["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, target)), rel=1e-5)
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(truth, guess))
    assert got["f1_macro"] == pytest.approx(sk.f1_score(truth, guess, average="macro", zero_division=0))
    every = sk.f1_score(truth, guess, average="macro", zero_division=0, labels=np.arange(classes))
    assert got["f1_macro_all"] == pytest.approx(every)
    assert got["f1_macro_all"] <= got["f1_macro"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "y_pred contains classes not in y_true"
        assert got["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(truth, guess))
    probability = logits.double().softmax(1).numpy()
    present = [c for c in range(classes) if 0 < (truth == c).sum() < samples]
    areas = [sk.roc_auc_score(truth == c, probability[:, c]) for c in present]
    assert got["auroc"] == pytest.approx(np.mean(areas) if areas else np.nan, nan_ok=True)


def test_calibration_error_by_its_formula() -> None:
    """Sum over 15 bins of confidence of (share of samples) * |accuracy - confidence|."""
    generator = torch.Generator().manual_seed(1)
    logits, target = 2 * torch.randn(300, 4, generator=generator), torch.randint(0, 4, (300,), generator=generator)
    probability = logits.double().softmax(1).numpy()
    confidence, right = probability.max(1), probability.argmax(1) == target.numpy()
    expected = 0.0
    for low in range(15):
        held = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if held.any():
            expected += held.mean() * abs(right[held].mean() - confidence[held].mean())
    assert scores(logits, target)["ece"] == pytest.approx(expected, abs=1e-6)
    assert np.isnan(scores(torch.full((4, 2), torch.nan), torch.tensor([0, 1, 0, 1]))["ece"])


def test_auroc_is_sklearns_macro_one_against_the_rest() -> None:
    logits, target = torch.randn(200, 4), torch.arange(200) % 4
    wanted = sk.roc_auc_score(target, logits.double().softmax(1), multi_class="ovr", average="macro")
    assert scores(logits, target)["auroc"] == pytest.approx(wanted)


def test_one_class_gives_nan_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = scores(torch.randn(20, 3), torch.ones(20, dtype=torch.long))
    assert np.isnan(got.pop("auroc"))
    assert all(np.isfinite(value) for value in got.values())


def test_absent_classes_do_not_pull_auroc_down() -> None:
    target = torch.tensor([0, 1, 0, 1])
    logits = torch.nn.functional.one_hot(target, 5) * 3.0
    got = scores(logits, target)
    assert got == pytest.approx({
        "loss": got["loss"], "accuracy": 1, "balanced_accuracy": 1, "f1_macro": 1, "f1_macro_all": 0.4, "auroc": 1,
        "ece": got["ece"],
    })  # fmt: skip


def test_sure_predictions_are_ranked() -> None:
    """Logits of 40 and 50 are both probability 1: the area must come from the logits."""
    logits = torch.tensor([[0.0, 50.0], [0.0, 40.0], [0.0, 45.0], [0.0, 30.0]])
    assert scores(logits, torch.tensor([1, 0, 1, 0]))["auroc"] == 1.0
    assert scores(logits, torch.tensor([0, 1, 0, 1]))["auroc"] == 0.0


def test_nan_logits_give_nan_auroc() -> None:
    logits = torch.randn(6, 3)
    logits[2, 1] = torch.nan
    assert np.isnan(scores(logits, torch.arange(6) % 3)["auroc"])


def test_permuting_the_classes_changes_nothing() -> None:
    logits, target, order = torch.randn(50, 4), torch.randint(0, 3, (50,)), torch.tensor([2, 0, 3, 1])
    assert scores(logits[:, order], order.argsort()[target]) == pytest.approx(scores(logits, target))


def test_state_is_reset_and_never_saved() -> None:
    metric = ClassificationMetrics(3)
    metric.update(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor(1.0))
    assert not metric.state_dict()
    metric.reset()
    metric.update(torch.eye(3), torch.tensor([0, 1, 2]), torch.tensor(0.5))
    got = metric.compute()
    assert got["accuracy"] == 1 and got["loss"] == 0.5


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 6), samples=st.integers(1, 40), ties=st.booleans())
def test_kappa_and_the_area_of_precision_and_recall_equal_sklearns(
    seed: int, classes: int, samples: int, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator)
    logits = logits.round() if ties else logits
    target = torch.randint(0, classes, (samples,), generator=generator)
    got = more(logits, target)
    truth, guess = target.numpy(), logits.argmax(1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kappa = sk.cohen_kappa_score(truth, guess)
    assert got["kappa"] == pytest.approx(kappa, abs=1e-6, nan_ok=True)
    wide = logits.double()
    columns = {1: (wide[:, 1] - wide[:, 0]).numpy()} if classes == 2 else dict(enumerate(wide.softmax(1).numpy().T))
    areas = [
        sk.average_precision_score(truth == c, column)
        for c, column in columns.items()
        if 0 < (truth == c).sum() < samples
    ]
    assert got["pr_auc"] == pytest.approx(np.mean(areas) if areas else np.nan, abs=1e-6, nan_ok=True)


def more(logits: Tensor, target: Tensor) -> dict[str, float]:
    metric = ClassificationMetrics(logits.shape[1], more=("kappa", "pr_auc"))
    metric.update(logits, target, torch.tensor(0.5))
    return {name: float(value) for name, value in metric.compute().items()}


def test_the_usual_scores_are_the_same_bits_beside_the_further_ones() -> None:
    logits, target = torch.randn(30, 4), torch.arange(30) % 3
    usual, both = scores(logits, target, batch=30), more(logits, target)
    assert list(both) == [*usual, "kappa", "pr_auc"]
    assert {name: both[name] for name in usual if name != "loss"} == {n: v for n, v in usual.items() if n != "loss"}


def test_clients_of_one_class_and_sure_predictions() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = more(3.0 * torch.eye(3)[torch.ones(9).long()], torch.ones(9, dtype=torch.long))
        wrong = more(3.0 * torch.eye(3)[torch.zeros(9).long()], torch.ones(9, dtype=torch.long))
        nothing = more(torch.full((4, 2), torch.nan), torch.tensor([0, 1, 0, 1]))
    assert np.isnan(one["kappa"]) and np.isnan(one["pr_auc"])
    assert wrong["kappa"] == 0.0 and np.isnan(wrong["pr_auc"])
    assert np.isnan(nothing["pr_auc"])
    sure = torch.tensor([[0.0, 50.0], [0.0, 40.0], [0.0, 45.0], [0.0, 30.0]])
    assert more(sure, torch.tensor([1, 0, 1, 0]))["pr_auc"] == 1.0


def test_a_further_score_that_there_is_not_is_refused() -> None:
    for words in (["mcc"], "kappa"):
        with pytest.raises(ValueError, match=r"ClassificationMetrics got more=.*Use a list, each 'kappa' or 'pr_auc'"):
            ClassificationMetrics(3, more=words)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("rounded", [False, True], ids=["apart", "ties"])
def test_few_samples_have_the_bits_of_many(classes, rounded, monkeypatch):
    drawn = torch.Generator().manual_seed(classes)
    for samples in (1, 2, 5, 20, 256):
        logits = 3 * torch.randn(samples, classes, generator=drawn)
        logits = logits.round() if rounded else logits
        metrics = ClassificationMetrics(classes)
        metrics.update(logits, torch.randint(0, classes, (samples,), generator=drawn), torch.tensor(0.3))
        found = []
        for few in (256, 0):
            monkeypatch.setattr("fedlightning.models.metrics.FEW_SAMPLES", few)
            found.append(type(metrics).compute(metrics))
        for name, value in found[0].items():
            assert torch.equal(value.view(torch.int32), found[1][name].view(torch.int32)), (name, samples)

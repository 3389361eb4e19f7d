"""What the report says of runs that learnt nothing, have not converged, do the same, or harm clients."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.report.context import Context
from fedlightning.report.sections.scores import overview
from fedlightning.report.sentences import answers
from fedlightning.report.styles import styles
from fedlightning.scores.rows import Row
from fedlightning.study.comparison_files import as_tex
from fedlightning.study.crossing import marked, setting
from fedlightning.study.differences import UNEXPLAINED, variances
from fedlightning.study.fairness_measures import incentivised_participation_rate
from fedlightning.study.run_scores import common_metric
from fedlightning.study.study import Study
from tests.study.folders import CLIENTS, ROUNDS, write_study

FLAT = (0.2, 0.7, 0.8, 0.8, 0.8, 0.8)
METHODS = {"silo": ["Local"], "fedavg": ["FedAvg"], "fedprox": ["FedProx"]}


def rows_of(curve, tests, metric="accuracy", more=()):
    """Validation scores over rounds and a test score a client; a loss that is finite."""
    rows = []
    for client, test in zip(CLIENTS, tests, strict=True):
        own = ("local", client)
        for number, value in enumerate(curve, 1):
            rows.append(Row(number, "L1", "personal", "latest", own[0], "val", client, f"val_{metric}", value, 8))
        for name, value in ((metric, test), ("loss", 0.5), *more):
            rows.append(Row(ROUNDS, "L1", "personal", "latest", own[0], "test", client, f"test_{name}", value, 40))
    return rows


def study_of(
    root: Path,
    scores,
    curve=(0.2, 0.7, 0.8, 0.8, 0.8, 0.8),
    metric="accuracy",
    more=(),
    classes=(24, 8),
    fine_tuned=0,
    **options,
):
    """Three seeds; `scores`: method -> test scores by client; `curve`: of all seeds, or a list with one of each."""

    def edit(method, seed, rows, summary):
        points = curve[seed] if isinstance(curve, list) else curve
        summary["rounds"] = len(points) - fine_tuned
        for held in summary["data"]["clients"].values():
            held["classes"] = list(classes)
        return rows_of(points, [value + 0.001 * seed for value in scores[method]], metric, more)

    return Study(write_study(root, {name: METHODS[name] for name in scores}, edit=edit), metric=metric, **options)


def kinds(study):
    return {problem.kind: problem.text for problem in study.problems}


GOOD = {"silo": [0.9, 0.8, 0.85, 0.9], "fedavg": [0.95, 0.7, 0.9, 0.95]}


def test_no_method_is_best_where_none_is_above_the_commonest_class(tmp_path):
    study = study_of(tmp_path / "bad", {"silo": [0.7, 0.75, 0.8, 0.74], "fedavg": [0.75, 0.7, 0.7, 0.75]})
    assert study.reference().level == pytest.approx(0.75)
    assert "answering each client’s commonest class (accuracy 0.75)" in kinds(study)["nothing_learnt"]
    first = answers(Context(study, styles(study.data.methods)))[0]
    assert (first.answer, first.method) == ("None is clearly better than a constant answer", None)
    assert "best" not in as_tex(study).replace("Difference to best", "")
    good = study_of(tmp_path / "good", GOOD)
    assert as_tex(good).replace("Difference to best", "").count("best") == 1
    assert "nothing_learnt" not in kinds(good)
    assert "each client’s commonest class 0.750" in str(
        overview(Context(good, styles(good.data.methods))).parts[0].pictures[0].svg
    )


def test_a_table_for_latex_says_which_mean_is_of_fewer_seeds(tmp_path):
    runs = [run for run in study_of(tmp_path, GOOD).data.runs if (run.name, run.seed) != ("fedavg", 1)]
    lines = as_tex(Study(runs, metric="accuracy")).splitlines()
    assert [line.split(" & ")[0] for line in lines if line.startswith(("silo", "fedavg"))] == [
        "silo",
        "fedavg (2 of 3 seeds)",
    ]


def test_the_methods_that_have_learnt_nothing_are_named_where_another_has(tmp_path):
    study = study_of(tmp_path, GOOD | {"fedprox": [0.75, 0.7, 0.7, 0.75]})
    text = kinds(study)["nothing_learnt"]
    assert text == "fedprox is not clearly better than answering each client’s commonest class (accuracy 0.75)."
    assert answers(Context(study, styles(study.data.methods)))[0].method is not None  # another is the best


def test_few_seeds_that_all_are_above_the_constant_ask_for_more(tmp_path):
    study = study_of(tmp_path, {"silo": [0.9] * 4, "fedavg": [0.76] * 4}, confidence=0.99999999)
    assert kinds(study)["nothing_learnt"].endswith(
        "means nothing. silo, fedavg are better at each seed, but intervals of 3 seeds are wide: run more."
    )


def test_what_modules_call_acc_is_accuracy(tmp_path):
    scores = {"silo": [0.7, 0.75, 0.8, 0.74], "fedavg": [0.75, 0.7, 0.7, 0.75]}
    runs = study_of(tmp_path, scores, metric="acc").data.runs
    assert common_metric(runs) == "acc"
    assert "commonest class (acc 0.75)" in kinds(Study(runs, metric="acc"))["nothing_learnt"]


def test_a_regression_is_measured_against_the_mean_of_its_targets(tmp_path):
    # rmse 3 with R² 0.75: the mean has rmse 6
    scores, more = {"silo": [3.0] * 4, "fedavg": [3.0] * 4}, (("r2", 0.75),)
    study = study_of(tmp_path / "a", scores, (9.0, 4.0, 3.0, 3.0, 3.0, 3.0), "rmse", more, classes=())
    assert study.reference().level == pytest.approx(6.0, abs=0.01) and "nothing_learnt" not in kinds(study)
    flat = study_of(tmp_path / "b", scores, (3.0,) * 6, "rmse", (("r2", 0.0),), classes=())
    assert "each client’s mean (RMSE 3)" in kinds(flat)["nothing_learnt"]


@pytest.mark.parametrize(
    ("curve", "improves"),
    [((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), True), ((0.1, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8), False)],
)
def test_curves_that_still_rise_ask_for_more_rounds(tmp_path, curve, improves):
    study = study_of(tmp_path, GOOD, curve)
    assert ("unconverged" in kinds(study)) == improves
    assert not improves or kinds(study)["unconverged"].startswith("All methods still improve")


def test_a_seed_that_falls_by_chance_in_the_last_round_hides_no_rise(tmp_path):
    curves = [(0.1, 0.2, 0.3, 0.28), (0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3, 0.5)]
    assert kinds(study_of(tmp_path, GOOD, curves))["unconverged"].startswith("All methods still improve")


def test_what_fine_tuning_gains_is_no_reason_for_more_rounds(tmp_path):
    curve = (0.1, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8)
    assert "unconverged" not in kinds(study_of(tmp_path / "fine-tuned", GOOD, (*curve, 0.95), fine_tuned=1))
    assert "unconverged" in kinds(study_of(tmp_path / "trained", GOOD, (*curve, 0.95)))


def test_a_term_without_effect_is_told(tmp_path):
    study = study_of(tmp_path, GOOD | {"fedprox": [0.9502, 0.7, 0.9, 0.95]})
    assert kinds(study)["no_effect"].startswith("fedprox changed nothing measurable against fedavg")
    assert [problem.run for problem in study.problems if problem.kind == "no_effect"] == ["fedprox"]


def test_who_loses_against_training_alone(tmp_path):
    (line,) = study_of(tmp_path, GOOD).negative_transfer()
    assert (line["lose"], line["clients"], line["client"]) == (1, 4, "b")
    assert (line["worst"], line["mean_loss"], line["tail"]) == pytest.approx((-0.1,) * 3)


def test_nobody_gains_or_loses_by_the_rounding_of_scores(tmp_path):
    """Means over seeds of equal numbers of right answers: in float32 they differ by 3e-8."""
    method, alone = ([float(np.float32(right / 19)) for right in rights] for rights in ((17, 19), (18, 18)))
    assert np.mean(method) != np.mean(alone)

    def edit(name, seed, rows, summary):
        scores = (alone if name == "silo" else method)[seed]
        return rows_of(FLAT, [scores] * len(CLIENTS))

    study = Study(write_study(tmp_path, {"silo": ["Local"], "fedavg": ["FedAvg"]}, seeds=(0, 1), edit=edit))
    (line,) = study.negative_transfer()
    assert (line["lose"], line["worst"]) == (0, 0.0)
    assert [row["gain"] for row in study.clients() if row["method"] == "fedavg"] == [0.0] * len(CLIENTS)
    (line,) = study.differences("silo")
    assert line["p_clients"] == 1
    assert incentivised_participation_rate({"a": np.mean(alone)}, {"a": np.mean(method)}, {"a": 0.0}) == 0


def test_intervals_of_shares_end_where_shares_end(tmp_path):
    study = study_of(tmp_path, {"silo": [1.0, 0.99, 0.98, 0.97], "fedavg": [0.99, 0.98, 0.97, 0.7]}, confidence=0.9999)
    for row in study.overview():
        assert 0 <= row["ci95"][0] <= row["ci95"][1] <= 1
    assert any(row["ci95_radius"] is None for row in study.overview())


def test_unbalanced_classes_are_compared_by_what_counts_all_of_them(tmp_path):
    more = (("auroc", 0.6), ("balanced_accuracy", 0.5))
    runs = study_of(tmp_path, GOOD, more=more).data.runs
    assert common_metric(runs) == "auroc"
    for counts, chosen in (([16, 16], "accuracy"), ([30, 1, 1], "balanced_accuracy")):
        data = {"clients": {client: {"classes": counts} for client in CLIENTS}}
        assert common_metric([dataclasses.replace(run, summary=run.summary | {"data": data}) for run in runs]) == chosen


def test_the_variance_of_crossed_seeds_is_taken_apart(tmp_path):
    split, training = [0.0, 0.2, 0.4], [0.0, 0.02, 0.01]

    def edit(method, seed, rows, summary):
        value = 0.3 + split[seed // 3] + training[seed % 3] + (0.003 if seed == 4 else 0.0)
        return rows_of(FLAT, [value] * 4)

    keys = marked(["trainer.seed", "data.seed"], ["data.seed"], 3)
    runs = write_study(tmp_path, {"silo": METHODS["silo"]}, seeds=range(9), edit=edit)
    study = Study([dataclasses.replace(run, vary=tuple(keys)) for run in runs], metric="accuracy")
    assert [setting(key, 7) for key in keys] == [("trainer.seed", 1), ("data.seed", 2)]
    found = {line["source"]: line for line in variances(study.data)}
    # by hand: two-way analysis of variance without replication
    y = np.array([[0.3 + a + b for b in training] for a in split])
    y[1, 1] += 0.003
    rest = (y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()).ravel()
    rest = (rest**2).sum() / 4
    assert found["data.seed"]["std"] ** 2 == pytest.approx(y.mean(1).var(ddof=1) - rest / 3)
    training_name = "order of batches, participation and initialisation"
    assert found[training_name]["std"] ** 2 == pytest.approx(y.mean(0).var(ddof=1) - rest / 3)
    assert sum(line["share"] for line in found.values()) == pytest.approx(100)
    assert variances(Study(runs, metric="accuracy").data) == []
    few = Study([dataclasses.replace(run, vary=tuple(keys)) for run in runs[:-1]], metric="accuracy")
    assert variances(few.data) == [] and few.overview()[0]["ci95"] is None  # no interval of a part of the grid


@pytest.mark.parametrize("source", ["initialisation", "participation", "order of batches"])
def test_a_source_that_dominates_is_found(source, tmp_path):
    crossed = ["trainer.seed.initialisation", "trainer.seed.participation"]
    keys = marked(["trainer.seed", *crossed], crossed, 3)
    place = ["order of batches", "initialisation", "participation"].index(source)
    random = np.random.default_rng(place)
    effects, rest = random.normal(0, 0.005, (3, 3)), random.normal(0, 0.005, 27)
    effects[place] = [-0.1, 0.0, 0.1]

    def edit(method, seed, rows, summary):
        digits = [seed // 3**of % 3 for of in range(3)]
        return rows_of(FLAT, [0.5 + rest[seed] + sum(effects[of][digit] for of, digit in enumerate(digits))] * 4)

    runs = write_study(tmp_path, {"silo": METHODS["silo"]}, seeds=range(27), edit=edit)
    study = Study([dataclasses.replace(run, vary=tuple(keys)) for run in runs], metric="accuracy")
    shares = {line["source"]: line["share"] for line in variances(study.data)}
    assert list(shares) == ["order of batches", "initialisation", "participation", UNEXPLAINED]
    assert shares[source] > 90

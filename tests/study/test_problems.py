"""Bad input is said in a sentence and never averaged away."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.report.context import Context
from fedlightning.report.sections.scores import _defined
from fedlightning.scores.rows import Row
from fedlightning.study.comparison_files import comparison
from fedlightning.study.ranks import ranks, seed_ranks
from fedlightning.study.study import Study
from tests.study.folders import METHODS, deployed, write_study


def row_of(study, method):
    return next(row for row in study.overview() if row["method"] == method)


def texts(study, kind):
    return [problem.text for problem in study.problems if problem.kind == kind]


def changed(row: Row, value: float) -> Row:
    return replace(row, value=value)


def broken(method, seed, client, metrics=("loss",), value=math.nan):
    """An edit: one client's scores of one run are not finite."""

    def edit(name, number, rows, summary):
        if (name, number) != (method, seed):
            return None
        return [
            changed(row, value) if row.client == client and row.metric.split("_")[1] in metrics else row for row in rows
        ]

    return edit


def test_a_sound_study_has_no_problems(tmp_path):
    assert Study(write_study(tmp_path)).problems == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_has_no_mean_anywhere(tmp_path, value):
    """Its accuracy may be a number (the argmax of NaN is class 0); it says nothing."""
    study = Study(write_study(tmp_path, edit=broken("fliu", 1, "b", value=value)))
    row = row_of(study, "fliu")
    for name in ("mean", "ci95", "median", "worst", "std", "weighted_mean", "sum", "gap", "gap_p", "ipr", "pma"):
        assert row[name] is None, name
    assert row["n_seeds"] == 2
    (text,) = texts(study, "nan")
    assert "fliu, seed 1" in text and "client b" in text and row["flags"] == [text]
    (line,) = [r for r in study.results() if r["run"] == "fliu" and r["data"] == "local" and r["checkpoint"] == "best_local"
               and r["metric"] == "test_accuracy"]  # fmt: skip
    assert line["mean"] is None and line["n_seeds"] == 2 and line["diverged"] == ["seed 1: client b"]
    assert line["per_seed"]["1"] is None and line["per_client"]["b"] is None
    assert line["per_client"]["a"] == pytest.approx(np.mean([deployed(tmp_path, "fliu", s)["a"] for s in range(3)]))
    assert next(r for r in study.differences() if r["method"] == "fliu")["mean"] is None
    assert {r["mean"] is None for r in study.curves("loss") if r["method"] == "fliu"} == {True}
    assert row_of(study, "fenda")["mean"] is not None
    json.dumps(comparison(study), allow_nan=False)


def test_a_score_that_does_not_exist_is_told_from_a_diverged_model(tmp_path):
    def edit(method, seed, rows, summary):  # accuracy stands in for AUROC of a client with one class
        return [changed(r, math.nan) if r.client == "c" and r.metric.endswith("accuracy") else r for r in rows]

    study = Study(write_study(tmp_path, edit=edit))
    assert {problem.kind for problem in study.problems} == {"undefined"}
    assert study.problems[0].severity == "note" and "client c" in study.problems[0].text
    row = row_of(study, "fenda")
    others = [[v for c, v in deployed(tmp_path, "fenda", s).items() if c != "c"] for s in range(3)]
    assert row["mean"] == pytest.approx(np.mean(others)) and row["n_seeds"] == 3
    (line,) = [r for r in study.results() if r["run"] == "fenda" and r["data"] == "local" and r["checkpoint"] == "best_local"
               and r["metric"] == "test_accuracy"]  # fmt: skip
    assert line["undefined"] == ["c"] and line["per_client"]["c"] is None and line["diverged"] == []


def test_clients_of_which_a_score_lacks_in_some_seeds_are_told_from_those_of_which_it_always_does(tmp_path):
    def edit(method, seed, rows, summary):  # each seed draws other clients
        return [changed(r, math.nan) if r.client == "cab"[seed] and r.metric.endswith("accuracy") else r for r in rows]

    (problem,) = Study(write_study(tmp_path, edit=edit)).problems
    assert "the data of clients a, b, c, in some seeds (" in problem.text


@pytest.mark.parametrize("alone", [True, False])
def test_without_a_loss_another_error_tells_of_a_model_that_diverged(tmp_path, alone):
    """A score of one client that does not exist is a gap, unless an error is not finite there or nobody has a score."""

    def edit(method, seed, rows, summary):
        rows = [row for row in rows if not (alone and row.metric.endswith("loss"))]
        rows = [replace(row, metric=row.metric.replace("loss", "rmse")) for row in rows]
        return [changed(r, math.nan) if (r.client, method, seed) == ("c", "fliu", 0) else r for r in rows]

    study = Study(write_study(tmp_path, edit=edit))
    line = row_of(study, "fliu")
    assert bool(texts(study, "nan")) != alone and (line["mean"] is None) != alone
    assert bool(texts(study, "undefined")) == alone and (line["clients"], line["clients_of"]) == (3, 4)

    def nobody(method, seed, rows, summary):
        return [changed(r, math.nan) for r in rows if not r.metric.endswith("loss")] if method == "fliu" else None

    assert texts(Study(write_study(tmp_path / "nobody", edit=nobody)), "nan")


def test_curves_and_tables_are_over_the_clients_that_have_a_score(tmp_path):
    def edit(method, seed, rows, summary):
        return [changed(r, math.nan) if r.client == "c" and r.metric.endswith("accuracy") else r for r in rows]

    study = Study(write_study(tmp_path, edit=edit))
    assert all(line["mean"] is not None for line in study.curves())
    notes = _defined(Context(study, {}))
    assert notes == ["accuracy is not defined on every client's data: its means are over 3 of 4 clients."]


def test_a_gap_in_a_curve_is_said(tmp_path):
    place = (1, "val", "L2", "a", "val_loss")

    def edit(method, seed, rows, summary):
        if (method, seed) != ("fenda", 2):
            return None
        return [changed(r, math.nan) if (r.round, r.split, r.stage, r.client, r.metric) == place else r for r in rows]

    study = Study(write_study(tmp_path, edit=edit))
    (text,) = texts(study, "nan")
    assert "1 round (first: client a, round 1, stage L2)" in text
    assert row_of(study, "fenda")["mean"] is not None
    empty = [(r["method"], r["stage"], r["round"]) for r in study.curves("loss") if r["mean"] is None]
    assert empty == [("fenda", "L2", 1)]


def split_edit(method, seed, split="test"):
    def edit(name, number, rows, summary):
        if name == method and seed in (None, number):
            summary["data"]["splits"][split] = "other"

    return edit


def test_one_seed_on_other_test_data_is_left_out(tmp_path):
    study = Study(write_study(tmp_path, edit=split_edit("fliu", 1)))
    row = row_of(study, "fliu")
    kept = [np.mean(list(deployed(tmp_path, "fliu", seed).values())) for seed in (0, 2)]
    assert row["mean"] == pytest.approx(np.mean(kept)) and row["n_seeds"] == 2 and row["comparable"]
    (text,) = texts(study, "different_splits")
    assert text in row["flags"] and "fliu, seed 1" in text
    assert next(r for r in study.differences() if r["method"] == "fliu")["n"] == 2


def test_a_private_run_is_measured_against_baselines_that_tell_on_what_they_trained(tmp_path):
    """It withholds hashes of its training and validation data, and was "on another train split"."""

    def withhold(method, seed, rows, summary):
        if method == "fliu":
            for split in ("train", "val"):
                del summary["data"]["splits"][split]

    study = Study(write_study(tmp_path, edit=withhold))
    assert not texts(study, "uncomparable_baseline") and not texts(study, "different_training_data")
    assert row_of(study, "fliu")["ipr"] is not None


def test_a_method_on_other_test_data_is_in_no_comparison(tmp_path):
    study = Study(write_study(tmp_path, edit=split_edit("fliu", None), shift={"fliu": 0.9}))
    row = row_of(study, "fliu")
    assert not row["comparable"] and not row["best"] and len(texts(study, "different_splits")) == 3
    assert row["mean"] is not None and row["gap"] is None and row["ipr"] is None and row["pma"] is None
    assert next(r for r in study.differences() if r["method"] == "fliu")["n"] == 0
    assert {r["gain"] for r in study.clients() if r["method"] == "fliu"} == {None}
    assert not [r for r in study.appeal() if r["method"] == "fliu"]
    assert "fliu" not in seed_ranks(study)["ranks"]


def test_other_training_data_are_said_and_have_no_incentives(tmp_path):
    study = Study(write_study(tmp_path, edit=split_edit("fliu", None, "train")))
    assert len(texts(study, "different_training_data")) == 3
    assert "fliu, seed 0, was trained on other samples than fedavg" in texts(study, "different_training_data")[0]
    row = row_of(study, "fliu")
    assert row["gap_n"] == 3 or row["best"]  # the test data agree, so scores are paired
    assert row["ipr"] is None and row["opt_outs"] is None
    assert any("another train split" in text for text in texts(study, "uncomparable_baseline"))


def test_a_baseline_with_other_rounds_is_not_used(tmp_path):
    def edit(method, seed, rows, summary):
        if method == "silo":
            summary["rounds"] = 50

    study = Study(write_study(tmp_path, edit=edit))
    row = row_of(study, "fenda")
    assert row["ipr"] is None and row["pma"] is not None  # FedAvg's runs are comparable still
    assert any("fenda" in text and "3 rounds against 50" in text for text in texts(study, "uncomparable_baseline"))


def test_missing_and_failed_runs(tmp_path):
    runs = [run for run in write_study(tmp_path) if (run.name, run.seed) != ("fenda", 2)]
    runs = [replace(r, error="CUDA out of memory.", summary={}) if (r.name, r.seed) == ("fliu", 0) else r for r in runs]
    study = Study(runs)
    (missing,), (failed,) = texts(study, "missing_seed"), texts(study, "failed")
    assert "fenda has no run with seed 2" in missing
    assert failed == "fliu, seed 0, has no result: CUDA out of memory."
    for method, seeds in {"fenda": (0, 1), "fliu": (1, 2)}.items():
        row = row_of(study, method)
        means = [np.mean(list(deployed(tmp_path, method, seed).values())) for seed in seeds]
        assert row["mean"] == pytest.approx(np.mean(means)) and (row["n_seeds"], row["seeds"]) == (2, 3)
    counts = {row["method"]: row["n"] for row in study.differences("fenda")}
    assert counts == {"fedavg": 2, "fliu": 1, "silo": 2}
    one_pair = next(row for row in study.differences("fenda") if row["method"] == "fliu")
    assert one_pair["mean"] is not None and one_pair["p"] is one_pair["ci95"] is one_pair["p_holm"] is None
    assert next(row["method"] for row in study.overview() if row["best"]) in ("fedavg", "silo")
    with pytest.raises(ValueError, match="fenda: has no score at every seed"):
        seed_ranks(study)


def test_a_study_in_which_everything_failed_can_still_be_read(tmp_path):
    runs = [replace(run, error="No.", summary={}, rows=[]) for run in write_study(tmp_path, seeds=[0])]
    study = Study(runs)
    assert [row["mean"] for row in study.overview()] == [None] * len(METHODS)
    assert study.differences() and study.results() == study.stages() == study.costs() == study.partition() == []
    assert len(texts(study, "failed")) == len(METHODS)


def test_a_diverged_seed_is_not_dropped_from_pairs_by_a_missing_one(tmp_path):
    runs = write_study(tmp_path, edit=broken("fliu", 1, "b"))
    study = Study([run for run in runs if (run.name, run.seed) != ("fenda", 1)])
    assert next(row for row in study.differences("fenda") if row["method"] == "fliu")["mean"] is None


def test_budgets_seeds_and_doubles(tmp_path):
    def edit(method, seed, rows, summary):
        summary["local_steps_total"] = {"fenda": 121, "silo": 300}.get(method, 120)

    runs = write_study(tmp_path / "a", seeds=[4], edit=edit)
    study = Study([*runs, runs[0]])
    (text,) = texts(study, "different_budget")
    assert text.startswith("silo took 300 local steps, fedavg 120 (+150%)")
    assert "one seed (4)" in texts(study, "single_seed")[0] and study.data.seed_text.startswith("One seed (4)")
    assert "fedavg was given 2 runs with seed 4" in texts(study, "duplicate")[0]
    row = row_of(study, "fenda")
    assert row["mean"] is not None and row["ci95"] is row["gap_p"] is None


def test_seeds_that_change_nothing_are_noticed(tmp_path):
    runs = write_study(tmp_path, {"fedavg": ["FedAvg"]}, seeds=[0])
    study = Study([runs[0], replace(runs[0], seed=1)])
    assert "All 2 seeds of fedavg give exactly the same scores" in texts(study, "identical_seeds")[0]


def test_a_run_that_was_not_tested_is_named(tmp_path):
    def edit(method, seed, rows, summary):
        return [row for row in rows if row.split == "val"] if (method, seed) == ("fliu", 1) else None

    study = Study(write_study(tmp_path, edit=edit))
    (text,) = texts(study, "missing_score")
    assert "fliu, seed 1, has no test accuracy" in text and row_of(study, "fliu")["n_seeds"] == 2


def test_without_baselines_the_report_says_what_is_empty(tmp_path):
    study = Study(write_study(tmp_path, {"fenda": ["FENDA"], "fliu": ["FLIU"]}))
    assert len(texts(study, "no_baseline")) == 2
    assert row_of(study, "fenda")["ipr"] is None
    assert {row["reference"] for row in study.differences()} == {"fenda"}


def test_ranks_leave_out_what_is_not_on_every_data_set(tmp_path):
    one = Study(write_study(tmp_path / "one"))
    two = Study(write_study(tmp_path / "two", edit=broken("fliu", 1, "b")))
    found = ranks({"one": one, "two": two})
    assert found["left_out"] == {"fliu": "no score, or a run that diverged, on two"}
    assert set(found["ranks"]) == {"fedavg", "fenda", "silo"}
    with pytest.raises(ValueError, match="at least 3 methods on at least 2 data sets"):
        ranks({"one": one})
    with pytest.raises(ValueError, match="one metric"):
        ranks({"one": one, "two": Study(one.data.runs, metric="loss")})


def test_seeds_that_deploy_different_models_are_told(tmp_path):
    def edit(method, seed, rows, summary):
        return [row for row in rows if row.checkpoint != "best_local"] if (method, seed) == ("fliu", 1) else None

    (problem,) = [p for p in Study(write_study(tmp_path, edit=edit)).problems if p.kind == "mixed_models"]
    assert problem.run == "fliu" and problem.severity == "problem"
    assert "best_local (L1) at seed 0, 2; latest (L1) at seed 1" in problem.text


def test_an_unknown_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'best_lokal'.*there is: deployed, latest"):
        Study(write_study(tmp_path), checkpoint="best_lokal")


def test_unequal_terms_are_told(tmp_path):
    equal = {"optimizer_state": "reset", "optimizer_memory": True, "weighting": "samples", "local_steps": 120,
             "own_steps": 0, "fine_tuning_steps": 0, "selections": 0, "selection": {"best_local": 3}}  # fmt: skip
    odd = {
        "silo": {"optimizer_state": "keep", "weighting": None},
        "fenda": {"weighting": "uniform", "fine_tuning_steps": 40},
        "fliu": {"selection": {}},
    }

    def edit(others):
        return lambda method, seed, rows, summary: summary.update(terms=equal | others.get(method, {}))

    study = Study(write_study(tmp_path / "odd", seeds=[0], edit=edit(odd)))
    state, weights, tuned, chosen = texts(study, "unequal_terms")
    assert state.startswith(
        "Not on equal terms: fedavg, fenda and fliu begin every visit with new optimizers, silo keeps"
    )
    assert "--optimizer-state reset" in state
    assert "by their samples in fedavg and fliu; all the same in fenda" in weights
    assert "fenda fine-tuned for 40 steps after the last round; the others not at all" in tuned
    assert "the best of 3 on validation data of fedavg, fenda and silo; the last model of fliu" in chosen
    assert all(problem.severity == "note" for problem in study.problems if problem.kind == "unequal_terms")
    assert [line["candidates"] for line in study.terms()] == [3, 3, 0, 3]
    assert texts(Study(write_study(tmp_path / "equal", seeds=[0], edit=edit({}))), "unequal_terms") == []
    plain = {method: {"optimizer_memory": False} | (odd[method] if method == "silo" else {}) for method in METHODS}
    assert texts(Study(write_study(tmp_path / "plain", seeds=[0], edit=edit(plain))), "unequal_terms") == []


def test_the_metric_is_one_that_all_runs_have(tmp_path):
    def edit(method, seed, rows, summary):
        return (
            [replace(row, metric=row.metric.replace("accuracy", "rmse")) for row in rows] if method == "fliu" else None
        )

    assert Study(write_study(tmp_path / "a", seeds=[0])).data.metric == "accuracy"
    assert Study(write_study(tmp_path / "b", {"fliu": ["FLIU"]}, [0], edit)).data.metric == "rmse"
    assert Study(write_study(tmp_path / "c", seeds=[0], edit=edit)).data.metric == "loss"

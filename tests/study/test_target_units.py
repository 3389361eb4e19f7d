"""Errors of a regression are read in the units of its target, whatever scale the data module has put it on."""

from __future__ import annotations

import pytest

from fedlightning.study.target_units import Target, describe_units, mixed_scales, target_of

TABLE = {"class_path": "fedlightning.datamodules.TabularFederatedDataModule", "init_args": {"target": "days"}}
SCALED = {**TABLE, "init_args": {"target": "days", "target_statistics": [12.0, 6.0]}}
WRAPPED = {"class_path": "fedlightning.datamodules.ShiftedDataModule", "init_args": {"source": SCALED}}
REGRESSOR = {"class_path": "fedlightning.models.Regressor"}


def models(*modules):
    options = {"models": {str(number): module for number, module in enumerate(modules)}}
    return {"class_path": "fedlightning.models.ClientModels", "init_args": options}


@pytest.mark.parametrize(
    ("data", "model", "target"),
    [
        (SCALED, REGRESSOR, Target("days", 6.0)),
        (WRAPPED, REGRESSOR, Target("days", 6.0)),
        (TABLE, REGRESSOR, Target("days")),
        (SCALED, {"class_path": "mine.Forecaster"}, Target("days", 6.0, own_module=False)),
        (None, REGRESSOR, Target()),
        (SCALED, models(REGRESSOR, REGRESSOR), Target("days", 6.0)),
        (SCALED, models(REGRESSOR, {"class_path": "mine.Forecaster"}), Target("days", 6.0, own_module=False)),
        (SCALED, {"class_path": "fedlightning.models.HFModule"}, Target("days", 6.0, own_module=False)),
    ],
)
def test_what_a_run_predicts(data, model, target):
    assert target_of({"data": data, "model": model}) == target


def test_errors_are_in_the_units_of_the_target_and_other_metrics_as_they_are():
    factors = {name: Target("days", 6.0).factor(f"test_{name}") for name in ("rmse", "mae", "mse", "r2", "loss")}
    assert factors == {"rmse": 6.0, "mae": 6.0, "mse": 36.0, "r2": 1.0, "loss": 1.0}


def test_of_a_module_that_may_have_undone_the_scale_nothing_is_converted_and_that_is_said():
    target = Target("days", 6.0, own_module=False)
    assert target.factor("test_rmse") == 1.0
    assert target.in_words("rmse") == "days is divided by 6 (target_statistics), and RMSE is as the module logs it."


def test_nothing_is_said_of_what_is_not_known():
    assert Target().in_words("rmse") is None and Target("days").in_words("accuracy") is None


def test_runs_whose_errors_are_on_different_scales_are_told():
    """A report had one note on units, of its first run, and compared days with deviations of days."""
    ours, scaled, theirs, nobody = Target("days"), Target("days", 6.0), Target("days", 6.0, own_module=False), Target()
    assert mixed_scales([("A", ours), ("B", scaled), ("B", scaled)], "test_rmse") is None
    assert mixed_scales([("A", ours), ("B", nobody)], "loss") is None
    assert mixed_scales([("A", ours), ("B", Target("cost"))], "mae").startswith(
        "MAE is of days in A; of cost in B: give"
    )
    assert mixed_scales([("A", ours), ("B", scaled), ("C", scaled)], "loss").startswith(
        "loss is of days in A; of days / 6 in B and C: give"
    )
    for other, words in ((theirs, "days / 6"), (nobody, "a target that is not named")):
        assert f"MAE is of days in A; of {words} in B" in mixed_scales([("A", scaled), ("B", other)], "mae")
        assert mixed_scales([("A", scaled), ("B", other)], "r2") is None
    for metric, words in (("r2", "R²"), ("accuracy", "accuracy")):
        assert mixed_scales([("A", ours), ("B", nobody), ("C", Target("cost"))], metric).startswith(
            f"{words} is of days in A; of cost in C: give"
        )
    assert len(describe_units([scaled, scaled, theirs, nobody], "rmse")) == 2

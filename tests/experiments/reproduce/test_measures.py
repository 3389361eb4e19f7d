"""Measures from files that a test has written."""

from __future__ import annotations

import math

import pytest

from fedlightning.experiments.reproduce.measures import KINDS, NoValueError, Spec, measure, rounds_until
from fedlightning.study.fairness_measures import incentivised_participation_rate
from tests.experiments.reproduce.writing import row, write_run

EPSILON = Spec("epsilon", "", {"q": 0.04, "sigma": 1.5, "steps": 2250, "delta": 1e-5})


def found(runs, kind, **options):
    return measure(Spec(kind, "", options), runs, "a")


@pytest.fixture
def curve(tmp_path):
    values = {1: (0.2, 0.4), 2: (0.6, 0.8), 3: (0.5, 0.5), 4: (0.9, 0.9)}
    rows = [
        row(number, client, value, num_samples=size)
        for number, pair in values.items()
        for (client, size), value in zip((("x", 10), ("y", 30)), pair, strict=True)
    ]
    return write_run(tmp_path / "run", rows, {"bytes_up": 12, "terms": {"own_steps": 3}})


def test_values_of_rounds_over_clients(curve):
    assert found(curve, "at_round", metric="accuracy", round=2).number == pytest.approx(0.7)
    assert found(curve, "at_round", metric="accuracy", round=2, over="weighted").number == pytest.approx(0.75)
    assert found(curve, "at_round", metric="accuracy", round=1, over="worst").number == 0.2
    assert found(curve, "at_round", metric="accuracy", round=1, over="client:y").number == 0.4
    assert found(curve, "at_round", metric="accuracy", round=1, over="variance").number == pytest.approx(0.01)
    assert found(curve, "best_round", metric="accuracy").number == pytest.approx(0.9)
    assert found(curve, "best_round", metric="accuracy", until=3).number == pytest.approx(0.7)
    assert found(curve, "logged", metric="val_accuracy").number == pytest.approx(0.9)
    assert found(curve, "summary", key="terms.own_steps").number == 3
    with pytest.raises(NoValueError, match="no score of round 9; it has rounds 1 to 4"):
        found(curve, "at_round", metric="accuracy", round=9)
    with pytest.raises(NoValueError, match="no client 'z'; there is x, y"):
        found(curve, "at_round", metric="accuracy", round=1, over="client:z")


def test_rounds_to_a_target_are_of_the_best_so_far(curve):
    # means 0.3, 0.7, 0.5, 0.9; best so far 0.3, 0.7, 0.7, 0.9: between rounds 3 and 4, half of the way
    assert found(curve, "rounds_to", metric="accuracy", target=0.8).number == pytest.approx(3.5)
    assert found(curve, "rounds_to", metric="accuracy", target=0.5).number == pytest.approx(1.5)
    late = found(curve, "rounds_to", metric="accuracy", target=0.95)
    assert (late.number, late.beyond) == (4, True)


def test_the_rule_of_rounds_by_hand():
    assert rounds_until([10, 20], [0.5, 0.9], 0.7).number == 15
    assert rounds_until([10, 20], [0.8, 0.9], 0.7).number == 10  # in the first evaluation: no curve before it
    assert rounds_until([1, 2, 3], [1.0, 0.4, 0.2], 0.3, higher=False).number == pytest.approx(2.5)
    assert rounds_until([1, 2, 3], [0.1, math.nan, 0.5], 0.3).number == pytest.approx(2.5)


def test_a_model_that_diverged_has_no_number(tmp_path):
    runs = write_run(tmp_path / "run", [row(1, "x", math.nan), row(1, "y", 0.5)])
    assert math.isnan(found(runs, "at_round", metric="accuracy", round=1).number)


def result(value, **changes):
    return {
        "model": "personal",
        "stage": "L1",
        "checkpoint": "latest",
        "data": "local",
        "split": "test",
        "metric": "test_accuracy",
        "per_client": value,
        "weighted_mean": 0.5,
        **changes,
    }


def test_scores_and_two_runs(tmp_path):
    own = result({"x": 0.5, "y": 0.9})
    server = result({"x": 0.3, "y": 0.7}, model="global", stage="G", checkpoint="best_global")
    runs = write_run(tmp_path / "a", [], {"results": [own, server]})
    runs = {**runs, "b": write_run(tmp_path / "b", [], {"results": [result({"x": 0.4, "y": 0.95})]})["a"]}
    assert found(runs, "score", metric="accuracy", checkpoint="latest").number == pytest.approx(0.7)
    assert found(runs, "score", metric="accuracy", checkpoint="best_global").number == pytest.approx(0.5)
    assert found(runs, "score", metric="accuracy", checkpoint="latest", over="weighted").number == 0.5
    assert found(runs, "gaining_share", metric="accuracy", against=["b"], checkpoint="latest").number == 0.5
    final = Spec("score", "", {"metric": "accuracy", "checkpoint": "latest"})
    assert found(runs, "difference", of=final, against="b").number == pytest.approx(0.7 - 0.675)
    assert found(runs, "ratio", of=final, against="b").number == pytest.approx(0.7 / 0.675)
    with pytest.raises(NoValueError, match=r"no test score 'f1' .*; the run has accuracy"):
        found(runs, "score", metric="f1")


def test_clients_that_gain_lose_or_stay_below_a_bar(tmp_path):
    scores = {"a": (0.5, 0.9, 0.7), "local": (0.4, 0.95, 0.7), "fedavg": (0.45, 0.2, 0.6)}
    runs = {}
    for name, values in scores.items():
        results = [result(dict(zip("xyz", values, strict=True)))]
        runs[name] = write_run(tmp_path / name, [], {"results": results})["a"]
    options = {"metric": "accuracy", "checkpoint": "latest"}
    assert found(runs, "gaining_share", against=["fedavg"], **options).number == 1.0
    both = incentivised_participation_rate(*(dict(zip("xyz", scores[name], strict=True)) for name in scores))
    assert found(runs, "gaining_share", against=["local", "fedavg"], **options).number == pytest.approx(both / 100)
    assert found(runs, "opt_outs", against="local", **options).number == pytest.approx(1 / 3)  # a tie is not a loss
    assert found(runs, "clients_below", bar=0.7, **options).number == 1.0
    with pytest.raises(NoValueError, match="no test score 'f1' that a client has in all of the runs a, a"):
        found(runs, "opt_outs", against="local", metric="f1")


def test_a_bound_stays_one_in_a_difference_and_turns_in_what_is_divided_by(tmp_path):
    runs = write_run(tmp_path / "a", [row(1, "x", 0.5), row(2, "x", 0.9)])
    runs = {**runs, "b": write_run(tmp_path / "b", [row(1, "x", 0.5), row(2, "x", 0.6)])["a"]}
    reach = Spec("rounds_to", "", {"metric": "accuracy", "target": 0.9})
    for kind in ("difference", "ratio"):
        value = found(runs, kind, of=reach, against="b")
        assert (value.beyond, value.below) == (False, True)
        back = measure(Spec(kind, "", {"of": reach, "against": "a"}), runs, "b")
        assert (back.beyond, back.below) == (True, False)


def test_a_client_whose_model_diverged_is_not_left_out_of_a_count(tmp_path):
    """Its accuracy may be a number, or is left out: then a run would gain by losing clients."""
    runs = {}
    for name, loss in (("a", None), ("local", 1.0)):
        rows = [result({"x": 0.5, "y": 0.1}), result({"x": 1.0, "y": loss}, metric="test_loss")]
        runs[name] = write_run(tmp_path / name, [], {"results": rows})["a"]
    options = {"metric": "accuracy", "checkpoint": "latest"}
    for kind, more in {"gaining_share": {"against": ["local"]}, "opt_outs": {"against": "local"}}.items():
        assert math.isnan(found(runs, kind, **more, **options).number)
    assert math.isnan(found(runs, "clients_below", bar=0.7, **options).number)
    assert found({"a": runs["local"]}, "clients_below", bar=0.7, **options).number == 2.0


def test_counts_of_clients_are_of_the_servers_model_where_the_stage_is_and_know_errors(tmp_path):
    server = {"model": "global", "stage": "G"}
    rows = [result({"x": 0.5, "y": 0.1}, **server), result({"x": 2.0, "y": 1.0}, metric="test_loss", **server)]
    runs = write_run(tmp_path / "a", [], {"results": rows})
    options = {"checkpoint": "latest", "stage": "G"}
    assert found(runs, "clients_below", metric="accuracy", bar=0.4, **options).number == 1.0
    assert found(runs, "clients_below", metric="loss", bar=0.5, **options).number == 2.0  # both are worse than 0.5


def test_a_model_that_diverged_has_no_score_on_the_data_of_others(tmp_path):
    places = [("local", {"x": 0.5, "y": 0.4}), ("client:x", {"y": 0.1}), ("client:y", {"x": 0.3})]
    rows = [result(values, data=place) for place, values in places]
    rows += [result(dict.fromkeys(values), data=place, metric="test_loss") for place, values in places]
    runs = write_run(tmp_path / "a", [], {"results": rows})
    assert math.isnan(found(runs, "offered", client="x", metric="accuracy", checkpoint="latest").number)


def test_epsilon_is_that_of_the_accountants_own_tests():
    pytest.importorskip("opacus")
    value = measure(EPSILON, {}, None).number
    assert value == pytest.approx(7.32911117143, abs=1e-6)


def test_epsilon_is_what_private_runs_count(monkeypatch):
    """A fault in what ClientDP and SampleDP count must show in the tables of epsilons."""
    monkeypatch.setattr("fedlightning.callbacks.shared.spending.spent_by", lambda *given: float(len(given)))
    assert measure(EPSILON, {}, None).number == 4.0


def test_every_kind_says_what_it_is():
    assert all(made.__doc__ for made in KINDS.values())

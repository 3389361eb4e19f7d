"""The league: one budget for all, values by address, differences against a formula, rows that are kept."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.league import LEAGUE
from fedlightning.commands.run import Commands
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.contest import (
    RATE,
    Contest,
    missing_rows,
    propose,
    read_league,
    read_rows,
    standings,
    write_row,
)
from fedlightning.study.significance import resampled_difference
from tests.experiments.reproduce.writing import write_run
from tests.experiments.tiny_league import league, row


def test_every_method_of_the_league_has_the_same_budget_and_a_learning_rate():
    found = read_league(LEAGUE, FOLDER)
    assert len(found.tasks) == 5 and len(found.methods) >= 25 and found.trials == 16
    assert len({method.group for method in found.methods.values()}) >= 5
    for task in found.tasks.values():
        rates = set()
        for method in found.methods.values():
            values = propose(found.ranges(task, method), found.search_seed, found.trials)
            assert len(values) == found.trials and len({str(one) for one in values}) == found.trials
            assert all(set(one) == {RATE, *(own.key for own in method.space)} for one in values)
            rates.add(tuple(one[RATE] for one in values))
        assert len(rates) == 1, "a trial has the same learning rate in all methods"


def test_values_fill_their_ranges_evenly():
    """Sixteen points of a Sobol sequence have one value in each sixteenth of every range; draws by chance leave gaps."""
    found = read_league(LEAGUE, FOLDER)
    for method in (found.methods[name] for name in ("FedAvg", "FedProx", "FedAdam")):
        ranges = [one for one in found.ranges(found.tasks["digits"], method) if one.kind == "log"]
        for one in ranges:
            values = [float(values[one.key]) for values in propose(ranges, 0, 16)]
            shares = [math.log(value / one.low) / math.log(one.high / one.low) for value in values]
            assert sorted(int(16 * share) for share in shares) == list(range(16))


def test_values_are_reproducible_and_within_their_ranges():
    found = read_league(LEAGUE, FOLDER)
    for method in found.methods.values():
        ranges = found.ranges(found.tasks["digits"], method)
        assert propose(ranges, 3, 20) == propose(ranges, 3, 20) != propose(ranges, 4, 20)
        for values in propose(ranges, 3, 50):
            for one in ranges:
                inside = (
                    values[one.key] in one.choices if one.choices else one.low <= float(values[one.key]) <= one.high
                )
                assert inside, (method.name, values)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"references": ["FedAvgg"]}, "names 'FedAvgg' (references)"),
        ({"seeds": [0, 1000]}, "and none of the trial_seeds"),
        ({"trial_seeds": [1000]}, "needs two different trial_seeds, and as many trials as it keeps"),
        ({"finalists": 3}, "needs two different trial_seeds, and as many trials as it keeps"),
        ({"trials": 0}, "has trials: 0. Give a whole number in [1, inf)."),
        (
            {"groups": {"any": {"FedAvgg": {}}}},
            "names the configuration 'algorithms/fedavgg.yaml', which lies neither beside the file nor",
        ),
        ({"groups": {"a": {"FedAvg": {}}, "b": {"FedAvg": {}}}}, "has the method 'FedAvg' in two groups"),
        (
            {"tasks": {"tiny": {"title": "t", "metric": "loss", "learning_rate": "log:0.1:1", "vary": []}}},
            "has metric: 'loss', of which lower is better",
        ),
        ({"trails": 8}, "has the key 'trails', which means nothing here"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(tmp_path, changes, sentence):
    with pytest.raises(InputError) as caught:
        read_league(league(tmp_path, **changes), FOLDER)
    assert sentence in str(caught.value)


def test_the_setting_of_a_row_is_what_decides_it(tmp_path):
    def setting(**changes: object) -> str:
        found = read_league(league(tmp_path, **changes), FOLDER)
        return found.setting(found.tasks["tiny"], found.methods["FedAvg"])

    assert setting() == setting(references=["FedProx"]) != setting(trials=3)
    assert setting() != setting(seeds=[0, 1, 2])


def test_rows_are_kept_and_replaced(tmp_path):
    path = tmp_path / "tiny.json"
    write_row(path, row("FedProx", [0.5]))
    write_row(path, row("FedAvg", [0.6]))
    write_row(path, row("FedProx", [0.7]))
    found = read_rows(path)
    assert list(found) == ["FedAvg", "FedProx"] and found["FedProx"]["seeds"]["0"]["score"] == 0.7
    assert {"commit", "versions"} <= set(found["FedAvg"])
    path.write_text("{}")
    with pytest.raises(InputError, match="holds no rows of the league"):
        read_rows(path)


def test_differences_are_corrected_for_overlapping_splits():
    a, b = np.array([0.80, 0.84, 0.79, 0.83, 0.85]), np.array([0.75, 0.80, 0.78, 0.76, 0.81])
    found, p = resampled_difference(a, b, test_share=0.25)
    mean, error = (a - b).mean(), math.sqrt((1 / 5 + 0.25) * (a - b).var(ddof=1))
    assert found.centre == pytest.approx(mean)
    assert found.radius == pytest.approx(stats.t.ppf(0.975, 4) * error)
    assert p == pytest.approx(2 * stats.t.sf(mean / error, 4))
    assert resampled_difference(a, a, 0.25)[1] == 1.0


def tiny(tmp_path: Path, **changes: object):
    found = read_league(league(tmp_path, **changes), FOLDER)
    return found, found.tasks["tiny"]


def current(found, task, rows):
    """Return the rows as made with the present setting."""
    return {name: {**one, "setting": found.setting(task, found.methods[name])} for name, one in rows.items()}


def test_standings(tmp_path):
    groups = {"all": {"Local": {}, "FedAvg": {}, "FedProx": {"gradients": 2}, "SCAFFOLD": {}}}
    found, task = tiny(tmp_path, groups=groups, references=["FedAvg", "Local"], seeds=[0, 1, 2])
    rows = {
        "Local": row("Local", [0.5, 0.6, 0.5], mb=0.0),
        "FedAvg": row("FedAvg", [0.7, 0.8, 0.75], rounds=4),
        "FedProx": {**row("FedProx", [0.72, 0.83, 0.79]), "equal_rounds": row("", [0.8, 0.9, 0.85])["seeds"]},
        "SCAFFOLD": row("SCAFFOLD", [0.6, None, 0.7], mb=2.0),
    }
    old = {**rows, "FedProx": {**rows["FedProx"], "setting": "x"}}
    assert [
        line.method for line in standings(found, task, current(found, task, rows) | {"FedProx": old["FedProx"]})
    ] == [
        "FedAvg",
        "Local",
        "SCAFFOLD",
    ]
    lines = {line.method: line for line in standings(found, task, current(found, task, rows))}
    assert list(lines) == ["FedProx", "FedAvg", "Local", "SCAFFOLD"]
    assert lines["FedAvg"].gain == pytest.approx(0.75 - (0.5 + 0.6 + 0.5) / 3) and lines["Local"].gain is None
    assert lines["SCAFFOLD"].score is None and not lines["SCAFFOLD"].minus
    minus = lines["FedProx"].minus
    assert minus["FedAvg"].interval.centre == pytest.approx(0.03)
    _, p = resampled_difference([0.72, 0.83, 0.79], [0.7, 0.8, 0.75], 0.25)
    _, other = resampled_difference([0.5, 0.6, 0.5], [0.7, 0.8, 0.75], 0.25)
    assert minus["FedAvg"].p_holm == pytest.approx(max(2 * min(p, other), p))
    assert (lines["FedProx"].rounds, lines["FedAvg"].rounds) == (2, 4)
    assert lines["FedAvg"].equal == pytest.approx({"rounds": 0.75, "bytes": 0.4})
    assert lines["FedProx"].equal == pytest.approx({"rounds": 0.85, "bytes": 0.2})
    assert lines["SCAFFOLD"].equal["bytes"] == pytest.approx(0.1)
    assert lines["FedAvg"].late == pytest.approx(0.4 - 0.3)


def test_equal_rounds_that_failed_are_not_those_of_the_budget(tmp_path):
    found, task = tiny(tmp_path)
    rows = current(found, task, {"FedProx": {**row("FedProx", [0.7, 0.8]), "failed": "it was killed"}})
    (line,) = standings(found, task, rows)
    assert line.score == pytest.approx(0.75) and line.equal["rounds"] is None


@pytest.mark.parametrize(
    ("work", "steps", "share"),
    [
        ({"local_epochs": 2}, 60, 1.0),  # two clients of 5 and 10 batches, two rounds
        ({"local_steps": 4}, 16, 1.0),
        ({"local_epochs": 1, "participation": 0.5}, 15, 1.0),
        ({"local_epochs": 1, "participation": 1}, 30, 2.0),
        ({"local_epochs": 1}, 30, 1.0),
    ],
)
def test_a_rounds_gradients_are_counted_in_those_of_fedavg_on_the_task(tmp_path, work, steps, share):
    found, task = tiny(tmp_path)
    settings = yaml.safe_load(task.path.read_text())
    settings["trainer"] = {"max_rounds": 2, **work}
    task.path.write_text(yaml.safe_dump(settings))
    held = {"x": {"train": 80}, "y": {"train": 159}}
    summary = {"data": {"clients": held}, "local_steps_total": steps, "terms": {"own_steps": 0}}
    write_run(tmp_path / "run", [], summary)
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"batch_size": 16}}}))
    contest = Contest(found, task, found.methods["FedAvg"], tmp_path, None, "")
    assert contest._gradients_of_a_round(tmp_path / "run", 2) == pytest.approx(share)


def test_scaffold_has_as_many_equal_steps_as_fedavg_has_on_average():
    found = read_league(LEAGUE, FOLDER)
    for task in found.tasks.values():
        assert isinstance(task.options["SCAFFOLD"]["trainer.local_steps"], int), task.name


def test_what_has_not_been_run_and_what_is_old_is_known(tmp_path):
    found, task = tiny(tmp_path)
    now = current(found, task, {"FedAvg": row("FedAvg", [0.5, 0.6])})
    assert missing_rows(found, task, now) == (["FedProx"], [])
    failed = {"FedAvg": {"method": "FedAvg", "setting": now["FedAvg"]["setting"], "failed": "x", "trials": []}}
    assert missing_rows(found, task, failed) == (["FedAvg", "FedProx"], [])  # what failed was not run
    assert missing_rows(found, task, {"FedAvg": row("FedAvg", [0.5, 0.6])}) == (["FedProx"], ["FedAvg"])


@pytest.mark.parametrize("name", ["digits", "heart", "fashion", "tcga", "shakespeare"])
@pytest.mark.fast_cases(2)
def test_the_configuration_of_a_task_is_one_of_a_run(name):
    files = [FOLDER / f"league/{name}.yaml", FOLDER / "algorithms/fedprox.yaml"]
    cli = Commands("fit", [word for file in files for word in ("--config", str(file))])
    assert cli.trainer.arguments["evaluation"].stages == ("G", "L1")
    assert cli.trainer.arguments["max_rounds"] in (10, 12, 100)

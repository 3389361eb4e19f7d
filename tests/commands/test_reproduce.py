"""`fedlightning reproduce` as its users meet it: lists, runs, verdicts that are kept, and what cannot run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlightning.cli import main
from fedlightning.experiments.reproduce import table_runs
from tests.experiments.reproduce.writing import table, write
from tests.experiments.tiny import HERE, small

PLANTED = "tests.experiments.reproduce.planted.Still"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reproduce(*words: str) -> int:
    return main(["reproduce", *map(str, words)])


def results(out: str = "out") -> dict[str, dict[str, Any]]:
    content = json.loads(Path(out, "reproduce.json").read_text())
    return {line["name"]: line for one in content["tables"] for line in (*one["cells"], *one["orders"])}


def stamps(folder: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.name == "metrics.csv"}


def digits(path: Path, *callbacks: str, **options: Any) -> Path:
    """Write a table of one run on digits that learns in a moment, and its configuration beside it."""
    small(path.parent / "small.yaml", *callbacks, max_rounds=4, local_epochs=3)
    rate = {"model.init_args.lr": 0.5, "data.init_args.max_train": 300, "data.init_args.max_test": 100}
    common = {"options": {**rate, **options.pop("options", {})}}
    content = table(common=common, rows={"FedAvg": {"run": "fedavg", "published": {"accuracy": 0.6}}}, **options)
    return write(path, content)


# -- without a run -----------------------------------------------------------------------------------------------------
def test_the_list_says_what_there_is(capsys):
    assert reproduce() == 0
    shown = capsys.readouterr().out
    assert "fenda_heart" in shown and "sets: minutes" in shown and "cpu: 7" in shown
    assert reproduce("--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"closed_forms", "fenda_heart"} <= {one["name"] for one in told["tables"]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["closed_form"], "There is no table 'closed_form'. Did you mean closed_forms?"),
        (["--set=cpus"], "No table is in the set 'cpus'. Did you mean cpu?"),
        (["--set=all"], "Sets: cpu, hours, reduced; without --set all runs are made"),
        (["closed_forms", "--trainer.seed=1"], "'--trainer.seed=1' cannot be given here"),
        (["closed_forms", "--jobs=0"], "--jobs is 0"),
        (["closed_forms", "--recrd"], "there is no option '--recrd'. Did you mean --record"),
    ],
)
def test_bad_words_are_said_in_a_sentence(words, sentence, capsys):
    assert reproduce(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedlightning reproduce: ") and sentence in said and said.count("\n") == 1
    assert not list(Path().iterdir())


def test_missing_data_and_packages_are_said_and_nothing_runs(capsys, monkeypatch):
    data = {"name": "Numbers", "root": ["numbers", "Numbers"], "files": ["a.csv"], "get": "Make them"}
    digits(Path("t.yaml"), data=data)
    assert reproduce("t.yaml", "--out=out") == 0
    assert "Numbers is missing: a.csv is not in data/numbers or data/Numbers. Make them" in capsys.readouterr().out
    assert results()["FedAvg / accuracy"]["verdict"] == "not run"
    monkeypatch.setitem(table_runs.PACKAGES, "ray", "no_such_package")
    digits(Path("t.yaml"), extras=["ray"])
    assert reproduce("t.yaml", "--out=out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The table needs no_such_package, which is not installed: pip install 'ray>=2.55'" in said


def test_an_extra_that_is_none_is_refused(capsys):
    digits(Path("t.yaml"), extras=["privcy"])  # whoever holds that name on an index would be installed
    assert reproduce("t.yaml", "--out=out") == 2
    assert "t.yaml: the table has extras: ['privcy']. Give some of clinical, flower" in capsys.readouterr().err


def test_what_a_configuration_gets_wrong_names_table_and_run(capsys):
    digits(Path("t.yaml"), options={"trainer.max_round": 3})
    assert reproduce("t.yaml", "--out=out") == 2
    assert "t.yaml: run 'fedavg' cannot be made: " in capsys.readouterr().err
    assert not Path("out/runs").exists()


@pytest.mark.slow
def test_numbers_from_memory_have_no_verdict_and_need_no_run(capsys):
    pytest.importorskip("opacus")
    spec = {"kind": "epsilon", "q": 0.04, "sigma": 1.5, "steps": 2250, "delta": 1e-5}
    cell = {"row": "a", "column": "b", "measure": spec, "published": 7.3, "tolerance": 0.1}
    content = table(runs={}, rows={}, columns={}, measures={}, cells=[cell, {**cell, "row": "c", "read": "memory"}])
    write(Path("t.yaml"), content)
    assert reproduce("t.yaml", "--out=out") == 0
    found = results()
    assert [found[name]["verdict"] for name in ("a / b", "c / b")] == ["agrees", "not judged"]
    assert "none disagrees by chance" in capsys.readouterr().out


# -- with runs ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_set_leaves_out_what_needs_other_runs_but_no_failure(capsys):
    bad = {"configs": "small.yaml", "options": {"model.init_args.lr": 1e30}}
    runs = {"fedavg": "small.yaml", "bad": bad, "more": {"configs": "small.yaml", "sets": ["hours"]}}
    orders = {"better": "more", "worse": ["fedavg", "bad"], "measure": "final"}
    digits(Path("t.yaml"), runs=runs, orders=orders, minutes={"cpu": 0.1, "hours": 60})
    assert reproduce("t.yaml", "--out=out", "--set=cpu", "--seeds=1", "--jobs=2") == 1
    for shown in (capsys.readouterr().out, Path("out/report.html").read_text()):
        assert "1 more needs runs of other sets" in shown and "more better than fedavg" not in shown
        assert "more better than bad" in shown and "FedAvg / accuracy" in shown
    assert {"more better than fedavg: final", "more better than bad: final"} <= set(results())


def test_a_score_that_no_model_logs_is_said_before_anything_runs(capsys):
    digits(Path("t.yaml"), measures={"final": {"metric": "acuracy", "checkpoint": "latest", "stage": "G"}})
    assert reproduce("t.yaml", "--out=out") == 2
    said = " ".join(capsys.readouterr().err.split())
    sentence = "'FedAvg / accuracy' asks for the metric 'acuracy', which its model does not log. Did you mean accuracy"
    assert sentence in said and not list(Path("out").rglob("metrics.csv"))


@pytest.mark.parametrize(
    ("measure", "fault"),
    [
        ({"kind": "at_round", "metric": "accuracy", "round": 99}, "reads round 99, and the run has rounds 1 to"),
        ({"kind": "logged", "metric": "loss", "round": 0}, "reads round 0, and the run has rounds 1 to"),
        ({"kind": "best_round", "metric": "accuracy", "data": "pooled"}, "trainer.evaluation.data has local"),
        (
            {"kind": "offered", "metric": "accuracy", "client": "0"},
            "on clients data, and trainer.evaluation.test_data has local, pooled",
        ),
        ({"kind": "entry", "name": "x", "client": "nobody"}, "is of client 'nobody', and the clients are 0, 1"),
        ({"metric": "accuracy", "over": "client:nobody"}, "is of client 'nobody', and the clients are 0, 1"),
        (
            {"kind": "difference", "of": {"kind": "rounds_to", "metric": "accuracy", "target": 1, "stage": "L2"}},
            "reads scores of rounds at L2, and trainer.evaluation.stages has G",
        ),
    ],
)
def test_what_a_run_cannot_have_is_said_before_anything_runs(measure, fault, capsys):
    other = {"other": {"configs": "small.yaml", "options": {"trainer.seed": 5}}} if "of" in measure else {}
    against = {"against": "other"} if other else {}
    digits(
        Path("t.yaml"),
        runs={"fedavg": "small.yaml", **other},
        measures={"final": {**measure, **against}},
        options={"trainer.evaluation.stages": ["G"]},
    )
    assert reproduce("t.yaml", "--out=out") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "'FedAvg / accuracy' " in said and fault in said and not list(Path("out").rglob("metrics.csv"))


def test_seeds_that_are_no_planned_look_are_not_recorded(capsys):
    digits(Path("t.yaml"), seeds=4)
    assert reproduce("t.yaml", "--out=out", "--seeds=3", "--record") == 2
    assert "t is judged with the seeds 0, 1, 2, 3, not with 0, 1, 2." in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_runs_are_made_once_and_cells_are_those_of_metrics_csv(tmp_path, capsys):
    digits(Path("one.yaml"))
    loss = {"metric": "loss", "checkpoint": "latest", "stage": "L1"}
    cell = {"row": "FedAvg", "column": "loss", "run": "fedavg", "measure": loss, "published": 1.0, "tolerance": 1.0}
    digits(Path("two.yaml"), cells=[cell])
    assert reproduce("one.yaml", "two.yaml", "--out=out", "--jobs=2") == 0
    made = stamps("out")
    assert len(made) == 2  # two seeds, and both tables ask for the same run
    cell = results()["FedAvg / accuracy"]
    for seed, value in cell["values"].items():
        (file,) = Path("out/runs").glob(f"*/seed_{seed}/metrics.csv")
        with file.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row["split"] == "test" and row["metric"] == "test_accuracy"]
        own = [float(row["value"]) for row in rows if (row["stage"], row["data"]) == ("G", "local")]
        assert value == pytest.approx(sum(own) / 3)
    capsys.readouterr()
    assert reproduce("two.yaml", "--out=out", "--json") == 0
    shown = capsys.readouterr().out
    assert "2 runs, 2 of them there already" in shown and stamps("out") == made
    assert json.loads(shown.splitlines()[-1])["command"] == "reproduce"
    assert (tmp_path / "out/report.html").exists()
    assert reproduce("one.yaml", "--out=out", "--seeds=3") == 0
    assert len(stamps("out")) == 3


@pytest.mark.slow
def test_a_recorded_agreement_that_is_lost(capsys):
    """A wrong implementation turns its cell to disagrees; the record holds verdicts and tolerances to what they were."""
    digits(Path("t.yaml"), seeds=4)
    assert reproduce("t.yaml", "--out=out", "--jobs=2", "--record") == 0
    record = json.loads(Path("recorded/t.json").read_text())
    (line,) = record["lines"]
    assert line["verdict"] == "agrees" and line["tolerance"] == 0.3 and set(line["values"]) == set("0123")
    assert list(record["versions"]) == [str(line["commit"])]
    digits(Path("t.yaml"), PLANTED, seeds=4)
    assert reproduce("t.yaml", "--out=out", "--jobs=2") == 3  # it ran, and disagrees: no failure
    assert results()["FedAvg / accuracy"]["verdict"] == "disagrees"
    assert "t: FedAvg / accuracy once agreed, now: disagrees" in capsys.readouterr().out
    content = yaml.safe_load(Path("t.yaml").read_text())
    content["columns"]["accuracy"]["tolerance"] = 0.9
    write(Path("t.yaml"), content)
    for _ in range(2):  # recording does not make it forgotten
        assert reproduce("t.yaml", "--out=out", "--jobs=2", "--record") == 0
        said = "t: the tolerance of FedAvg / accuracy was widened from 0.3 to 0.9 after a run"
        assert said in " ".join(capsys.readouterr().out.split())
    content["rows"] = {"Other": {"run": "fedavg", "published": {"accuracy": 0.5}}}
    write(Path("t.yaml"), content)
    assert reproduce("t.yaml", "--out=out", "--jobs=2") == 3
    assert "once agreed and is not in the table any more" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_killed_run_is_not_run_and_goes_on(tmp_path, capsys):
    counter = tmp_path / "visits"
    options = {"trainer.callbacks.visit": 5, "trainer.callbacks.counter": str(counter)}
    digits(Path("t.yaml"), f"{HERE}.Kill", options=options, seeds=[0])
    assert reproduce("t.yaml", "--out=out") == 1
    assert "failed: It was killed by SIGKILL" in " ".join(capsys.readouterr().out.split())
    assert results()["FedAvg / accuracy"]["verdict"] == "not run"
    assert reproduce("t.yaml", "--out=out", "--redo=failed") == 0
    assert "goes on after round 1 of 4" in capsys.readouterr().out
    assert results()["FedAvg / accuracy"]["verdict"] == "inconclusive"
    assert "one seed has no interval" in results()["FedAvg / accuracy"]["note"]


@pytest.mark.slow
def test_a_curve_of_test_data():
    rounds = {"kind": "at_round", "metric": "accuracy", "round": 4}
    cell = {"row": "FedAvg", "column": "last", "run": "fedavg", "measure": rounds, "published": 0.5, "tolerance": 0.5}
    digits(Path("t.yaml"), cells=[cell], runs={"fedavg": {"configs": "small.yaml", "test_curve": True}})
    assert reproduce("t.yaml", "--out=out") == 0
    found = results()
    final, last = (found[f"FedAvg / {name}"]["values"] for name in ("accuracy", "last"))
    assert final == pytest.approx(last)

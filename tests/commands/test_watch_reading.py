"""What the files of runs say of them while they go on."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from fedlightning.callbacks import ClientDP, FedAvg, LocalCheckpoint
from fedlightning.commands.watch.pages import Watched
from fedlightning.commands.watch.reading import RunFiles, ScoreCurves
from fedlightning.resume.lock import RunLock
from tests.helpers import Toy, federate, toy_data

ROUNDS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a client that fails once, and the trainer that made it."""
    root = tmp_path_factory.mktemp("watched")

    class Failing(FedAvg):
        def on_send(self, client, update):
            if client.id == "1" and client.round == 1:
                raise RuntimeError("the scanner is off")

    options = {"max_rounds": ROUNDS, "save_state": 1, "evaluation": 1, "logger": False}
    return federate(Toy(), toy_data(), [Failing(), LocalCheckpoint()], root=root, **options)


@pytest.fixture
def folder(finished, tmp_path):
    config = f"trainer: {{max_rounds: {ROUNDS}, callbacks: [{{class_path: a.FedProx}}, {{class_path: b.LocalCheckpoint}}]}}\n"
    shutil.copytree(finished.run.path, tmp_path / "run")
    (tmp_path / "run/config.yaml").write_text(config)
    return tmp_path / "run"


def test_a_finished_run_is_what_the_trainer_says(finished, folder):
    finished.test(verbose=False)
    state = RunFiles(folder).state()
    assert (state["status"], state["rounds"], state["max_rounds"], state["title"]) == ("done", 3, 3, "FedProx")
    assert [state["bytes_up"], state["bytes_down"]] == [finished.summary["bytes_up"], finished.summary["bytes_down"]]
    for stage in ("G", "L1"):
        rows = [
            r
            for r in finished.rows
            if (r.metric, r.stage, r.data, r.checkpoint) == ("val_loss", stage, "local", "latest")
        ]
        for number, mean, low, high in state["curves"]["val_loss"][stage]:
            values = [r.value for r in rows if r.round == number and r.split == "val"]
            assert (mean, low, high) == (pytest.approx(sum(values) / len(values)), min(values), max(values))
    (failure,) = state["failures"]
    assert (failure["round"], failure["client"]) == (2, "1") and "the scanner is off" in failure["reason"]
    assert [client["failures"] for client in state["clients"]] == [0, 1, 0]
    assert [client["samples"] for client in state["clients"]] == [24, 40, 16]
    json.dumps(state, allow_nan=False)  # a browser reads it


def test_what_is_appended_is_read_on_and_what_a_resumed_run_cuts_off_is_forgotten(folder):
    whole = (folder / "metrics.csv").read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "metrics.csv").write_bytes(b"".join(lines[:5]) + lines[5][:7])
    scores = ScoreCurves(folder / "metrics.csv")
    scores.read()
    assert scores.place == len(b"".join(lines[:5]))  # the half line waits
    (folder / "metrics.csv").write_bytes(whole)
    scores.read()
    at_once = ScoreCurves(folder / "metrics.csv")
    at_once.read()
    assert (scores.curves, scores.clients) == (at_once.curves, at_once.clients) and scores.round == ROUNDS
    (folder / "metrics.csv").write_bytes(b"".join(lines[:5]))
    scores.read()
    assert scores.round == 1


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_run_that_goes_on_and_one_that_has_stopped(folder, rounds):
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text(
        "".join(line for line in lines if not line[0].isdigit() or int(line[0]) <= rounds)
    )
    for name in ("summary.json", "checkpoints/last/manifest.json"):
        (folder / name).unlink()
    files = RunFiles(folder)
    with RunLock(folder):
        state = files.state()
        assert (state["status"], state["rounds"]) == ("running", rounds) and state["since"]
    assert files.state()["status"] == ("stopped" if rounds else "waiting")


HEAD = "round,stage,model,checkpoint,data,split,client,metric,value,num_samples\n"


def row(number, value="0.5", client="a"):
    return f"{number},G,global,latest,local,val,{client},val_loss,{value},10\n"


@pytest.mark.parametrize("between", [True, False])
def test_another_runs_file_in_the_same_place_is_read_from_its_beginning(between, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(HEAD + row(1) + row(2))
    scores = ScoreCurves(path)
    scores.read()
    path.unlink()
    if between:
        scores.read()
        assert not scores.curves and scores.round == 0
    path.write_text(HEAD + "".join(row(number, "9.0") for number in range(1, 5)))
    scores.read()
    assert [scores.curves["val_loss"]["G"][number][:2] for number in range(1, 5)] == [[9.0, 1]] * 4


@pytest.mark.parametrize("text", [row("²"), row("9" * 5000), row(1, client="x" * 200_000)])
def test_damaged_lines_are_passed_over(text, tmp_path):
    (tmp_path / "metrics.csv").write_text(HEAD + row(3) + text, encoding="utf-8")
    assert RunFiles(tmp_path).state()["rounds"] == 3


def test_errors_of_a_regression_say_their_units(folder):
    """The page wrote no unit beside an error that it had multiplied."""
    rows = (folder / "metrics.csv").read_text().replace("val_loss", "val_rmse")
    (folder / "metrics.csv").write_text(rows)
    (folder / "config.yaml").write_text(
        "model: {class_path: fedlightning.models.Regressor}\ndata: {init_args: {target: days, target_statistics: [9, 6]}}\n"
    )
    state = RunFiles(folder).state()
    assert state["units"]["val_rmse"] == [
        "RMSE is in the units of days; metrics.csv has it in standard deviations (6)."
    ]
    assert set(state["units"]) == set(state["curves"])


def test_the_expected_end_is_from_the_newest_rounds(folder):
    manifest = json.loads((folder / "checkpoints/last/manifest.json").read_text())
    for number, entry in enumerate(manifest["extra"]["history"]):
        entry["seconds"] = 10.0 * (number + 1)
    (folder / "checkpoints/last/manifest.json").write_text(json.dumps(manifest))
    (folder / "config.yaml").write_text("trainer: {max_rounds: 5}\n")
    with RunLock(folder):
        assert RunFiles(folder).state()["left"] == pytest.approx(2 * 20.0)


def test_epsilon_is_shown_by_round(tmp_path):
    trainer = federate(
        Toy(),
        toy_data(),
        [ClientDP(clip=1.0, noise_multiplier=1.0, delta=0.1, rate=0.5)],
        root=tmp_path,
        max_rounds=2,
        evaluation=0,
    )
    state = RunFiles(trainer.run.path).state()
    assert [number for number, *_ in state["epsilon"]] == [1, 2]
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    spent = [told["epsilon"], told["epsilon_participants_known"]]
    assert state["epsilon"][-1][1:] == pytest.approx(spent) and spent[0] < spent[1]


def entry(name, seed, state, **more):
    return {"run": name, "seed": seed, "state": state, "folder": f"runs/{name}/seed_{seed}", **more}


@pytest.fixture
def study(folder, tmp_path):
    """A comparison of two methods: one run done, one begun, one failed, one to come."""
    place = tmp_path / "study"
    for name in ("fedavg/seed_0", "fedavg/seed_1"):
        shutil.copytree(folder, place / "runs" / name)
    runs = [
        entry("fedavg", 0, "done", seconds=30.0, error=None),
        entry("fedavg", 1, "pending", seconds=None, error=None),
        entry("fedper", 0, "failed", seconds=1.0, error="ValueError: <b>no head</b>"),
        entry("fedper", 1, "pending", seconds=None, error=None),
    ]
    place.mkdir(exist_ok=True)
    text = json.dumps({"format": 1, "methods": [{"name": "fedavg"}, {"name": "fedper"}], "runs": runs, "seeds": [0, 1]})
    (place / "study.json").write_text(text)
    (place / "runs/fedavg/seed_1/config.yaml").write_text("trainer: {max_rounds: 6}\n")
    return place


def test_a_grid_of_runs_as_it_fills(study):
    state = Watched(study).state()
    assert state["kind"] == "grid" and [run["state"] for run in state["runs"]] == [
        "done",
        "running",
        "failed",
        "pending",
    ]
    assert (state["runs"][1]["rounds"], state["runs"][1]["max_rounds"]) == (3, 6)
    assert state["left"] == pytest.approx(30 * (1 + 0.5))  # one to come, one half done, one at a time
    assert set(state["units"]) == set(state["metrics"])
    assert state["metrics"][-1] == "train_loss" and state["runs"][0]["metrics"]["val_loss"] > 0
    (study / "tasks").mkdir()
    shutil.move(study / "study.json", study / "tasks/study.json")
    shutil.move(study / "runs", study / "tasks/runs")
    assert Watched(study).state()["runs"][1]["id"] == "tasks/runs/fedavg/seed_1"  # as league has it


def test_a_run_that_has_started_is_running_before_its_first_round(study):
    (study / ".lock").touch()
    log = study / Watched(study).state()["runs"][3]["id"] / "log.txt"
    log.parent.mkdir(parents=True)
    log.touch()
    for seconds, state in ((60, "running"), (-60, "pending")):  # the second is of an earlier command
        os.utime(log, times=(began := (study / ".lock").stat().st_mtime, began + seconds))
        assert Watched(study).state()["runs"][3]["state"] == state


def test_a_league_lists_more_runs_as_it_goes_so_nobody_knows_its_end(study):
    assert not Watched(study).state()["grows"]
    told = json.loads((study / "study.json").read_text()) | {"command": "fedlightning league digits"}
    (study / "study.json").write_text(json.dumps(told))
    state = Watched(study).state()
    assert state["grows"] and state["left"] is None


def test_one_run_of_a_grid_and_nothing_else_of_the_disk(study, folder):
    watched = Watched(study)
    assert watched.state("runs/fedavg/seed_0")["rounds"] == ROUNDS
    assert watched.state("runs/fedavg/seed_9") is None and watched.state("../run") is None


def test_the_newest_run_of_a_folder_or_none_yet(folder, tmp_path):
    assert Watched(tmp_path / "later").state()["kind"] == "nothing"
    run = tmp_path / "runs" / "name" / "version_0"
    shutil.copytree(folder, run)
    for place in (run, run.parent, run.parent.parent):
        assert Watched(place).state()["folder"] == str(run)
    (run.parent / "version_1").mkdir()
    for name in ("config.yaml", "evaluation.json"):  # of `fedlightning evaluate`, which trains nothing
        (run.parent / "version_1" / name).write_text("{}")
    assert Watched(run.parent).state()["folder"] == str(run)

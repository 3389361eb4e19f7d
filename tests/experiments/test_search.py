"""Sweeps: values, proposals, the choice by validation loss recomputed from raw rows, and test data left alone."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import yaml

from fedlightning.callbacks.shared.ledger import Ledger
from fedlightning.cli import main
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.experiment import Experiment, StudyFile
from fedlightning.experiments.methods import Method, without_place
from fedlightning.experiments.plan import make_plan
from fedlightning.experiments.search import (
    Proposals,
    Search,
    Trial,
    combinations,
    name_edges,
    objective,
    override,
    parse_grid,
    parse_search,
    ranked,
    refuse_private,
    split_values,
)
from fedlightning.scores.rows import Row, read_rows
from tests.experiments.tiny import HERE, request, small


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- values ------------------------------------------------------------------------------------------------------------
def test_grids():
    grid = parse_grid(["trainer.callbacks.mu=0.1,1", "model.init_args.net.init_args.hidden=[8],[16,8]"])
    tried = list(combinations(grid))
    assert [tuple(values.values()) for values in tried] == [
        ("0.1", "[8]"), ("0.1", "[16,8]"), ("1", "[8]"), ("1", "[16,8]"),
    ]  # fmt: skip
    assert split_values('a,"b,c",{d: [1,2], e: 3},f') == ["a", '"b,c"', "{d: [1,2], e: 3}", "f"]


@pytest.mark.parametrize(
    ("option", "word", "sentence"),
    [
        ("grid", "lr=1,2", "--grid lr=1,2: write KEY=VALUE,VALUE,... with a key of trainer, model or data"),
        ("grid", "model.lr", "with a key of trainer, model or data"),
        ("grid", "model.lr=1,,2", "a value is missing"),
        ("search", "model.lr=log:0:1", "a logarithmic range must begin above 0"),
        ("search", "model.lr=uniform:2:1", "the lower bound must be below the upper one"),
        ("search", "model.lr=int:1:2.5", "the range must be log:LOW:HIGH"),
        ("search", "model.lr=normal:0:1", "the range must be log:LOW:HIGH"),
        ("search", "model.lr=choice:a,,b", "a choice is missing"),
        ("search", "model.lr=uniform:0:inf", "the lower bound must be"),
    ],
)
def test_values_that_are_none(option, word, sentence):
    with pytest.raises(InputError) as caught:
        (parse_grid if option == "grid" else parse_search)([word])
    assert sentence in str(caught.value)


def test_a_key_is_given_once():
    for parse, words in ((parse_grid, ["model.lr=1", "model.lr=2"]), (parse_search, ["model.lr=int:1:2"] * 2)):
        with pytest.raises(InputError, match=r"model\.lr is given twice"):
            parse(words)


def test_proposals_are_the_same_for_the_same_seed_and_answers():
    pytest.importorskip("optuna")
    ranges = parse_search(
        ["model.lr=log:1e-5:1e-1", "model.n=int:2:4", "model.act=choice:relu,tanh", "model.p=uniform:-1:1"]
    )

    def rounds(seed, answer):
        proposals, asked = Proposals(ranges, seed, False), []
        for number in range(14):
            asked += proposals.ask(1)
            proposals.tell([None if number == 3 else answer(asked[-1])])
        return asked

    def distance(values):
        return abs(math.log10(float(values["model.lr"])) + 3)

    asked = rounds(0, distance)
    assert asked == rounds(0, distance)
    assert asked != rounds(1, distance)
    for values in asked:
        assert 1e-5 <= float(values["model.lr"]) <= 1e-1
        assert values["model.n"] in ("2", "3", "4")
        assert values["model.act"] in ("relu", "tanh")
        assert -1 <= float(values["model.p"]) <= 1


# -- the choice --------------------------------------------------------------------------------------------------------
def write_run(folder: Path, rows: list[tuple[str, str, str, str, float | None, int]], validating: list[str]) -> Path:
    """A finished run's summary of (model, stage, checkpoint, client, value, samples)."""
    from fedlightning.scores.metric_names import summarise

    made = [
        Row(1, s, m, c, "local", "val", client, "val_loss", math.nan if v is None else v, n)
        for m, s, c, client, v, n in rows
    ]
    clients = {client: {"train": 5, "val": int(client in validating), "test": 1} for client in "abc"}
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"results": summarise(made), "data": {"clients": clients}}))
    return folder


def test_the_objective_is_weighted_and_of_what_is_deployed(tmp_path):
    latest = [("personal", "L1", "latest", "a", 5.0, 1), ("personal", "L1", "latest", "b", 6.0, 3)]
    central = [("global", "G", "best_global", "a", 3.0, 1), ("global", "G", "best_global", "b", 4.0, 3)]
    local = [("personal", "L1", "best_local", "a", 1.0, 1), ("personal", "L1", "best_local", "b", 2.0, 3)]
    assert objective(write_run(tmp_path / "1", latest + central + local, ["a", "b"])) == pytest.approx((1 + 3 * 2) / 4)
    assert objective(write_run(tmp_path / "2", latest + central, ["a", "b"])) == pytest.approx((3 + 3 * 4) / 4)
    assert objective(write_run(tmp_path / "3", latest, ["a", "b"])) == pytest.approx((5 + 3 * 6) / 4)
    with pytest.raises(InputError, match=r"no validation score 'accuracy'. It has val_loss"):
        objective(tmp_path / "3", "accuracy")


def test_a_diverged_client_is_no_better_than_a_failed_run(tmp_path):
    good = ("personal", "L1", "latest", "a", 0.1, 1)
    assert objective(write_run(tmp_path / "1", [good, ("personal", "L1", "latest", "b", None, 1)], ["a", "b"])) is None
    assert objective(write_run(tmp_path / "2", [good], ["a", "b"])) is None
    assert objective(write_run(tmp_path / "3", [good], ["a"])) == pytest.approx(0.1)
    trials = [Trial({"model.lr": str(lr)}, scores) for lr, scores in ((1, {0: 0.1, 1: None}), (2, {0: 0.5, 1: 0.3}))]
    assert [trial.objective for trial in trials] == [None, pytest.approx(0.4)]
    assert [trial.values["model.lr"] for trial in ranked(trials)] == ["2", "1"]


@pytest.mark.parametrize(
    ("grid", "ranges", "value", "side"),
    [
        (["model.lr=0.1,0.01,1"], [], "0.1", None),
        (["model.lr=0.1,0.01,1"], [], "0.01", "smaller"),
        (["model.lr=0.1"], [], "0.1", None),
        (["model.lr=relu,tanh"], [], "tanh", None),
        ([], ["model.lr=log:1e-4:1"], "0.8", "larger"),
        ([], ["model.lr=log:1e-4:1"], "0.0003", None),
        ([], ["model.lr=uniform:0:1"], "0.0003", "smaller"),
        ([], ["model.lr=int:1:4"], "4", "larger"),
        ([], ["model.lr=choice:1,2"], "2", None),
    ],
)
def test_a_number_at_the_edge_of_what_was_tried_is_said(grid, ranges, value, side):
    sentences = list(name_edges({"model.lr": value}, parse_grid(grid), parse_search(ranges)))
    assert len(sentences) == (side is not None) and all(f"{side} values" in sentence for sentence in sentences)


def test_ranks_go_both_ways():
    trials = [Trial({"model.lr": str(value)}, {0: value}) for value in (0.2, 0.9, 0.5)]
    assert [trial.objective for trial in ranked(trials)] == [0.2, 0.5, 0.9]
    assert [trial.objective for trial in ranked(trials, higher_is_better=True)] == [0.9, 0.5, 0.2]


def test_an_override_stacked_on_its_files_is_the_trial(tmp_path):
    file = small(tmp_path / "a.yaml", "FedProx")
    options = [
        "--trainer.callbacks.mu=0.7",
        "--model.net.hidden=[5]",
        "--trainer.local_epochs=3",
        "--data.batch_size=4",
        "--trainer.evaluation=2",
        "--trainer.engine=processes",
    ]
    tried = make_plan(request([file], options=options, baselines=[])).methods[0].config
    part = override(tried, options)
    assert set(part["trainer"]) == {"callbacks", "local_epochs", "evaluation", "engine"}
    assert part["trainer"]["evaluation"] == {"every": 2}  # and not the test data that a sweep leaves out
    assert set(part["data"]["init_args"]) == {"batch_size"}
    Path("best.yaml").write_text(yaml.safe_dump(part))
    stacked = make_plan(request([file], after=["best.yaml"], baselines=[])).methods[0].config
    assert without_place(stacked) == without_place(tried)


# -- whole sweeps ------------------------------------------------------------------------------------------------------
def from_raw_rows(run: Path) -> float:
    """Each client's lowest L1 validation loss over rounds, weighted by its validation samples: LocalCheckpoint's choice."""
    best: dict[str, tuple[float, int]] = {}
    for row in read_rows(run / "metrics.csv"):
        where = (row.stage, row.checkpoint, row.data, row.split, row.metric)
        if where == ("L1", "latest", "local", "val", "val_loss"):
            best[row.client] = min(best.get(row.client, (math.inf, 0)), (row.value, row.num_samples))
    return sum(value * size for value, size in best.values()) / sum(size for _, size in best.values())


def test_a_sweep_finds_the_lowest_validation_loss_and_leaves_test_data_alone(tmp_path, capsys):
    file = small(tmp_path / "a.yaml", max_rounds=2)
    words = ["sweep", "--config", file, f"--data={HERE}.SealedTests", "--out=out", "--grid", "model.lr=0.0001,0.3"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    found = json.loads(Path("out/sweep.json").read_text())
    assert [trial["values"] for trial in found["trials"]] == [{"model.lr": 0.0001}, {"model.lr": 0.3}]
    raw = {}
    for trial in found["trials"]:
        run = Path("out") / trial["folder"] / "seed_0"
        raw[trial["trial"]] = from_raw_rows(run)
        assert trial["objective"] == pytest.approx(raw[trial["trial"]], abs=1e-6)
        assert {row.split for row in read_rows(run / "metrics.csv")} == {"train", "val"}
    assert len(set(raw.values())) == 2
    assert found["best"] == min(raw, key=lambda name: raw[name])
    lines = [line for line in shown.splitlines() if line.rstrip().endswith(tuple(raw))]
    assert found["best"] in lines[-2]  # best first
    best = {trial["trial"]: trial for trial in found["trials"]}[found["best"]]
    assert yaml.safe_load(Path("out/best.yaml").read_text())["model"]["init_args"] == {"lr": best["values"]["model.lr"]}
    assert "2 trials x 1 seed = 2 runs" in shown and "is at the " in shown
    before = {path: path.stat().st_mtime_ns for path in Path("out/runs").rglob("*.*")}
    assert main([*words[:-1], "model.lr=0.3,0.0001"]) == 0  # nothing is run again, in whatever order
    assert {path: path.stat().st_mtime_ns for path in Path("out/runs").rglob("*.*")} == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--grid", "model.lr=1"], "--config is missing"),
        (["--config", "a.yaml"], "give either --grid KEY=A,B,C or --search KEY=RANGE"),
        (["--config", "a.yaml", "--grid", "model.lr=1", "--search", "model.lr=int:1:2"], "give either --grid"),
        (["--config", "a.yaml", "--search", "model.lr=int:1:2", "--trials=0"], "--trials is 0"),
        (["--config", "a.yaml", "--grid", "model.lr=0.1,fast"], "model.lr"),
        (["--config", "a.yaml", "--grid", "model.learning=0.1"], "no option"),
    ],
)
@pytest.mark.fast_cases(4)
def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, capsys, words, sentence):
    small(tmp_path / "a.yaml")
    assert main(["sweep", *words, "--out=out"]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("out/runs").exists()


def test_private_trials_are_refused_without_scores_or_a_ledger(tmp_path):
    """The first trial was spent before it was seen to have no score; without a ledger, nobody added up what all spent."""
    pytest.importorskip("opacus")

    def runs(name, count, **options):  # configurations may have `callbacks: NAME`, without a list
        entry = {"class_path": f"fedlightning.callbacks.{name}", "init_args": options}
        return [Method("a", [], {"trainer": {"callbacks": entry, "max_rounds": 2}})] * count

    refuse_private(runs("FedProto", 2))
    for name in ("ClientDP", "SampleDP"):
        options = {"delta": 1e-3, "noise_multiplier": 1.0}
        with pytest.raises(
            InputError, match=rf"{name} withholds scores on validation data, and a sweep chooses by them"
        ):
            refuse_private(runs(name, 1, **options))
        options |= {"scores": "in the clear"}
        with pytest.raises(
            InputError, match=rf"{name}: 2 runs on the same data add up, and without one ledger of all each counts"
        ):
            refuse_private(runs(name, 2, **options))
        refuse_private(runs(name, 1, **options))
        with pytest.raises(InputError, match=rf"{name}: 2 runs on the same data add up"):
            refuse_private(runs(name, 1, **options), begun=1)  # a grid that was made longer
        places = [str(tmp_path), os.path.relpath(tmp_path)]
        refuse_private([run for place in places for run in runs(name, 1, **options, ledger=place)], begun=3)
        for other in ("b", None):
            with pytest.raises(InputError, match="without one ledger of all"):
                refuse_private([run for place in ("a", other) for run in runs(name, 1, **options, ledger=place)])


def test_runs_that_came_to_a_round_have_begun(tmp_path):
    study = StudyFile(tmp_path)
    for number, (state, rounds) in enumerate(
        [("done", 2), ("failed", 1), ("failed", 0), ("pending", 1), ("pending", 0)]
    ):
        study.data["runs"].append({"run": "a", "seed": number, "state": state})
        folder = study.run_folder("a", number)
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("round,value\n" + "".join(f"{round + 1},0\n" for round in range(rounds)))
    assert study.begun == 3


def test_updates_and_records_are_counted_apart(tmp_path):
    """One run of both callbacks counted as two; of one ledger, what records had spent was added to what updates will."""
    pytest.importorskip("opacus")
    options = {"delta": 1e-3, "noise_multiplier": 0.7, "epsilon": 8.0, "scores": "in the clear"}

    def runs(**ledger):
        names = ("ClientDP", "SampleDP")
        entries = [{"class_path": f"fedlightning.callbacks.{name}", "init_args": options | ledger} for name in names]
        return [Method("a", [], {"trainer": {"callbacks": entries, "max_rounds": 1}})]

    refuse_private(runs())
    with pytest.raises(InputError, match="ClientDP: 2 runs on the same data add up"):
        refuse_private(runs() * 2)
    Ledger(str(tmp_path), "a client", "of records").note([(1.0, 1.0, 2)])
    refuse_private(runs(ledger=str(tmp_path)))
    Ledger(str(tmp_path), "clients", "of updates").note([(0.5, 1.0, 9)])
    with pytest.raises(InputError, match="ClientDP: 1 runs would make epsilon"):
        refuse_private(runs(ledger=str(tmp_path)))


def test_a_trial_on_other_data_is_named(tmp_path):
    """The file changed between two commands, or the grid changes the split: the values are of two sets of samples."""
    trials = {trial.name: trial for trial in map(Trial, ({"data.x": "1"}, {"data.x": "2"}, {"data.x": "3"}))}
    search = Search(Experiment(tmp_path, None, main), request(["a.yaml"]), [0], "loss", trials)
    for name, split in zip(trials, ("this", "other", "this"), strict=True):
        folder = search.experiment.study.run_folder(name, 0)
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"results": [], "data": {"splits": {"val": split}}}))
        (folder / "config.yaml").write_text("trainer: {seed: 0}")
        search.experiment.study.data["runs"].append({"run": name, "seed": 0, "state": "done"})
    first, other, _ = trials
    (sentence,) = search.name_other_data()
    assert sentence.startswith(f"{other}, seed 0, was validated on other data than {first}: ")


@pytest.mark.slow
def test_a_search_is_resumed_without_running_anything_twice(tmp_path, capsys):
    pytest.importorskip("optuna")
    file = small(tmp_path / "a.yaml")
    words = ["sweep", "--config", file, "--out=out", "--search", "model.lr=log:1e-4:1", "--seeds=2", "--jobs=2"]
    assert main([*words, "--trials=3"]) == 0
    first = json.loads(Path("out/sweep.json").read_text())["trials"]
    before = {path: path.stat().st_mtime_ns for path in Path("out/runs").rglob("*.*")}
    assert main([*words, "--trials=5", "--jobs=1"]) == 0
    trials = json.loads(Path("out/sweep.json").read_text())["trials"]
    assert trials[:3] == first
    assert len(trials) == 5
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for trial in trials:
        runs = [Path("out") / trial["folder"] / f"seed_{seed}" for seed in (0, 1)]
        assert trial["objective"] == pytest.approx(sum(map(from_raw_rows, runs)) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("callback", "options", "runs"),
    [
        ("ClientDP", {"noise_multiplier": 1.0, "epsilon": 8.0}, 4),
        ("ClientDP", {"epsilon": 8.0}, 2),
        ("SampleDP", {"epsilon": 8.0}, 2),
    ],
)
@pytest.mark.fast_cases(1)
def test_a_sweep_that_a_ledger_cannot_pay_is_refused_before_it_starts(tmp_path, capsys, callback, options, runs):
    """Every trial spends once for each seed, and the first of them spent what the others needed."""
    pytest.importorskip("opacus")
    private = {"delta": 1e-3, "scores": "in the clear", "ledger": str(tmp_path / "ledger"), **options}
    entry = {"class_path": f"fedlightning.callbacks.{callback}", "init_args": private}
    file = small(tmp_path / "a.yaml", callbacks=[entry], max_rounds=2)
    rates = ",".join(f"0.{place}" for place in range(1, runs + 1))
    for tried in (["--grid", f"model.lr={rates}"], ["--search", "model.lr=log:0.01:1", f"--trials={runs}"]):
        if tried[0] == "--search":
            pytest.importorskip("optuna")
        assert main(["sweep", "--config", file, "--out=out", *tried]) == 2
        said = capsys.readouterr().err
        assert f"{callback}: {runs} runs would make epsilon" in said and "more than the budget of 8" in said
        assert not list(Path("out").rglob("metrics.csv"))
    one = ["sweep", "--config", file, "--out=one", "--grid", "model.lr=0.1", "--dry-run"]
    assert main(one) == 0

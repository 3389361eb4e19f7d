"""A metric that no run has is noticed at the first run that ends, not after the last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlightning.cli import main
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.children import Outcome
from fedlightning.experiments.execute import FirstResult, Task, check_metric
from tests.experiments.tiny import small


def finished_run(folder: Path, *rows: tuple[str, str]) -> Path:
    """A run's folder whose summary has a row for each split and metric."""
    folder.mkdir(parents=True)
    place = {"model": "personal", "stage": "L1", "checkpoint": "latest", "data": "local", "per_client": {"0": 1.0}}
    results = [{**place, "split": split, "metric": f"{split}_{metric}"} for split, metric in rows]
    (folder / "summary.json").write_text(json.dumps({"seed": 0, "num_samples": {"0": 1}, "results": results}))
    return folder


def test_a_metric_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    folder = finished_run(tmp_path / "run", ("val", "auroc"), ("test", "loss"), ("test", "accuracy"))
    for metric in ("accuracy", "test_accuracy", "loss"):
        check_metric(folder, metric)
    with pytest.raises(
        InputError, match=r"'acuracy', and .*run has no such .*It has loss, accuracy\. Did you mean acc"
    ):
        check_metric(folder, "acuracy")
    with pytest.raises(InputError, match="no such score on test data"):
        check_metric(folder, "auroc")  # validated only


def test_a_run_without_a_test_refuses_nothing(tmp_path):
    check_metric(finished_run(tmp_path / "run", ("val", "loss")), "anything")


def test_only_the_first_run_that_ends_well_is_looked_at():
    seen: list[Path] = []
    watcher = FirstResult(seen.append)
    for name, error in (("a", "boom"), ("b", None), ("c", None)):
        task = Task(name, 0, Path(name), [])
        watcher.started(task, resumed=False)
        watcher.ended(task, Outcome(error, 1.0))
    assert seen == [Path("b")]


@pytest.mark.slow
def test_compare_stops_before_its_first_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["compare", small(Path("a.yaml")), "--seeds=2", "--out=out", "--baselines=none"]

    def states() -> list[str]:
        return [run["state"] for run in json.loads(Path("out/study.json").read_text())["runs"]]

    assert main([*words, "--metric=acuracy"]) == 2
    said = capsys.readouterr().err
    assert "fedlightning compare: --metric is 'acuracy', and the runs will have no such score" in said
    assert "Did you mean accuracy" in said
    assert "No run was made" in said
    assert not Path("out/runs").exists()

    assert main([*words, "--metric=loss", "--no-report"]) == 0
    assert states() == ["done", "done"]
    before = Path("out/runs/a/seed_0/summary.json").stat().st_mtime_ns
    assert main([*words, "--metric=loos"]) == 2  # finished runs are there, and stay
    assert "Did you mean loss" in capsys.readouterr().err
    assert Path("out/runs/a/seed_0/summary.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_sweep_stops_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grid = "--grid=model.init_args.lr=0.1,0.2"
    assert main(["sweep", "--config", small(Path("a.yaml")), grid, "--out=out", "--metric=los"]) == 2
    assert "has no validation score 'los'. It has val_accuracy" in capsys.readouterr().err
    assert [run["state"] for run in json.loads(Path("out/study.json").read_text())["runs"]] == ["done", "pending"]

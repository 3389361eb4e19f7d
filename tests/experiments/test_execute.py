"""Real runs in real child processes: what is done is kept, what fails loses nothing else, what was stopped goes on."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from fedlightning.cli import main
from fedlightning.commands.report import write_report
from fedlightning.experiments import children
from fedlightning.experiments.children import Outcome
from fedlightning.experiments.execute import Estimate, Task, View, duration, execute, rounds_begun
from fedlightning.experiments.experiment import StudyFile, gpus_to_share, only_one
from fedlightning.scores.rows import read_rows
from tests.experiments.tiny import HERE, small

COMMON = ["--baselines", "none", "--no-report"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def states(out: Path) -> dict[tuple[str, int], str]:
    study = json.loads((out / "study.json").read_text())
    return {(run["run"], run["seed"]): run["state"] for run in study["runs"]}


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# -- compare, once for several tests -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Two methods, one of which crashes, two seeds, two at a time."""
    root = tmp_path_factory.mktemp("study")
    small(root / "good.yaml", "GlobalCheckpoint")
    small(root / "bad.yaml", model=f"{HERE}.Crash")
    words = [str(root / "bad.yaml"), str(root / "good.yaml"), "--seeds=3,5", "--jobs=2", f"--out={root / 'out'}"]
    return root / "out", main(["compare", *words, *COMMON])


def test_a_failure_does_not_stop_the_others(study):
    out, code = study
    assert code == 1
    assert states(out) == {("bad", 3): "failed", ("bad", 5): "failed", ("good", 3): "done", ("good", 5): "done"}
    entries = json.loads((out / "study.json").read_text())["runs"]
    assert all("boom" in entry["error"] for entry in entries if entry["run"] == "bad")
    assert all(entry["error"] is None and entry["seconds"] > 0 for entry in entries if entry["run"] == "good")
    assert "Traceback" in (out / "runs/bad/seed_3/log.txt").read_text()
    assert "Results on test data" in (out / "runs/good/seed_3/log.txt").read_text()


@pytest.mark.slow
def test_what_a_dry_run_refuses_is_said_before_the_first_run(tmp_path, capsys):
    small(tmp_path / "good.yaml", "GlobalCheckpoint")
    small(tmp_path / "wrong.yaml", model=f"{HERE}.Wrong")
    assert main(["compare", "good.yaml", "wrong.yaml", "--seeds=2", "--out=out", *COMMON]) == 2
    said = capsys.readouterr().err
    assert "wrong (wrong.yaml): Wrong.training_step fails" in said and "no such column" in said
    assert not (tmp_path / "out").exists()


def test_seeds_and_what_varies_reach_the_runs(study):
    out, _ = study
    summaries = {}
    for seed in (3, 5):
        folder = out / f"runs/good/seed_{seed}"
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["trainer"]["seed"] == config["data"]["init_args"]["val_seed"] == seed
        assert config["data"]["init_args"]["seed"] == 0
        summaries[seed] = json.loads((folder / "summary.json").read_text())
        matrix = {row["data"] for row in summaries[seed]["results"] if row["split"] == "test"}
        assert {"local", "pooled", "client:0", "client:2"} <= matrix
    splits = [summaries[seed]["data"]["splits"] for seed in (3, 5)]
    assert splits[0]["test"] == splits[1]["test"]
    assert splits[0]["val"] != splits[1]["val"]
    assert json.loads((out / "study.json").read_text())["vary"] == ["trainer.seed", "data.init_args.val_seed"]


def test_finished_and_failed_runs_are_left_alone(study, capsys):
    out, _ = study
    before = stamps(out / "runs")
    words = [str(out.parent / "bad.yaml"), str(out.parent / "good.yaml"), "--seeds=3,5", f"--out={out}", *COMMON]
    assert main(["compare", *words]) == 1
    assert stamps(out / "runs") == before
    assert "4 of them there already" in capsys.readouterr().out


@pytest.mark.slow
def test_another_configuration_is_refused(study, capsys):
    out, _ = study
    before = stamps(out)
    words = ["compare", str(out.parent / "good.yaml"), "--seeds=3,5", f"--out={out}", *COMMON]
    assert main([*words, "--trainer.max_rounds=4"]) == 2
    assert "trainer.max_rounds is 4, was 1" in capsys.readouterr().err
    assert main([*words, "--vary=data.init_args.seed"]) == 2
    assert "the seed sets trainer.seed and data.init_args.seed, it set trainer.seed and" in capsys.readouterr().err
    assert stamps(out) == before


def test_the_overview_and_a_report_that_fails(study, monkeypatch, capsys):
    out, _ = study
    before = stamps(out / "runs")

    def broken(*_: object, **__: object) -> Path:
        raise ValueError("no ink")

    monkeypatch.setattr("fedlightning.report.build.build_report", broken)
    screen = Console(width=100)
    write_report(out, [out], "accuracy", "deployed", screen)
    shown = capsys.readouterr().out
    results = [json.loads((out / f"runs/good/seed_{seed}/summary.json").read_text())["results"] for seed in (3, 5)]
    rows = [
        row
        for result in results
        for row in result
        if (row["checkpoint"], row["data"], row["split"], row["metric"])
        == ("best_local", "local", "test", "test_accuracy")
    ]
    line = next(line for line in shown.splitlines() if line.strip().startswith("good"))
    assert f" {sum(row['mean'] for row in rows) / 2:.4f} " in line
    assert next(line for line in shown.splitlines() if line.strip().startswith("bad")).split()[1:] == ["-"] * 6 + [
        "0",
        "of",
        "2",
    ]
    assert "The report could not be written" in shown
    assert f"fedlightning report {out}" in shown
    assert stamps(out / "runs") == before
    assert max(map(len, shown.split("The report")[0].splitlines())) <= 100


def test_the_same_run_by_hand_has_the_same_numbers(study, tmp_path):
    out, _ = study
    words = ["fit", "--config", str(out / "runs/good/seed_5/config.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    assert main(words) == 0
    assert (tmp_path / "good/seed_5/metrics.csv").read_text() == (out / "runs/good/seed_5/metrics.csv").read_text()


@pytest.mark.slow
def test_spawned_runs_have_the_same_numbers(study, tmp_path, monkeypatch):
    monkeypatch.setattr(
        children.multiprocessing, "get_all_start_methods", lambda: ["spawn"]
    )  # as where nothing can fork
    small(tmp_path / "good.yaml", "GlobalCheckpoint")
    assert main(["compare", "good.yaml", "--seeds=3,5", "--out=spawned", *COMMON]) == 0
    assert (
        Path("spawned/runs/good/seed_3/metrics.csv").read_text()
        == (study[0] / "runs/good/seed_3/metrics.csv").read_text()
    )


@pytest.mark.slow
def test_nothing_is_written_by_bad_input_or_a_dry_run(tmp_path, capsys):
    file = small(tmp_path / "a.yaml")
    Path("typo.yaml").write_text("trainer: {max_round: 3}")
    assert main(["compare", file, "typo.yaml", "--config", file, "--out=out", *COMMON]) == 2
    sentence = f"typo ({file} + typo.yaml): trainer has no option 'max_round'. Did you mean max_rounds"
    assert sentence in capsys.readouterr().err
    assert main(["compare", file, "--out=out", "--seeds=2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert sum(line.startswith("fedlightning fit --config") for line in shown.splitlines()) == 2 * 4
    assert "The seed sets trainer.seed and data.init_args.val_seed." in shown
    assert not Path("out").exists()


# -- killed and interrupted --------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_killed_run_is_reported_and_goes_on_bit_for_bit(tmp_path, capsys):
    counter = tmp_path / "visits"
    file = small(tmp_path / "a.yaml", f"{HERE}.Kill", max_rounds=2)
    words = ["compare", file, "--seeds=1", "--out=out", "--trainer.callbacks.visit=5", *COMMON]
    words.append(f"--trainer.callbacks.counter={counter}")
    assert main(words) == 1
    assert states(Path("out")) == {("a", 0): "failed"}
    assert "killed by SIGKILL" in capsys.readouterr().out
    folder = Path("out/runs/a/seed_0")
    assert {row.round for row in read_rows(folder / "metrics.csv")} == {1}
    assert main([*words, "--redo=failed"]) == 0
    assert "goes on after round 1 of 2" in capsys.readouterr().out
    assert states(Path("out")) == {("a", 0): "done"}
    assert counter.stat().st_size == 5 + 3  # the second round again, not the first
    config = str(folder / "config.yaml")
    assert main(["fit", "--config", config, "--trainer.default_root_dir=whole"]) == 0
    assert Path("whole/a/seed_0/metrics.csv").read_text() == (folder / "metrics.csv").read_text()


def test_interrupted(tmp_path, monkeypatch, capsys):
    def interrupt(self: View, running: Mapping[Task, float]) -> None:
        for task in running:
            if rounds_begun(task.folder) >= 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(View, "tick", interrupt)
    file = small(tmp_path / "a.yaml", max_rounds=500)
    assert main(["compare", file, "--seeds=1", "--out=out", *COMMON]) == 130
    assert "The same command goes on from here" in capsys.readouterr().out
    assert states(Path("out")) == {("a", 0): "pending"}
    size = Path("out/runs/a/seed_0/metrics.csv").stat().st_size
    time.sleep(0.3)
    assert Path("out/runs/a/seed_0/metrics.csv").stat().st_size == size  # nobody writes any more
    study = StudyFile(Path("out"))
    assert Task("a", 0, study.run_folder("a", 0), []).resumable


def test_one_at_a_time_in_a_folder(tmp_path):
    with only_one(tmp_path), pytest.raises(ValueError, match="Another process works in"):
        with only_one(tmp_path):
            pass


# -- threads, GPUs, the time left --------------------------------------------------------------------------------------
class Recorder:
    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def started(self, task: Task, resumed: bool) -> None:
        self.log.append(("started", task.name))

    def ended(self, task: Task, outcome: Outcome) -> None:
        self.log.append(("ended", task.name))
        assert outcome.error is not None
        assert outcome.error.startswith("There is no command 'nothing'. Commands: fit,")

    def tick(self, running: Mapping[Task, float]) -> None:
        assert len(running) <= 2


@pytest.mark.slow
def test_never_more_than_asked_for_and_every_sentence_is_heard(tmp_path):
    tasks = [Task(name, 0, tmp_path / name / "seed_0", ["nothing"]) for name in "abc"]
    recorder = Recorder()
    execute(tasks, 2, [], [recorder], main)
    assert sorted(recorder.log) == sorted((what, name) for what in ("started", "ended") for name in "abc")
    assert recorder.log[:2] == [("started", "a"), ("started", "b")]


def test_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_to_share(0) == []
    assert gpus_to_share(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpus_to_share(2) == ["3", "5"]


def test_the_time_left():
    a0, a1, b0 = (Task(name, seed, Path(), [], rounds=10) for name, seed in (("a", 0), ("a", 1), ("b", 0)))
    estimate = Estimate([a0, a1, b0], 1, {})
    assert estimate.seconds({}) is None
    assert estimate.seconds({a0: (4.0, 0)}) is None
    assert estimate.seconds({a0: (4.0, 2)}) == pytest.approx(16 + 20 + 20)  # 2 s a round
    estimate.ended(a0, 30.0)
    assert estimate.seconds({a1: (10.0, 1)}) == pytest.approx(20 + 30)  # finished runs tell more than rounds
    assert Estimate([a1, b0], 2, {"a": [30.0]}).seconds({}) == pytest.approx(30)
    estimate.ended(a1, None)  # a failed run tells nothing
    assert estimate.seconds({b0: (25.0, 5)}) == pytest.approx(25)
    assert [duration(s) for s in (2.34, 12, 75, 7260)] == ["2.3 s", "12 s", "1 min 15 s", "2 h 01 min"]


def test_the_bar_says_what_is_going_on(tmp_path):
    task = Task("mine", 3, tmp_path, [], rounds=7)
    (tmp_path / "metrics.csv").write_text("round,stage\n1,G\n2,G\n2,L")
    screen = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    with View([task, Task("next", 0, tmp_path, [])], 1, {"mine": [60.0]}, screen) as view:
        view.started(task, False)
        view.tick({task: 20.0})
        assert view.bar is not None
        shown = view.bar.tasks[0].description
        assert "mine 3 (2/7)" in shown
        assert "1 min 40 s left" in shown
        view.ended(task, Outcome("It broke", 21.0))
        view.tick({})
        assert "1 failed" in view.bar.tasks[0].description
    assert "[1/2] mine, seed 3: FAILED: It broke. See" in screen.export_text()

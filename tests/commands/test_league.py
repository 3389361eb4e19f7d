"""`fedlightning league` as its users meet it: one method alone, choices without test data, slices that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlightning.cli import main
from fedlightning.commands.league import Until
from tests.experiments.tiny_league import PERMUTED, league


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(out: str) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads(Path(out, "results/tiny.json").read_text())["rows"]}


def stamps(out: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path(out).rglob("summary.json")}


def test_the_list_says_what_there_is(capsys):
    assert main(["league"]) == 0
    shown = capsys.readouterr().out
    assert "shakespeare" in shown and "SCAFFOLD" in shown and "16 trials of each method on each task" in shown
    assert "then 10 seeds" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["digit"], "There is no task 'digit' in the league. It has digits, "),
        (["digits", "--methods=FedAvgg"], "There is no method 'FedAvgg' in the league."),
        (["digits", "--model.lr=1"], "'--model.lr=1' cannot be given here"),
        (["digits", "--jobs=0"], "--jobs is 0"),
    ],
)
def test_bad_words_are_said_in_a_sentence(words, sentence, capsys):
    assert main(["league", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedlightning league: ") and sentence in said
    assert not list(Path().iterdir())


def test_missing_data_are_said_and_nothing_runs(capsys):
    assert main(["league", "heart"]) == 0
    said = capsys.readouterr().out
    assert "heart is not run: Fed-Heart-Disease is missing" in said and not Path("runs").exists()


@pytest.mark.slow
def test_test_labels_change_no_choice(tmp_path):
    """Permuted test labels give other scores, and the same trials, losses and chosen values."""
    found = {}
    for name, options in (("plain", {}), ("permuted", {"data": PERMUTED})):
        path = league(tmp_path / name, **options)
        assert main(["league", "tiny", f"--league={path}", f"--out=out_{name}"]) == 0
        found[name] = rows(f"out_{name}")
        folders = sorted(Path(f"out_{name}/tiny/runs").glob("*-trial_*/seed_100*/summary.json"))
        assert len(folders) == 2 * (
            4 + 2 + 1
        )  # a third of the budget, the better half all of it, the best another seed
        for folder in folders:
            assert not any(row["split"] == "test" for row in json.loads(folder.read_text())["results"])
    for method, row in found["plain"].items():
        other = found["permuted"][method]
        assert [(one["values"], one["val_loss"]) for one in row["trials"]] == [
            (one["values"], one["val_loss"]) for one in other["trials"]
        ]
        assert row["best"] == other["best"] == min(row["finalists"], key=lambda one: one["val_loss"])["values"]
        assert row["seeds"]["0"]["score"] != other["seeds"]["0"]["score"]


@pytest.mark.slow
def test_a_slice_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    path = league(tmp_path / "league")
    words = ["league", "tiny", "--methods=FedProx", f"--league={path}", "--out=out"]
    with monkeypatch.context() as patch:

        def stop(self: Until, *args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(Until, "ended", stop)
        assert main(words) == 130
    before = stamps("out")
    assert len(before) == 1 and not Path("out/results").exists()
    assert main([*words, "--minutes=0"]) == 130 and stamps("out") == before
    assert main(words) == 0
    after = stamps("out")
    assert len(after) == 4 + 2 + 1 + 2 and after.items() >= before.items()
    assert len(rows("out")["FedProx"]["trials"]) == 4 and set(rows("out")["FedProx"]["seeds"]) == {"0", "1"}
    assert main(words) == 0 and stamps("out") == after
    assert "FedProx" in capsys.readouterr().out


@pytest.mark.slow
def test_a_method_with_twice_the_gradients_has_half_the_rounds(tmp_path):
    """Ditto trains two models: it is counted by the run. Its equal rounds are tested beside."""
    groups = {"any": {"FedAvg": {}, "Ditto": {}}}
    path = league(tmp_path / "league", groups=groups, seeds=[0])
    task = yaml.safe_load((tmp_path / "league/tiny.yaml").read_text())
    task["trainer"]["max_rounds"] = 4
    (tmp_path / "league/tiny.yaml").write_text(yaml.safe_dump(task))
    assert main(["league", "tiny", f"--league={path}", "--out=out"]) == 0
    found = rows("out")
    rounds = {name: int(row["best"]["trainer.max_rounds"]) for name, row in found.items()}
    assert rounds["Ditto"] == rounds["FedAvg"] / 2
    assert (
        "equal_rounds" not in found["FedAvg"]
        and found["Ditto"]["equal_rounds"]["0"]["curve"][-1][0] == rounds["FedAvg"]
    )
    gradients = {name: row["seeds"]["0"]["steps"] for name, row in found.items()}
    assert gradients["Ditto"] == gradients["FedAvg"]

"""The study of unseen clients: numbers of their own, and in nobody else's."""

from __future__ import annotations

import json

import pytest

from fedlightning.report.build import make_page
from fedlightning.report.html import render
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import Row
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import Run
from fedlightning.study.study import Study

TRAINED, UNSEEN = {"a": 0.8, "b": 0.6}, {"c": 0.5, "d": 0.1}


def rows(model, stage, scores, checkpoint="latest", split="test", number=5):
    return [
        Row(number, stage, model, checkpoint, "local", split, c, f"{split}_accuracy", v, 10) for c, v in scores.items()
    ]


def run(path, name, seed, shift=0.0, refused=None):
    moved = [{c: v + shift for c, v in scores.items()} for scores in (TRAINED, UNSEEN)]
    found = rows("personal", "L1", moved[0]) + rows("global", "G", moved[0])
    if refused is None:
        found += rows("unseen", "L1", moved[1]) + rows("unseen", "G", {"c": 0.4, "d": 0.2})
    held_out = {"clients": {c: {"train": 5} for c in UNSEEN}} | ({"refused": refused} if refused else {})
    curve = rows("personal", "L1", moved[0], split="val")
    curve += rows("unseen", "L1", {"c": 0.0, "d": 0.0}, split="val")
    summary = {
        "seed": seed,
        "num_samples": dict.fromkeys(TRAINED, 10),
        "results": summarise(found),
        "held_out": held_out,
    }
    return Run(name, seed, path, summary, curve)


@pytest.fixture
def study(tmp_path):
    runs = [run(tmp_path, "fedavg", seed, 0.1 * seed) for seed in (0, 1)]
    return Study([*runs, *(run(tmp_path, "local", seed, refused="Local trains alone.") for seed in (0, 1))])


def test_their_means_are_their_own(study):
    line, silo = study.unseen()
    assert line["mean"] == pytest.approx(0.35) and line["global"] == pytest.approx(0.3)
    assert line["worst"] == pytest.approx(0.15) and line["trained"] == pytest.approx(0.75)
    assert line["gap"] == pytest.approx(-0.4) and line["n_seeds"] == 2 and line["clients"] == ["c, d", "c, d"]
    assert line["per_client"] == pytest.approx({"c": 0.55, "d": 0.15})
    assert silo["mean"] is None and silo["refused"] == "Local trains alone." and silo["trained"] == pytest.approx(0.7)


def test_nothing_else_holds_them(study):
    overview = study.overview()
    assert [line["mean"] for line in overview] == pytest.approx([0.75, 0.7])
    assert [line["worst"] for line in overview] == pytest.approx([0.65, 0.6])
    assert {line["client"] for line in study.clients()} == {"a", "b"}
    assert [line["mean"] for line in study.curves() if line["method"] == "fedavg"] == pytest.approx([0.75])
    assert {line["stage"]: line["local"] for line in study.stages() if line["method"] == "fedavg"} == pytest.approx(
        {"G": 0.75, "L1": 0.75}
    )


@pytest.mark.slow
def test_files_and_page(study, tmp_path):
    found = write_comparison(study, tmp_path)
    assert [line["method"] for line in found["unseen"]] == ["fedavg", "local"]
    assert json.loads((tmp_path / "comparison.json").read_text())["unseen"][0]["mean"] == pytest.approx(0.35)
    page = render(make_page({"": study}, tmp_path / "figures"))
    assert "Clients that come later" in page and "Local trains alone." in page and "Held out: c, d." in page
    several = write_comparison({"one": study, "two": study}, tmp_path / "several")
    assert [line["dataset"] for line in several["unseen"]] == ["one", "one", "two", "two"]


def test_without_held_out_clients_there_is_nothing(tmp_path):
    plain = run(tmp_path, "fedavg", 0)
    plain.summary.pop("held_out")
    study = Study([plain])
    assert study.unseen() == [] and "unseen" not in write_comparison(study, tmp_path)
    assert "Clients that come later" not in render(make_page({"": study}))


def test_a_client_has_the_mean_of_the_seeds_that_held_it_out(tmp_path):
    one, two = (run(tmp_path, "fedavg", seed) for seed in (0, 1))
    for row in two.summary["results"]:
        if row["model"] == "unseen":
            row["per_client"] = {"c": 0.9, "e": 0.3}
    (line,) = Study([one, two]).unseen()
    assert line["per_client"] == pytest.approx({"c": 0.7, "d": 0.1, "e": 0.3})

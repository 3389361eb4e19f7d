"""The study of clients whose models differ: each architecture's own mean, and its gain over training alone."""

from __future__ import annotations

import json

import pytest

from fedlightning.report.build import make_page
from fedlightning.report.html import render
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import Row
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import Run
from fedlightning.study.problems import find_problems
from fedlightning.study.study import Study

CLIENTS = {"small": ["a", "c"], "large": ["b"], "servers": []}


def run(path, method, seed, scores, architectures=True):
    rows = [Row(5, "L1", "personal", "latest", "local", "test", c, "test_accuracy", v, 10) for c, v in scores.items()]
    about = {name: {"class": "Net", "parameters": 10 * len(name), "clients": held} for name, held in CLIENTS.items()}
    summary = {"seed": seed, "num_samples": dict.fromkeys(scores, 10), "results": summarise(rows)}
    return Run(method, seed, path, summary | ({"architectures": about} if architectures else {}))


@pytest.fixture
def study(tmp_path):
    scores = {"fd": {"a": 0.6, "b": 0.9, "c": 0.8}, "local": {"a": 0.5, "b": 0.95, "c": 0.5}}
    moved = {seed: {m: {c: v + 0.02 * seed for c, v in own.items()} for m, own in scores.items()} for seed in (0, 1)}
    return Study([run(tmp_path, method, seed, moved[seed][method]) for method in scores for seed in (0, 1)])


def test_each_architecture_has_its_own_mean_and_gain(study):
    lines = {(line["method"], line["architecture"]): line for line in study.architectures()}
    assert list(lines) == [("fd", "small"), ("fd", "large"), ("local", "small"), ("local", "large")]  # not the server's
    small, large = lines["fd", "small"], lines["fd", "large"]
    assert (small["mean"], small["worst"], small["gain"]) == pytest.approx((0.71, 0.61, 0.2))
    assert (large["mean"], large["worst"], large["gain"]) == pytest.approx((0.91, 0.91, -0.05))
    assert small["clients"] == ["a", "c"] and small["parameters"] == 50 and small["n_seeds"] == 2
    assert lines["local", "small"]["gain"] is None and lines["local", "small"]["mean"] == pytest.approx(0.51)


@pytest.mark.slow
def test_the_report_and_the_file_have_them(study, tmp_path):
    page = render(make_page({"": study}, figures=None))
    assert "Small and large models" in page and "fd, large" in page
    written = write_comparison(study, tmp_path)
    assert (
        len(written["architectures"])
        == 4
        == len(json.loads((tmp_path / "comparison.json").read_text())["architectures"])
    )


def test_nobody_is_asked_for_a_fedavg_that_cannot_be(study, tmp_path):
    assert not any("FedAvg" in problem.text for problem in find_problems(study.data))
    plain = Study([run(tmp_path, m, 0, {"a": 0.6, "b": 0.5}, architectures=False) for m in ("fd", "fedmd")])
    assert any("FedAvg" in problem.text for problem in find_problems(plain.data))
    assert plain.architectures() == [] and "architectures" not in write_comparison(plain, tmp_path)

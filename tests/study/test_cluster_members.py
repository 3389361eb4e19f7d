"""Who belongs to which cluster, against values worked out by hand; damaged files are told in a sentence."""

from __future__ import annotations

import json

import pytest

from fedlightning.report.build import PARTS
from fedlightning.report.context import Context
from fedlightning.report.html import Page, render
from fedlightning.report.sections.clusters import clusters
from fedlightning.report.styles import styles
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import Run, load_study
from fedlightning.study.study import Study
from tests.report.made_up import add_clusters, make_study
from tests.report.reader import Reader

HALVES = ["cluster 1", "cluster 1", "cluster 2", "cluster 2"]


@pytest.fixture
def folder(tmp_path):
    """Two seeds of a method: one finds the planted halves after round 2, one other pairs at once."""
    out = make_study(tmp_path / "study", methods=("fedavg", "ifca"), seeds=(0, 1), matrix=False)
    add_clusters(out / "runs/run_1/seed_0", HALVES, groups=[0, 0, 1, 1])
    add_clusters(out / "runs/run_1/seed_1", ["cluster 1", "cluster 2"] * 2, change=1, groups=[0, 0, 1, 1])
    return out


def test_clusters_changes_and_agreement(folder):
    (line,) = Study(load_study([folder])).clusters()
    assert line["method"] == "ifca" and line["n_seeds"] == 2
    assert line["clusters"] == line["most"] == 2.0
    assert line["changes"] == pytest.approx((2 / 4 + 0) / 2) and line["changed"] == pytest.approx((50 + 0) / 2)
    assert line["last_change"] == pytest.approx((2 + 0) / 2) and line["share"] == 0.75
    # pairs: 2 together in both partitions of 2 + 2 of 6, expected 4/6 (1 of agreement 1); crossed pairs share none
    expected = (0 - 2 * 2 / 6) / (2 - 2 * 2 / 6)
    assert line["agreement"] == pytest.approx((1.0 + expected) / 2)


def test_each_client_at_the_first_seed(folder):
    rows = Study(load_study([folder])).memberships()
    assert [(row["client"], row["group"], row["first"], row["cluster"]) for row in rows] == [
        (str(i), "01"[i > 1], "cluster 1", HALVES[i]) for i in range(4)
    ]
    assert {row["seed"] for row in rows} == {0} and [row["changes"] for row in rows] == [0.0, 0.0, 0.5, 0.5]


def test_page_and_files(folder, tmp_path):
    study = Study(load_study([folder]))
    found = write_comparison(study, tmp_path / "out")
    assert found["clusters"][0]["clusters"] == 2.0 and len(found["memberships"]) == 4
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == found
    several = write_comparison({"one": study, "two": study}, tmp_path / "several")
    assert [line["dataset"] for line in several["clusters"]] == ["one", "two"]
    assert "clusters" not in several["datasets"]["one"]
    section = clusters(Context(study, styles(study.data.methods)))
    reader = Reader(render(Page("clusters", "", {}, sections=[section])))
    assert reader.errors == [] and "figure-clusters-ifca" in reader.ids and "ifca, seed 0" in reader.text
    assert "Strong lines part the planted groups." in reader.text and "first seed" in reader.text
    assert [row[0][0].strip() for row in reader.tables["table-clusters"]] == ["ifca"]
    assert clusters in PARTS, "a report shows it"


def test_without_groups_there_is_no_agreement(folder):
    for path in folder.glob("runs/run_1/*/summary.json"):
        summary = json.loads(path.read_text())
        summary["data"]["groups"] = dict.fromkeys(summary["data"]["groups"], 0)
        path.write_text(json.dumps(summary))
    (line,) = Study(load_study([folder])).clusters()
    assert line["agreement"] is None, "all clients are of one group: there is nothing to find"


def test_without_the_file_nothing_is_there(folder, tmp_path, monkeypatch):
    for path in folder.glob("runs/*/*/clusters.csv"):
        path.rename(tmp_path / "clusters.csv")
    monkeypatch.chdir(tmp_path)
    study = Study(load_study([folder]))
    assert study.clusters() == [] == study.memberships() and "clusters" not in write_comparison(study, tmp_path)
    assert clusters(Context(study, styles(study.data.methods))) is None
    here = [Run(run.name, run.seed, None, run.summary) for run in load_study([folder])]
    assert Study(here).clusters() == [], "a run without a folder does not read what lies in the current one"


def test_a_run_in_the_current_folder_is_read_in_full(folder, monkeypatch):
    """`fedlightning report .` finds what `fedlightning report FOLDER` does."""
    run = next(path.parent for path in sorted(folder.glob("runs/*/*/clusters.csv")))
    known = Study(load_study([run]))
    monkeypatch.chdir(run)
    here = Study(load_study(["."]))
    assert known.clusters() and here.clusters() == known.clusters()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-3], "its end is missing"),
        (lambda text: text.replace("share", "part"), "no column 'share'"),
        (lambda text: text.replace("0.75", "nan", 1), "share is 'nan'"),
        (lambda text: text.replace("0.75", "1.75", 1), "a share of 1.75"),
        (lambda text: text.replace("\n3,", "\n300000000,", 1), "round 300000000"),
        (lambda text: text.replace("\n3,", "\nx,", 1), "round is 'x'"),
        (lambda text: text.replace("\n3,0,", "\n3,nobody,", 1), "no client 'nobody'"),
        (lambda text: text.replace("\n3,", "\n2,"), "again"),
        (lambda text: text.replace("cluster 2", "cluster 2,more", 1), "cells"),
        (lambda text: "\xff\xfe" + text, "not text"),
        (lambda text: "", "its end is missing"),
    ],
)
def test_a_damaged_file_is_a_problem_and_nothing_else(folder, damage, said):
    path = folder / "runs/run_1/seed_0/clusters.csv"
    path.write_bytes(damage(path.read_bytes().decode()).encode("latin-1"))
    study = Study(load_study([folder]))
    (problem,) = [problem for problem in study.problems if problem.kind == "damaged_table"]
    assert said in problem.text and str(path) in problem.text and (problem.run, problem.seed) == ("ifca", 0)
    assert problem.severity == "problem"
    (line,) = study.clusters()
    assert line["n_seeds"] == 1 and line["changes"] == 0.0, "the other seed stands"
    assert {row["seed"] for row in study.memberships()} == {1}

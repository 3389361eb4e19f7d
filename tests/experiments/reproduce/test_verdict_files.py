"""Recorded verdicts: of which commit they are, at which looks, and what is said where a later one is worse."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fedlightning.config.input_errors import InputError
from fedlightning.experiments.reproduce.published_tables import read_table
from fedlightning.experiments.reproduce.results import Line, Verdict, judge
from fedlightning.experiments.reproduce.verdict_files import (
    check_look,
    commit,
    find_new_disagreements,
    moved_goals,
    read_record,
    write_record,
)
from tests.experiments.reproduce.writing import table, write


def git(root, *words):
    words = ["-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_has_a_plus_where_code_was_changed_but_not_where_verdicts_were_recorded(tmp_path):
    assert commit(tmp_path) is None
    (tmp_path / "tables" / "recorded").mkdir(parents=True)
    code, recorded = tmp_path / "code.py", tmp_path / "tables" / "recorded" / "a.json"
    code.write_text("1")
    recorded.write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    recorded.write_text("2")
    assert commit(tmp_path) == head
    (recorded.parent / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    assert commit(tmp_path) == f"{head}+"
    git(tmp_path, "reset", "-q", "--hard")
    assert commit(tmp_path) == head
    code.write_text("2")
    assert commit(tmp_path) == f"{head}+"


def planned(path: Path, **changes):
    (path / "small.yaml").write_text("seed_everything: 0\n")
    return read_table(write(path / "t.yaml", table(seeds=4, **changes)), path / "none")


def line_of(values, made):
    verdict = judge(values, 0.5, 0.3, confidence=made.confidence)
    return Line("FedAvg / accuracy", verdict, dict(enumerate(values)), published=0.5, tolerance=0.3)


def test_only_planned_looks_are_recorded_and_an_earlier_one_stays(tmp_path):
    made = planned(tmp_path, looks=[2, 4])
    check_look(made, [0, 1])
    check_look(made, [0, 1, 2, 3])
    for seeds in ([0, 1, 2], [2, 3]):
        with pytest.raises(InputError, match="t is judged with the seeds 0, 1 or 0, 1, 2, 3, not with"):
            check_look(made, seeds)
    write_record(made, [line_of([0.1, 0.9], made)])
    write_record(made, [line_of([0.5, 0.5, 0.52, 0.49], made)])
    line = read_record(made.path)["FedAvg / accuracy"]
    assert line["verdict"] == "agrees" and line["confidence"] == pytest.approx(0.975)
    assert [(look["seeds"], look["verdict"]) for look in line["looks"]] == [(2, "inconclusive")]
    write_record(made, [line_of([0.5, 0.5, 0.52, 0.48], made)])  # once more: no further look
    assert len(read_record(made.path)["FedAvg / accuracy"]["looks"]) == 1


def test_a_plan_that_is_changed_after_a_run_is_said(tmp_path):
    made = planned(tmp_path)
    write_record(made, [line_of([0.5, 0.5, 0.52, 0.49], made)])
    assert moved_goals(made) == []
    assert moved_goals(planned(tmp_path, looks=[2, 4])) == [
        "t: the plan was changed from looks at [4] seeds to looks at [2, 4] after a run."
    ]


def test_a_disagreement_that_no_record_has_is_new(tmp_path):
    made = planned(tmp_path)
    far = line_of([2.0, 2.1, 2.0, 2.2], made)
    assert find_new_disagreements(made, [far]) == ["t: FedAvg / accuracy disagrees, which no record has."]
    write_record(made, [far])
    assert find_new_disagreements(made, [far]) == []


def looks_at(made):
    line = read_record(made.path)["FedAvg / accuracy"]
    return [(look["seeds"], look["verdict"]) for look in line.get("looks", [])]


def test_a_look_stays_after_one_at_fewer_seeds_one_at_others_and_one_that_diverged(tmp_path):
    made = planned(tmp_path, looks=[2, 4])
    write_record(made, [line_of([2.0, 2.1, 2.0, 2.2], made)])
    write_record(made, [line_of([0.5, 0.51], made)])
    assert looks_at(made) == [(4, "disagrees")]
    others = replace(line_of([0.5, 0.51], made), values={7: 0.5, 8: 0.51})
    write_record(made, [others])
    assert looks_at(made) == [(4, "disagrees"), (2, "agrees")]
    write_record(made, [replace(others, verdict=Verdict("disagrees", why="no client could contribute"), values={})])
    assert looks_at(made) == [(4, "disagrees"), (2, "agrees"), (2, "agrees")]


def test_every_plan_and_a_line_that_is_taken_out_stay_in_the_record(tmp_path):
    made = planned(tmp_path)
    write_record(made, [replace(line_of([2.0, 2.1, 2.0, 2.2], made), name="FedAvg / left out")])
    changed = planned(tmp_path, looks=[2, 4])
    write_record(changed, [line_of([0.5, 0.5, 0.52, 0.49], changed)])
    write_record(changed, [line_of([0.5, 0.5, 0.52, 0.49], changed)])
    assert moved_goals(changed) == [
        "t: the plan was changed from looks at [4] seeds to looks at [2, 4] after a run.",
        "t: FedAvg / left out (disagrees) was taken out of the table after a run.",
    ]


def test_verdicts_of_another_number_of_seeds_than_the_plan_has_are_said(tmp_path):
    made = planned(tmp_path)
    write_record(made, [line_of([0.5, 0.5, 0.52], made)])
    assert moved_goals(made) == [
        "t: verdicts were recorded with 3 seeds, which is none of the planned looks (lines: 1)."
    ]

"""Runs with a virtual clock: tables against values worked out by hand, the section, the picture, damaged files."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from fedlightning.contract.messages import JobTrace
from fedlightning.report.build import PARTS
from fedlightning.report.context import Context
from fedlightning.report.html import Page, render
from fedlightning.report.sections.time import time
from fedlightning.report.styles import styles
from fedlightning.run.job_timeline import TIMELINE_FILE, read_trips, timeline_figure
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import load_study
from fedlightning.study.study import Study
from fedlightning.virtual_time.clock import COLUMNS, append_job_traces, draw_timeline
from tests.report.made_up import make_study
from tests.report.reader import Reader

TRIPS = [
    [JobTrace(1, "a", 0.0, 2.0, 3.0, 0), JobTrace(1, "b", 0.0, 4.0, 5.0, 0, 1)],
    [JobTrace(2, "a", 3.0, 5.0, 6.0, 0, 3, "stale"), JobTrace(2, "a", 6.0, 9.0, 10.0, 1, 2)],
]


def timed(run: Path, seconds: float = 5.0) -> None:
    """Give a made-up run a clock."""
    for trips in TRIPS:
        append_job_traces(run, trips)
    summary = json.loads((run / "summary.json").read_text())
    for entry in summary["per_round"]:
        entry["time"] = seconds * entry["round"]
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def folder(tmp_path):
    out = make_study(tmp_path / "study", methods=("fedavg", "ifca"), seeds=(0, 1), matrix=False)
    timed(out / "runs/run_1/seed_0")
    timed(out / "runs/run_1/seed_1", 10.0)
    return out


def test_what_happened_when(folder):
    (line,) = Study(load_study([folder])).timeline()
    rounds = len(json.loads((folder / "runs/run_1/seed_0/summary.json").read_text())["per_round"])
    assert line["method"] == "ifca" and line["n_seeds"] == 2
    assert line["time"] == pytest.approx(7.5 * rounds) and line["round_time"] == pytest.approx(7.5)
    assert line["arrivals"] == 4 and line["left_out"] == 25.0
    assert line["staleness"] == pytest.approx((0 + 1 + 2) / 3) and line["most_stale"] == 2
    each = [100 * ((3 + 3 + 4) + 5) / 2 / (seconds * rounds) for seconds in (5.0, 10.0)]
    assert rounds > 1 and line["busy"] == pytest.approx(sum(each) / 2)


def test_curves_and_costs_have_the_time_of_those_that_have_a_clock(folder):
    study = Study(load_study([folder]))
    for line in study.curves():
        assert line.get("time") == (7.5 * line["round"] if line["method"] == "ifca" else None)
    reached = [line for line in study.costs() if line["reached"]]
    assert reached
    for line in reached:
        assert ("time" in line) == (line["method"] == "ifca")
        assert line.get("time") in (None, 7.5 * line["rounds"])


def test_a_study_without_clocks_is_as_it_was(tmp_path):
    study = Study(load_study([make_study(tmp_path, methods=("fedavg",), matrix=False)]))
    assert study.timeline() == [] and not any("time" in line for line in study.curves() + study.costs())
    assert time(Context(study, styles(study.data.methods))) is None


def test_page_and_files(folder, tmp_path):
    study = Study(load_study([folder]))
    found = write_comparison(study, tmp_path / "out")
    assert found["timeline"][0]["arrivals"] == 4
    section = time(Context(study, styles(study.data.methods)))
    assert section is not None and time in PARTS
    reader = Reader(render(Page("time", "", {}, sections=[section])))
    assert {"table-time", "table-time-curve", "table-timeline"} <= set(reader.tables)
    assert "ifca" in reader.tables["table-time"][0][0][0]


def test_a_round_that_is_done_again_replaces_its_rows(tmp_path):
    append_job_traces(tmp_path, TRIPS[0])
    append_job_traces(tmp_path, TRIPS[1])
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write("3,a,1.0")  # cut off
    other = [replace(TRIPS[1][0], client="c")]
    append_job_traces(tmp_path, other)
    found = [tuple(row[name] for name in COLUMNS) for row in read_trips(tmp_path)]
    assert found == [*map(astuple, TRIPS[0]), *map(astuple, other)]
    append_job_traces(tmp_path, [])
    assert len(read_trips(tmp_path)) == 3


def test_the_picture_shows_clients_and_staleness(tmp_path):
    rows = [dict(zip(COLUMNS, astuple(trip), strict=True)) for trips in TRIPS for trip in trips]
    above, below = timeline_figure(rows, {1: 5.0, 2: 10.0}).axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["a", "b"]
    assert len(above.patches) == 2 * len(rows)
    points = [tuple(point) for scatter in below.collections[1:] for point in scatter.get_offsets().tolist()]
    assert sorted(points) == [(3.0, 0.0), (5.0, 1.0), (6.0, 3.0), (10.0, 2.0)]
    draw_timeline(tmp_path, {1: 5.0})
    assert not (tmp_path / "figures").exists()
    append_job_traces(tmp_path, TRIPS[0])
    draw_timeline(tmp_path, {1: 5.0})
    assert (tmp_path / "figures" / "timeline.png").stat().st_size > 1000


def test_a_damaged_file_is_no_timeline(folder):
    (folder / "runs/run_1/seed_0" / TIMELINE_FILE).write_text("round,client\n1,a\n")
    (line,) = Study(load_study([folder])).timeline()
    assert line["n_seeds"] == 1

"""Failures of a run by client and reason."""

from __future__ import annotations

import json

from fedlightning.study.failures import failure_rows, failures_line, first_sentence
from fedlightning.study.report.build import build_report
from tests.study.report.made_up import make_study

SEEN = [
    {
        "round": r,
        "client": "b",
        "where": "training",
        "reason": "client 'b' failed: KeyError: <i>. Ask",
        "decision": "left out",
    }
    for r in (1, 2, 4)
] + [{"round": 2, "client": "c", "where": "G", "reason": "client 'c' was not scored at stage G on local val data: no"}]


def test_failures_are_grouped():
    rows = failure_rows(SEEN)
    assert [(r["client"], r["where"], r["reason"], r["decision"], r["rounds"], r["count"]) for r in rows] == [
        ("b", "training", "KeyError: <i>", "left out", "1-2, 4", 3),
        ("c", "G", "no", "not scored", "2", 1),
    ]
    assert failures_line(SEEN, 5) == (
        "Failures: 2 of 5 clients, 4 in all; most often client 'b' (training, 3x, left out): KeyError: <i>. All are in "
        "summary.json."
    )
    assert failures_line([], 5) is None
    assert first_sentence("client 'a' has no training samples") == "has no training samples"


def test_the_report_has_a_table_of_them(tmp_path):
    study = make_study(tmp_path / "study", methods=("fedavg", "siloed"), seeds=(0,))
    assert "Clients that failed" not in build_report(tmp_path / "before", [study]).read_text()
    path = study / "runs" / "run_0" / "seed_0" / "summary.json"
    warning = {"round": 3, "client": "b", "what": "update", "entry": "net.weight", "value": "inf", "usual": 2.5}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failures": SEEN, "warnings": [warning]}))
    page = build_report(tmp_path / "after", [study]).read_text()
    assert "Failures by client and reason" in page
    assert "KeyError: &lt;i&gt;" in page and "1-2, 4" in page
    assert "net.weight" in page

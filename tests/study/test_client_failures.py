"""Failures of a run by client and reason."""

from __future__ import annotations

import json

from fedlightning.report.context import Context
from fedlightning.report.sections.failures import failures
from fedlightning.study.client_failures import failure_rows, failures_line, first_sentence
from fedlightning.study.finished_runs import load_study
from fedlightning.study.study import Study
from tests.report.made_up import make_study

SEEN = [
    {
        "round": r,
        "client": "b",
        "where": "training",
        "reason": "client 'b' failed: KeyError: <i>. Ask",
        "decision": "left out",
    }
    for r in (1, 2, 4)
] + [
    {
        "round": 2,
        "client": "c",
        "where": "G",
        "reason": "client 'c' was not scored at stage G on local val data: no",
        "decision": "not scored",
    }
]


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
    folder = make_study(tmp_path, methods=("fedavg", "siloed"), seeds=(0,))
    assert failures(Context(Study(load_study([folder])), {})) is None
    path = folder / "runs" / "run_0" / "seed_0" / "summary.json"
    warning = {"round": 3, "client": "b", "what": "update", "entry": "net.weight", "value": "inf", "usual": 2.5}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failures": SEEN, "warnings": [warning]}))
    section = failures(Context(Study(load_study([folder])), {}))
    by_client, grown = section.parts
    assert [(row["method"], row["client"], row["rounds"], row["count"]) for row in by_client.rows] == [
        ("fedavg", "b", "1-2, 4", 3),
        ("fedavg", "c", "2", 1),
    ]
    assert [(row["entry"], row["value"], row["usual"]) for row in grown.rows] == [("net.weight", "inf", "2.5")]

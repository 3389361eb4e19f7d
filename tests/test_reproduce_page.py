"""The page of reproduced tables is what the recorded verdicts say."""

from __future__ import annotations

import json

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.reproduce import find_tables
from fedlightning.experiments.reproduce.published_tables import read_table
from fedlightning.experiments.reproduce.results import Line, judge
from fedlightning.experiments.reproduce.verdict_files import write_record
from tests.experiments.reproduce.writing import table, write
from tests.experiments.tiny import small
from tools.reproduce_page import PAGE, SOURCES, STATES, _item, page, read_items, sources_page


def test_the_page_is_current():
    assert PAGE.read_text() == page(find_tables([])), "Write it again: python -m tools.reproduce_page"


def test_every_recorded_cell_is_still_in_its_table():
    for one in find_tables([]):
        path = one.path.parent / "recorded" / f"{one.name}.json"
        names = {line["name"] for line in json.loads(path.read_text())["lines"]} if path.exists() else set()
        assert names <= {cell.name for cell in one.cells} | {order.name for order in one.orders}, one.name


def test_a_page_of_one_table(tmp_path):
    small(tmp_path / "small.yaml")
    found = read_table(write(tmp_path / "t.yaml", table(why={"FedAvg": "Because."})), FOLDER)
    assert "It has not been run here yet." in page([found])
    line = {"name": "FedAvg / accuracy", "verdict": "disagrees", "note": "", "mean": 0.1, "low": 0.05, "high": 0.15,
            "published": 0.5, "tolerance": 0.1, "commit": "abc", "values": {"0": 0.05, "1": 0.15}}  # fmt: skip
    recorded = tmp_path / "recorded/t.json"
    recorded.parent.mkdir()
    recorded.write_text(json.dumps({"format": 1, "lines": [line]}))
    text = page([found])
    assert "| FedAvg / accuracy | 0.5 ± 0.3 | 0.10 [0.05, 0.15] | disagrees |" in text
    assert "*Why: FedAvg.* Because." in text
    assert "**t: the tolerance of FedAvg / accuracy was widened from 0.1 to 0.3 after a run.**" in text
    assert "Run at commit `abc` with seeds 0, 1." in text


def test_an_order_that_disagrees_has_the_reason_of_the_table(tmp_path):
    small(tmp_path / "small.yaml")
    orders = {"better": "fedavg", "worse": "other", "measure": "final"}
    content = table(runs={"fedavg": "small.yaml", "other": "small.yaml"}, orders=orders, why={"table": "Because."})
    found = read_table(write(tmp_path / "t.yaml", content), FOLDER)
    line = {"name": found.orders[0].name, "verdict": "order disagrees", "note": "", "mean": -0.1, "low": -0.2, "high": -0.05,
            "published": None, "tolerance": 0.0, "commit": "abc", "values": {"0": -0.1, "1": -0.1}}  # fmt: skip
    recorded = tmp_path / "recorded/t.json"
    recorded.parent.mkdir()
    recorded.write_text(json.dumps({"format": 1, "lines": [line]}))
    assert "*Why: table.* Because." in page([found])


def test_the_page_of_sources_is_of_the_tables_and_records_that_are_here():
    tables = find_tables([])
    rows = [row for source in read_items().values() for row in source]
    for row in rows:
        assert set(row) <= {"item", "what", "state", "tables", "configs", "page", "why"} and row["state"] in STATES
        assert all((FOLDER / path).is_file() for path in row.get("configs", []))
        assert {*row.get("tables", [])} <= {table.name for table in tables}
        assert row.get("why") or row.get("tables") or row.get("configs") or row["state"] == "nothing", row["item"]
    assert SOURCES.read_text() == sources_page(tables), "Write it again: python -m tools.reproduce_page"


def test_a_row_whose_tables_have_no_record_is_not_said_to_be_run(tmp_path):
    small(tmp_path / "small.yaml")
    made = read_table(write(tmp_path / "t.yaml", table(minutes=90)), tmp_path / "none")
    item = {"item": "Table 1", "state": "exact", "tables": ["t"]}
    assert "| configured, not run | [t](reproduce.md#t) | about 2 hours of two cores |" in _item(item, {"t": made})
    line = Line("FedAvg / other", judge([0.5, 0.51], 0.5, 0.3), {0: 0.5, 1: 0.51}, published=0.5, tolerance=0.3)
    write_record(made, [line])
    assert "| run exactly | [t](reproduce.md#t) | 1 agrees, 1 never run |" in _item(item, {"t": made})

"""No table that is written is a program for the spreadsheet that opens it, and each is read as it was written."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

import fedlightning
from fedlightning.callbacks.shared.memberships import read_memberships
from fedlightning.compat import sheets
from fedlightning.run.folder import MetricsFile
from fedlightning.scores.rows import Row, read_part, read_rows, write_rows
from fedlightning.storage.files import add_round
from fedlightning.study.comparison_files import as_csv

FORMULAS = ["=HYPERLINK(1)", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "'=1", "''=1", "-", "=", "'"]
OTHERS = ["a", "-1", "+1.5", "-inf", "'", "it's", "a=b", "", "'a", "-1e5"]


def cells(text):
    return [cell for line in csv.reader(io.StringIO(text, newline="")) for cell in line]


@pytest.mark.parametrize("name", [*FORMULAS, *OTHERS])
def test_a_cell_is_no_formula_and_is_read_as_it_was_written(name):
    written = sheets.guarded(name)
    assert sheets.plain(written) == name and not sheets.is_formula(written)
    if name in OTHERS:
        assert written == name  # tables of before have the same bytes


def test_scores(tmp_path):
    rows = [Row(1, "G", "global", name, "local", "val", name, name, 0.5, 3) for name in FORMULAS]
    start, end = (file := MetricsFile(tmp_path / "metrics.csv")).append(rows)
    write_rows(tmp_path / "other.csv", rows)
    assert file.rows() == read_rows(tmp_path / "other.csv") == read_part(file.path, start, end) == rows
    assert not any(map(sheets.is_formula, cells(file.path.read_bytes().decode())))


def test_tables_of_rounds(tmp_path):
    for number in (1, 2, 1):  # resumed: what stays is written again
        columns = ("round", "client", "cluster", "share")
        add_round(tmp_path / "t.csv", columns, number, [(number, name, "-x", 0.5) for name in FORMULAS])
    assert [row["client"] for row in read_memberships(tmp_path / "t.csv")] == FORMULAS
    assert not any(map(sheets.is_formula, cells((tmp_path / "t.csv").read_bytes().decode())))


def test_tables_by_column():
    names = [name for name in FORMULAS if "\r" not in name]  # methods and metrics, in lines that end with \n alone
    text = as_csv([{"=name": name, "b": -0.5} for name in names])
    assert not any(map(sheets.is_formula, cells(text)))
    assert [row["=name"] for row in sheets.read_table(io.StringIO(text, newline=""))] == names


def test_no_table_is_written_past_this():
    root = Path(fedlightning.__file__).parent
    places = [path for path in root.rglob("*.py") if re.search(r"csv\.(writer|DictWriter)\(", path.read_text())]
    assert [path.relative_to(root).as_posix() for path in places] == ["compat/sheets.py"]

"""Runs without a folder: which cells disagree, and which were not run."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.reproduce import show_table
from fedlightning.experiments.reproduce.published_tables import read_table
from fedlightning.experiments.reproduce.results import Place, measure_table
from tests.experiments.reproduce.writing import row, table, write, write_run
from tests.experiments.tiny import small

REFUSED = "run a, seed 0, failed: Round 2: no client could contribute; the update of client '0' was refused"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(None, REFUSED, failed=True), ["disagrees", "order disagrees", "not run"]),
        (Place(None, "it was killed by SIGKILL.", failed=True), ["not run", "not run", "not run"]),
        (Place(None, "it was not asked for"), ["not run", "not run", "not run"]),
    ],
)
def test_a_run_that_diverged_disagrees_and_one_that_is_missing_was_not_run(tmp_path, place, words):
    small(tmp_path / "small.yaml")
    orders = [{"better": a, "worse": b, "measure": "final"} for a, b in (("fedavg", "other"), ("other", "fedavg"))]
    content = table(runs={"fedavg": "small.yaml", "other": "small.yaml"}, orders=orders)
    found = read_table(write(tmp_path / "t.yaml", content), FOLDER)
    lines = measure_table(found, {"fedavg": {0: place}, "other": {0: Place(None, "it has not ended")}}, [0])
    assert [line.verdict.word for line in lines] == words
    assert lines[0].verdict.why == place.why and lines[0].failed == place.failed


def test_lines_of_another_set_are_left_out_of_what_is_shown(tmp_path):
    """What is missing for another reason is shown; the record and reproduce.json have all."""
    small(tmp_path / "small.yaml")
    orders = {"better": "fedavg", "worse": "more", "measure": "final"}
    runs = {"fedavg": "small.yaml", "more": {"configs": "small.yaml", "sets": ["hours"]}}
    found = read_table(write(tmp_path / "t.yaml", table(runs=runs, orders=orders)), FOLDER)
    place = Place(None, "run fedavg, seed 0, failed: it was killed by SIGKILL.", failed=True)
    lines = measure_table(found, {"fedavg": {0: place}}, [0])
    assert [line.asked for line in lines] == [True, True]
    lines = measure_table(found, {"more": {0: place}}, [0])
    assert [(line.asked, line.failed) for line in lines] == [(False, False), (True, True)]
    (backwards,) = measure_table(replace(found, cells=[], orders=[replace(found.orders[0], better="more", worse="fedavg")]),
                                 {"fedavg": {0: place}}, [0])  # fmt: skip
    assert backwards.asked and backwards.failed and backwards.verdict.word == "not run"
    diverged = Place(None, REFUSED, failed=True)
    _, order = measure_table(found, {"fedavg": {0: diverged}}, [0])
    assert order.verdict.word == "not run" and order.failed
    lines = measure_table(found, {}, [0])
    assert [line.asked for line in lines] == [False, False]
    screen = Console(width=200, file=io.StringIO())
    show_table(found, lines, screen)
    shown = screen.file.getvalue()
    assert "2 more need runs of other sets than was asked for." in shown and "FedAvg /" not in shown


def test_a_diverged_run_that_was_published_as_worse_says_nothing(tmp_path):
    small(tmp_path / "small.yaml")
    orders = {"better": "fedavg", "worse": "other", "measure": {"kind": "summary", "key": "bytes_up"}}
    content = table(runs={"fedavg": "small.yaml", "other": "small.yaml"}, orders=orders, rows={})
    found = read_table(write(tmp_path / "t.yaml", content), FOLDER)
    write_run(tmp_path / "run", [], {"bytes_up": 1})
    places = {"fedavg": {0: Place(str(tmp_path / "run"))}, "other": {0: Place(None, REFUSED, failed=True)}}
    (line,) = measure_table(found, places, [0])
    assert line.verdict.word == "not run"


def test_an_order_carries_the_reason_of_the_table(tmp_path):
    small(tmp_path / "small.yaml")
    orders = {"better": "fedavg", "worse": "other", "measure": {"kind": "summary", "key": "bytes_up"}}
    runs = {"fedavg": "small.yaml", "other": "small.yaml"}
    content = table(runs=runs, orders=orders, rows={}, why={"table": "Because."}, exact=True)
    found = read_table(write(tmp_path / "t.yaml", content), FOLDER)
    for name, value in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, [], {"bytes_up": value})
    places = {"fedavg": {0: Place(str(tmp_path / "a"))}, "other": {0: Place(str(tmp_path / "b"))}}
    (line,) = measure_table(found, places, [0])
    assert (line.verdict.word, line.why) == ("order disagrees", "Because.")


@pytest.mark.parametrize(
    ("last", "words"),
    [(0.4, ["inconclusive", "order disagrees"]), (0.95, ["order agrees", "order disagrees"])],
)
def test_an_order_of_rounds_to_a_target_knows_what_was_not_reached(tmp_path, last, words):
    """A run that was too short to reach the target is not faster than one that reached it later."""
    small(tmp_path / "small.yaml")
    reach = {"kind": "rounds_to", "metric": "accuracy", "target": 0.9}
    orders = [{"better": a, "worse": b, "measure": reach} for a, b in (("short", "long"), ("long", "quick"))]
    content = table(runs=dict.fromkeys(("short", "long", "quick"), "small.yaml"), orders=orders, rows={}, exact=True)
    found = read_table(write(tmp_path / "t.yaml", content), FOLDER)
    for name, values in {"short": (0.3, last), "long": (0.3, 0.3, 0.3, 0.3, 0.95), "quick": (0.95,)}.items():
        write_run(tmp_path / name, [row(number, "x", value) for number, value in enumerate(values, 1)])
    places = {name: {0: Place(str(tmp_path / name))} for name in found.runs}
    assert [line.verdict.word for line in measure_table(found, places, [0])] == words

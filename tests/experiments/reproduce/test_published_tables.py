"""Tables: what can be read, and the sentence for what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.reproduce import TABLES
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.reproduce.published_tables import ALL, read_table
from fedlightning.experiments.yaml_blocks import read_yaml
from tests.experiments.reproduce.writing import table, write
from tests.experiments.tiny import small

FINAL = {"metric": "accuracy"}


@pytest.fixture
def read(tmp_path):
    small(tmp_path / "small.yaml")

    def made(**changes):
        return read_table(write(tmp_path / "t.yaml", table(**changes)), tmp_path / "none")

    return made


def test_rows_columns_and_cells(read):
    found = read(
        rows={
            "A": {"run": "fedavg", "published": {"accuracy": 0.5}},
            "B": {"run": "fedavg", "published": {"accuracy": {"published": 0.6, "tolerance": 0.01}}},
        },
        cells=[
            {"row": "A", "column": "rounds", "run": "fedavg", "measure": {**FINAL, "kind": "rounds_to", "target": 0.9},
             "published": 10, "tolerance": 2, "read": "memory"}
        ],
        why={"A": "a", "A / rounds": "b", "table": "c"},
    )  # fmt: skip
    cells = {cell.name: cell for cell in found.cells}
    assert [(cell.published, cell.tolerance) for cell in found.cells] == [(0.5, 0.3), (0.6, 0.01), (10.0, 2.0)]
    assert [cell.because for cell in found.cells] == ["", "", "the number is from memory"]
    assert [found.reason(cell) for cell in cells.values()] == ["a", "c", "b"]
    assert found.seeds == [0, 1]


def test_orders_are_pairs_and_reduced_runs_are_judged_by_them_alone(read):
    found = read(
        runs={"fedavg": "small.yaml", "other": {"configs": "small.yaml", "reduced": True, "sets": ["gpu"]}},
        orders=[{"better": "fedavg", "worse": ["other"], "measure": "final", "factor": 1.2}],
        cells=[{"row": "B", "column": "x", "run": "other", "measure": "final", "published": 1, "tolerance": 0}],
    )
    assert [order.name for order in found.orders] == ["fedavg better than other: final, times 1.2"]
    assert [cell.because for cell in found.cells] == ["", "reduced: its order alone counts"]
    assert found.runs["other"].sets == ["gpu"]


def test_looks_share_the_chance_to_err(read):
    assert (read(seeds=4).looks, read(seeds=4).confidence) == ([4], 0.95)
    assert read(seeds=4, looks=[2, 4]).confidence == pytest.approx(0.975)


SPENT = {"kind": "epsilon", "q": 0.1, "sigma": 1.0, "steps": 10, "delta": 1e-5}
WRONG = {
    "misspelt key": ({"tittle": "x"}, "the table has the key 'tittle', which means nothing here. Did you mean title?"),
    "unknown run": (
        {"rows": {"A": {"run": "fedavgg", "published": {"accuracy": 1}}}},
        "cell 'A / accuracy' names 'fedavgg' (run), which is not in this file. Did you mean fedavg?",
    ),
    "unknown column": ({"rows": {"A": {"run": "fedavg", "published": {"acc": 1}}}}, "names 'acc' (row 'A')"),
    "unknown measure": (
        {"columns": {"accuracy": {"measure": "finall", "tolerance": 1}}},
        "has the measure 'finall', which is none. Did you mean final?",
    ),
    "unknown kind": (
        {"measures": {"final": {"kind": "scores", **FINAL}}},
        "of kind 'scores', which is none. Did you mean score?",
    ),
    "measure's key": (
        {"measures": {"final": {**FINAL, "checkpont": "latest"}}},
        "the measure 'final' (score) of the table has the key 'checkpont', which means nothing here.",
    ),
    "measure lacks": (
        {"measures": {"final": {"kind": "rounds_to", **FINAL}}},
        "the measure 'final' (rounds_to) of the table has no 'target'.",
    ),
    "measure's value": (
        {"measures": {"final": {"kind": "at_round", **FINAL, "round": "x"}}},
        "has round: 'x'. Give a whole number.",
    ),
    "over": ({"measures": {"final": {**FINAL, "over": "avg"}}}, "has over: avg. Give mean, weighted"),
    "against": (
        {"measures": {"final": {"kind": "gaining_share", **FINAL, "against": "local"}}},
        "the measure 'final' (gaining_share) of the table names 'local' (against)",
    ),
    "checkpoint": (
        {"measures": {"final": {"metric": "accuracy", "checkpoint": "best"}}},
        "has checkpoint: 'best'. Give 'deployed', 'latest', 'best_global' or 'best_local'.",
    ),
    "stage": (
        {"measures": {"final": {"metric": "accuracy", "stage": "L3"}}},
        "has stage: 'L3'. Give 'G', 'L1' or 'L2'.",
    ),
    "rate above 1": (
        {"measures": {"final": {**SPENT, "q": 2.0}}},
        "(epsilon) of the table has q: 2.0. Give a number in",
    ),
    "difference of epsilons": (
        {"measures": {"final": {"kind": "difference", "against": "fedavg", "of": SPENT}}},
        "is of an epsilon, which is of no run, so that two runs have the same",
    ),
    "order of epsilons": (
        {"orders": {"better": "fedavg", "worse": "fedavg", "measure": SPENT}},
        "orders is of an epsilon, which is of no run. Give cells of it.",
    ),
    "bar": ({"measures": {"final": {**FINAL, "kind": "clients_below", "bar": float("nan")}}}, "has bar: nan."),
    "itself": (
        {"measures": {"final": {**FINAL, "kind": "opt_outs", "against": "fedavg"}}},
        "cell 'FedAvg / accuracy' compares the run 'fedavg' with itself (final). Name another one.",
    ),
    "looks": (
        {"seeds": 4, "looks": [2]},
        "has looks: [2]. Give rising numbers of seeds, the last of them 4, the number of",
    ),
    "looks twice": ({"seeds": 4, "looks": [4, 4]}, "has looks: [4, 4]."),
    "no tolerance": ({"columns": {"accuracy": {"measure": "final"}}}, "cell 'FedAvg / accuracy' has no 'tolerance'"),
    "negative tolerance": (
        {"columns": {"accuracy": {"measure": "final", "tolerance": -1}}},
        "has tolerance: -1. Give a number in [0, inf).",
    ),
    "not a number": (
        {"rows": {"A": {"run": "fedavg", "published": {"accuracy": "0.7a"}}}},
        "has published: '0.7a'. Give a number in (-inf, inf).",
    ),
    "nan": (
        {"rows": {"A": {"run": "fedavg", "published": {"accuracy": float("nan")}}}},
        "has published: nan. Give a number in (-inf, inf).",
    ),
    "twice": (
        {
            "cells": [
                {
                    "row": "FedAvg",
                    "column": "accuracy",
                    "run": "fedavg",
                    "measure": "final",
                    "published": 1,
                    "tolerance": 1,
                }
            ]
        },
        "has the cell 'FedAvg / accuracy' twice",
    ),
    "order's run": ({"orders": {"better": "fedavg", "worse": "x", "measure": "final"}}, "orders names 'x' (worse)"),
    "no cells": ({"rows": {}, "columns": {}}, "has no cell and no order"),
    "read": (
        {"source": {"paper": "a", "table": "b", "read": "heard"}},
        "source has read: 'heard'. Give 'source', 're-run' or 'memory'",
    ),
    "no file": (
        {"runs": {"fedavg": "smal.yaml"}},
        "run 'fedavg' names the configuration 'smal.yaml', which lies neither",
    ),
    "nothing to run": ({"runs": {"fedavg": {}}}, "run 'fedavg' has no configuration"),
    "idle run": ({"runs": {"fedavg": "small.yaml", "more": "small.yaml"}}, "run 'more' is in no cell and in no order"),
    "seeds": ({"seeds": 0}, "has seeds: 0. Give a number of seeds"),
    "why": ({"why": {"FedAvgg": "x"}}, "names 'FedAvgg' (why)"),
    "minutes of nothing": ({"minutes": {}}, "has minutes: {}. Give one number, or one for each set"),
    "minutes of no set": ({"minutes": {"cpus": 3}}, "names 'cpus' (minutes), which is not in this file"),
    "missing title": ({"title": None}, "has title: None. Give a text."),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_said_in_a_sentence(read, name):
    changes, sentence = WRONG[name]
    with pytest.raises(InputError) as error:
        read(**changes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value) and str(error.value).startswith("t.yaml: ")


@pytest.mark.parametrize(
    ("minutes", "sets", "expected"),
    [
        (2, ["cpu"], {"cpu": 2.0, "all": 2.0}),
        (2, [], {"all": 2.0}),
        ({"cpu": 2, "all": 600}, ["cpu"], {"cpu": 2.0, "all": 600.0}),
    ],
)
def test_minutes_of_each_set(read, minutes, sets, expected):
    assert read(minutes=minutes, sets=sets).minutes == expected


def test_minutes_of_a_table_that_has_runs_outside_of_its_set(read):
    runs = {"fedavg": "small.yaml", "more": {"configs": "small.yaml", "sets": ["hours"]}}
    orders = [{"better": "more", "worse": "fedavg", "measure": "final"}]
    assert read(minutes=2, runs=runs, orders=orders).minutes == {"cpu": 2.0}
    assert read(minutes={"hours": 60}, runs=runs, orders=orders).minutes == {"hours": 60.0}


def test_a_key_that_is_there_twice_and_a_file_that_is_none(tmp_path):
    text = yaml.safe_dump(table())
    path = tmp_path / "t.yaml"
    path.write_text(text + "minutes: 3\n")
    with pytest.raises(InputError, match="the key 'minutes' stands there twice"):
        read_table(path, FOLDER)
    path.write_text("- a\n")
    with pytest.raises(InputError, match="holds no named values"):
        read_table(path, FOLDER)


def test_a_block_that_takes_in_another_one(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("few: &few {a: 1, b: 2}\nmore: {<<: *few, b: 3}\n")
    assert read_yaml(path)["more"] == {"a": 1, "b": 3}
    path.write_text("few: &few {a: 1}\nmore: {<<: *few, b: 3, b: 4}\n")
    with pytest.raises(InputError, match="the key 'b' stands there twice"):
        read_yaml(path)


def test_the_table_of_the_how_to_can_be_read():
    found = read_table(Path(__file__).parents[3] / "docs/how-to/my_table.yaml", FOLDER)
    assert [len(found.cells), len(found.orders), len(found.data)] == [4, 2, 1]


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_table_that_comes_with_the_package_can_be_read(path: Path):
    found = read_table(path, FOLDER)
    assert (found.cells or found.orders) and found.cannot_detect and found.claim
    assert bool(found.detects) != bool(found.aims_at)  # faults that were planted, or that nobody planted yet
    assert ALL in found.minutes  # what all of its runs take
    assert path.read_text().startswith("# ")

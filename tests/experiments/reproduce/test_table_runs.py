"""Complete configurations of tables, and the names by which their runs are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.reproduce import TABLES
from fedlightning.commands.study_options import CLI
from fedlightning.experiments.methods import Method
from fedlightning.experiments.plan import _Reader
from fedlightning.experiments.reproduce import table_runs
from fedlightning.experiments.reproduce.published_tables import Data, read_table
from fedlightning.experiments.reproduce.results import TableRun
from fedlightning.experiments.reproduce.table_runs import folder_of, name_of, obstacle, plan_runs
from tests.experiments.reproduce.writing import table, write
from tests.experiments.tiny import small

NAMES = sorted((path.stem for path in TABLES.glob("*.yaml")), key=lambda name: (name != "closed_forms", name))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_table_that_comes_with_the_package_can_be_built(name, tmp_path, monkeypatch):
    """Modules, data modules and trainers of all runs are made; data are not read."""
    monkeypatch.setattr(_Reader, "_clients", lambda *_: [])
    monkeypatch.setattr(table_runs, "folder_of", lambda *_: tmp_path)
    found = read_table(TABLES / f"{name}.yaml", FOLDER)
    (methods,) = plan_runs([TableRun(found, list(found.runs), found.seeds)], "data", CLI)
    assert list(methods) == list(found.runs)


def test_a_name_is_of_all_that_decides_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(table_runs, "_environment", lambda: ["1.0"])
    method = Method("a", [], {"trainer": {"seed": 0, "max_rounds": 3}, "model": {"class_path": "x.Y"}, "data": {}})
    name = name_of(method)
    assert name.startswith("fedavg-")
    assert name_of(replace(method, name="b", configs=["c.yaml"])) == name
    longer = replace(method, config={**method.config, "trainer": {"seed": 0, "max_rounds": 4}})
    assert name_of(longer) != name
    assert name_of(replace(method, vary=["trainer.seed", "data.init_args.seed"])) != name
    monkeypatch.setattr(table_runs, "_environment", lambda: ["1.1"])
    assert name_of(method) != name


def test_the_code_of_an_own_class_is_a_part_of_the_name(tmp_path, monkeypatch):
    monkeypatch.setattr(table_runs, "_environment", list)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_algorithm_of_mine.py").write_text("class Own: ...\n")
    config = {"trainer": {"callbacks": []}, "model": {"class_path": "own_algorithm_of_mine.Own"}, "data": {}}
    name = name_of(Method("a", [], config))
    (tmp_path / "own_algorithm_of_mine.py").write_text("class Own: pass\n")
    assert name_of(Method("a", [], config)) != name


def test_two_tables_that_ask_for_one_run_name_it_alike(tmp_path):
    small(tmp_path / "small.yaml")
    tables = []
    for name, changes in (
        ("one", {}),
        ("two", {"runs": {"other": "small.yaml"}, "rows": {"A": {"run": "other", "published": {"accuracy": 1}}}}),
    ):
        found = read_table(write(tmp_path / f"{name}.yaml", table(**changes)), FOLDER)
        tables.append(TableRun(found, list(found.runs), [7]))
    one, two = plan_runs(tables, "data", CLI)
    assert one["fedavg"].name == two["other"].name
    tables[0].obstacle = "Data are missing."
    assert plan_runs(tables, "data", CLI) == [{}, two]


def test_a_test_curve_moves_the_keys_that_vary(tmp_path):
    small(tmp_path / "small.yaml")
    curve = {"fedavg": {"configs": "small.yaml", "test_curve": True}}
    found = read_table(write(tmp_path / "t.yaml", table(runs=curve, vary=["data.init_args.seed"])), FOLDER)
    ((method,),) = (made.values() for made in plan_runs([TableRun(found, ["fedavg"], [0])], "data", CLI))
    assert method.vary == ["trainer.seed", "data.init_args.data.init_args.seed"]
    assert method.config["data"]["class_path"].endswith("ValidatedOnTest")


def test_data_are_found_in_the_first_folder_that_has_them_all(tmp_path):
    data = Data("Numbers", ["numbers", "Numbers/raw"], ["a.csv", "b.csv"], "Make them.")
    assert folder_of(data, tmp_path) is None
    for name in ("numbers/a.csv", "Numbers/raw/a.csv", "Numbers/raw/b.csv"):
        write(tmp_path / name, 1)
    assert folder_of(data, tmp_path) == tmp_path / "Numbers/raw"
    (tmp_path / "Numbers/raw/a.csv").unlink()
    found = read_table(write(tmp_path / "t.yaml", _with_data(tmp_path)), FOLDER)
    assert "b.csv is not in" in obstacle(found, tmp_path) and obstacle(found, tmp_path).endswith("Make them")


def _with_data(folder: Path) -> dict:
    small(folder / "small.yaml")
    files = ["a.csv", "b.csv"]
    return table(data={"name": "Numbers", "root": ["numbers", "Numbers/raw"], "files": files, "get": "Make them."})

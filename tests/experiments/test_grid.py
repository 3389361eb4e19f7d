"""Grids: methods by variants in one file, as runs, in `study.json` and in the report."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
import yaml

from fedlightning.commands.compare import compare
from fedlightning.config.input_errors import InputError
from fedlightning.config.parsing import refuse_grids
from fedlightning.experiments.plan import make_plan, read_grid
from fedlightning.report.context import Context
from fedlightning.report.sections.grid import grid
from fedlightning.study.finished_runs import load_study
from fedlightning.study.study import Study
from tests.experiments.tiny import request, small
from tests.report.made_up import make_study

ROOT = Path(__file__).parents[2]
GRIDS = {"robust/attacks": (8, 5), "private/budgets": (4, 3), "language/mails_methods": (5, 0)}
FAST = ["--trainer.max_rounds=1", "--trainer.local_epochs=1"]


def written(folder, **given):
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def test_files_are_beside_the_grid_and_what_stands_in_it_is_a_file(tmp_path):
    path = written(
        tmp_path, config="a.yaml", methods={"x y": {}, "z": ["b.yaml", {"m": 1}]}, variants={"1": {}, "2": "c.yaml"}
    )
    found = read_grid(path, tmp_path)
    assert found.before == [str(tmp_path / "a.yaml")] and found.methods["x y"] == [] and found.variants["1"] == []
    assert yaml.safe_load(Path(found.methods["z"][1]).read_text()) == {"m": 1}
    assert list(found.cells) == ["x-y_1", "x-y_2", "z_1", "z_2"] and found.cells["x-y_2"] == ("x y", "2")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("methods: &a [*a]", "it holds itself by an alias"),
        ("methods: {a: &a {config: [*a]}}", "it holds itself by an alias"),
        (
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(
                f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
                for before, name in zip("abcde", "bcdef", strict=True)
            ),
            "holds more than 100,000 values",
        ),
    ],
    ids=["list", "mapping", "laughs"],
)
def test_aliases_are_bounded(text, reason, tmp_path):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(InputError, match=reason):
        read_grid(tmp_path / "grid.yaml", tmp_path)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"variants": {"a": {}}}, "the grid has no 'methods'"),
        ({"methods": {"a b": {}, "a-b": {}}}, "one name"),
        (
            {"methods": {"a": {}}, "variants": {"b": {}}, "seeds": 3},
            "the grid has the key 'seeds', which means nothing",
        ),
        ({"methods": {"a": 3}, "variants": {"b": {}}}, "3 is neither a file"),
        ({"methods": {"a b": {}, "a-b": {}}, "variants": {"c": {}}}, "one name"),
        ({"methods": {"a": {}, "A": {}}, "variants": {"c": {}}}, "one name"),
        ({"methods": {1: {}, "1": {}}, "variants": {"c": {}}}, "the key '1' stands there twice"),
        ({"methods": {"a": {}}, "variants": {"": {}}}, "no name of a method or variant may be empty"),
        ({"methods": {}, "variants": {"b": {}}}, "needs methods"),
    ],
)
def test_what_is_no_grid(given, reason, tmp_path):
    with pytest.raises(InputError, match=reason):
        read_grid(written(tmp_path, **given), tmp_path)


def test_cells_read_the_grids_own_file_the_method_the_variant_and_what_overrides(tmp_path):
    """Each file sets what those before it set too; errors and `study.json` name the grid, not a file written aside."""
    small(tmp_path / "a.yaml", max_rounds=2)
    for name, trainer in (("before", {"max_rounds": 9, "lr_decay": 0.5}), ("after", {"evaluation": 7})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    path = written(
        tmp_path,
        config="a.yaml",
        methods={"m": {"trainer": {"local_epochs": 3, "evaluation": 3}}, "n": {}},
        variants={"v": {"trainer": {"local_epochs": 4, "evaluation": {"every": 4}}}, "w": {}},
    )
    before, after = ([str(tmp_path / f"{name}.yaml")] for name in ("before", "after"))
    plan = make_plan(request([], grid=str(path), before=before, after=after, baselines=["Local"]))
    found = {method.name: method.config["trainer"] for method in plan.methods}
    assert [found[name]["local_epochs"] for name in ("m_v", "m_w", "n_v")] == [4, 3, 4]
    assert {(one["max_rounds"], one["lr_decay"], one["evaluation"]["every"]) for one in found.values()} == {(2, 0.5, 7)}
    assert [method.cell for method in plan.methods] == [("m", "v"), ("m", "w"), ("n", "v"), ("n", "w"), None]
    assert plan.methods[0].configs == [*before, str(tmp_path / "a.yaml"), str(path), *after]
    path.write_text(path.read_text().replace("local_epochs: 4", "local_epoch: 4"))
    with pytest.raises(InputError, match=r"m_v \(.*grid\.yaml"):
        make_plan(request([], grid=str(path), baselines=[]))


def test_methods_without_variants_are_run_as_they_are(tmp_path):
    small(tmp_path / "a.yaml", max_rounds=2)
    methods = {"m": {"trainer": {"local_epochs": 3}}, "n, too": {}}
    plan = make_plan(request([], grid=str(written(tmp_path, config="a.yaml", methods=methods)), baselines=["Local"]))
    assert [method.name for method in plan.methods] == ["m", "n-too", "local"]
    assert not any(method.cell for method in plan.methods) and plan.methods[0].config["trainer"]["local_epochs"] == 3


def test_a_grid_is_no_configuration_of_one_run():
    with pytest.raises(InputError, match="compare --grid"):
        refuse_grids(["--config", "nowhere.yaml", f"--config={ROOT / 'configs/robust/attacks.yaml'}"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"methods: {a: {}}\nvariants: {b: {}, b: c.yaml}", "'b' stands there twice"),
        (b"\xff\xfe", "not a YAML"),
        (b"", "no named"),
    ],
)
def test_what_cannot_be_read(text, reason, tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_bytes(text)
    with pytest.raises(InputError, match=reason):
        read_grid(path, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"), [([], "--grid FILE or .* required"), (["--grid", "a", "b"], "one of the two")]
)
def test_a_grid_is_in_the_place_of_methods(words, said):
    with pytest.raises(InputError, match=said):
        compare(words, lambda given: 0)


@pytest.mark.parametrize("name", GRIDS)
def test_the_projects_grids_name_files_that_are_there(name, tmp_path):
    found = read_grid(ROOT / f"configs/{name}.yaml", tmp_path)
    assert (len(found.methods), len(found.variants)) == GRIDS[name]
    every = [file for files in (found.before, *found.methods.values(), *found.variants.values()) for file in files]
    assert all(Path(file).exists() for file in every)


def table_of(page):
    text = html.unescape(page.read_text())
    table = text[text.index('id="table-grid"') :]
    return re.sub(r"<[^>]*>|\s+", " ", table[: table.index("</table>")])


def as_grid(out):
    """Make a study one of a grid: the method "m_8" is "m" under "8"."""
    study = json.loads((out / "study.json").read_text())
    for method in study["methods"]:
        method["cell"] = list(method["name"].split("_"))
    (out / "study.json").write_text(json.dumps(study))


def test_the_report_has_a_row_a_method_and_a_column_a_variant(tmp_path):
    out = make_study(tmp_path / "a", ("m_8", "m_2", "n_8"), seeds=(0, 1))
    assert grid(Context(Study(load_study([out]), "accuracy"), {})) is None
    as_grid(out)
    (table,) = grid(Context(Study(load_study([out]), "accuracy"), {})).parts
    assert [column.title for column in table.columns] == ["method", "8", "2"]
    (m, *of_m), (n, eight, two) = [[cell.text for cell in row] for row in table.cells]
    assert (m, n) == ("m", "n") and all(float(text) > 0 for text in (*of_m, eight)) and two == "not in the grid"
    assert all(0 < float(row[1].extra.strip("±\u2009")) < 0.1 for row in table.cells)


def test_a_cell_says_which_seeds_it_lacks_and_why(tmp_path):
    failed = {("m_2", 1): "RuntimeError: no", ("n_2", 0): "RuntimeError: no", ("n_2", 1): "RuntimeError: no"}
    out = make_study(tmp_path / "a", ("m_8", "m_2", "n_8", "n_2"), seeds=(0, 1), failed=failed)
    as_grid(out)
    (table,) = grid(Context(Study(load_study([out]), "accuracy"), {})).parts
    assert "Fewer seeds than the others: m under 2 (1 of 2)." in table.notes
    assert table.cells[1][2].text == "run failed (seed 0, 1)"


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_the_projects_grids_run(name, tmp_path):
    """All of it is planned and tried; of four cells every run is made."""
    pytest.importorskip("opacus")
    from fedlightning.cli import main

    path = ROOT / f"configs/{name}.yaml"
    assert main(["compare", "--grid", str(path), "--dry-run", "--out", str(tmp_path), *FAST]) == 0
    given = yaml.safe_load(path.read_text())
    few = {key: dict(list(given[key].items())[:2]) for key in ("methods", "variants")}
    aside = path.with_name(f"{tmp_path.name}.yaml")
    try:
        aside.write_text(yaml.safe_dump(given | few))
        words = ["--grid", str(aside), "--seeds", "1", "--out", str(tmp_path / "out"), "--metric", "accuracy"]
        assert main(["compare", *words, *FAST]) == 0
    finally:
        aside.unlink()
    found = table_of(tmp_path / "out/report.html")
    assert all(name in found for one in few.values() for name in one) and found.count("0.") >= 4


def test_names_are_as_they_are_written(tmp_path):
    """YAML reads `no` and `off` as False, `0.10` as 0.1: two methods would be one, and a column be called False."""
    path = tmp_path / "grid.yaml"
    path.write_text("methods: {no: {}, off: {}, 0.10: {}, 0.1: {}, 1: {}}\nvariants: {null: {model: {lr: 1e-3}}}")
    found = read_grid(path, tmp_path)
    assert list(found.methods) == ["no", "off", "0.10", "0.1", "1"] and list(found.variants) == ["null"]
    assert yaml.safe_load(Path(found.variants["null"][0]).read_text()) == {"model": {"lr": 0.001}}

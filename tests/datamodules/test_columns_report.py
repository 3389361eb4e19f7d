"""Columns of a table at each client, against scipy and by hand."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from scipy import stats

from fedlightning.cli import main
from fedlightning.datamodules import DigitsDataModule, IIDPartitioner, TextTableDataModule, tabular
from fedlightning.datamodules.partition_report import describe_columns, plot_images
from tests.datamodules.test_agreed_statistics import stays, write_table


@pytest.fixture
def data(tmp_path):
    found = stays(write_table(tmp_path / "t.csv"))
    found.setup()
    return found


def test_the_test_and_the_effect_are_scipys(data):
    found = {one.name: one for one in describe_columns(data, data.columns)}
    assert "patient" not in found and "hospital" not in found
    ages = [np.array([float(v) for v in data.sample_values(c, "train", "age") if v]) for c in "abcd"]
    own = stats.kruskal(*ages)
    assert found["age"].p == pytest.approx(own.pvalue)
    assert found["age"].effect == pytest.approx(own.statistic / (sum(map(len, ages)) - 1))
    assert found["sex"].test == "chi-square" and 0 <= found["sex"].effect <= 1
    line = found["age"].clients[0]
    assert line["missing"] == pytest.approx(1 - len(ages[0]) / data.num_samples("a")) and line["missing"] > 0
    assert line["median"] == pytest.approx(np.median(ages[0]))
    assert not {"min", "max"} & set(line)


def test_a_test_takes_one_row_of_each_patient(data):
    once = {one.name: one for one in describe_columns(data, ["sex"], group="patient")}["sex"]
    every = {one.name: one for one in describe_columns(data, ["sex"])}["sex"]
    assert once.clients == every.clients
    counts = [len(set(data.sample_values(c, "train", "patient"))) for c in "abcd"]
    sexes = [data.sample_values(c, "train", "sex") for c in "abcd"]
    assert sum(counts) < sum(map(len, sexes)) and once.test == ""  # the first stay of each is of one sex here


def test_few_values_have_no_outer_quantiles(tmp_path):
    data = stays(write_table(tmp_path / "t.csv", rows=24))
    data.setup()
    (age,) = describe_columns(data, ["age"])
    assert all(line["q05"] is None and line["q25"] is not None for line in age.clients)


def test_the_command_shows_columns_and_images(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "t.csv")
    (tmp_path / "c.yaml").write_text(
        "data: {class_path: fedlightning.datamodules.TabularFederatedDataModule, init_args: {path: t.csv, target: ill, "
        "client: hospital, group: patient, scale: federated}}"
    )
    assert main(["partition", "--config", "c.yaml", "--images=2"]) == 0
    shown = capsys.readouterr().out
    assert "Kruskal-Wallis" in shown and "the samples are not images" in shown and "nan" not in shown
    with open("partition/columns.csv") as file:
        lines = list(csv.DictReader(file))
    assert {line["column"] for line in lines} == {"age", "lactate", "sex", "dx", "unit", "ill"}
    assert {line["test"] for line in lines} - {""} == {"Kruskal-Wallis", "chi-square"}
    assert all(0 <= float(line["p"]) <= 1 and float(line["effect"]) >= 0 for line in lines if line["test"])


def test_a_regression_has_no_classes_and_a_file_is_read_once_a_column(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{40 + i % 37},{i % 7},c{i % 12},{100 + i * 0.5}" for i in range(240)]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,client,pressure", *rows]))
    (tmp_path / "c.yaml").write_text(
        "data: {class_path: fedlightning.datamodules.TabularFederatedDataModule, init_args: {path: t.csv, "
        "target: pressure, client: client, group: false}}"
    )
    reads = []
    read = tabular.read_table
    monkeypatch.setattr(tabular, "read_table", lambda *of: reads.append(of) or read(*of))
    assert main(["partition", "--config", "c.yaml"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "TV" not in shown and "'pressure' is a measurement" in shown
    assert "in_features=2 of its network: age, dose." in shown
    assert "standardised by its own rows (scale: local)" in shown
    assert len(reads) <= 1 + 3  # 12 clients ask for each of 3 columns


def test_images_stand_side_by_side():
    data = DigitsDataModule(IIDPartitioner(3), max_train=60)
    data.setup()
    figure = plot_images(data, most=4)
    assert len(figure.axes) == 12 and figure.axes[0].get_title(loc="left") == f"client {data.client_ids[0]}"


def test_images_of_all_clients_are_shown():
    data = DigitsDataModule(IIDPartitioner(45), max_train=450)
    data.setup()
    figure = plot_images(data, most=2)
    assert {axes.get_title(loc="left") for axes in figure.axes} - {""} == {
        f"client {client}" for client in data.client_ids
    }


def test_texts_are_no_categories_and_no_patients_text_is_shown(tmp_path):
    """A note of a patient is in no table and no file: each is a category of its own."""
    path = tmp_path / "notes.csv"
    path.write_text("\n".join(["ward,note,died", *[f"{'ab'[i % 2]},secret {i},{i % 3 % 2}" for i in range(60)]]))
    data = TextTableDataModule(path, target="died", text="note", client="ward")
    data.setup()
    found = {one.name: one for one in describe_columns(data, data.columns)}
    assert found["note"].test == "" and found["note"].p is None
    assert all(line["most"] is None and line["missing"] == 0 for line in found["note"].clients)
    assert found["died"].test == "chi-square"

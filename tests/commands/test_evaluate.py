"""`fedlightning evaluate`: a given model at all clients, without training; and tables that come with configurations."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlightning.cli import main
from fedlightning.models import MLP, Classifier, CoxRegressor, LogisticRegression
from fedlightning.study.calibration import wilson
from tests.commands.test_json import last_line

CONFIG = """
trainer: {name: ev, enable_progress_bar: false}
model:
  class_path: fedlightning.models.Classifier
  init_args:
    net: {class_path: fedlightning.models.MLP, init_args: {in_features: 2, hidden: [], num_classes: 2}}
    num_classes: 2
data:
  class_path: fedlightning.datamodules.TabularFederatedDataModule
  init_args: {path: ill.csv, target: ill, client: hospital, group: false}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    random, rows = np.random.default_rng(1), ["age,bmi,hospital,ill"]
    for hospital, patients in {"Rome": 300, "Oslo": 120, "Bern": 25}.items():
        for _ in range(patients):
            age, bmi = random.normal(60, 10), random.normal(27, 4)
            chance = 1 / (1 + np.exp(-(age - 60) / 8 - (bmi - 27) / 5))
            rows.append(f"{age:.0f},{bmi:.1f},{hospital},{int(random.random() < chance)}")
    (tmp_path / "ill.csv").write_text("\n".join(rows))
    (tmp_path / "c.yaml").write_text(CONFIG)
    torch.manual_seed(0)
    torch.save(Classifier(MLP(2, [], 2), num_classes=2).state_dict(), tmp_path / "given.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_is_scored_with_samples_intervals_and_a_floor(folder, capsys):
    table = (folder / "ill.csv").read_text() + "\n"
    (folder / "ill.csv").write_text(table.replace(",0\n", ",no\n").replace(",1\n", ",yes\n"))
    found = last_line(["evaluate", "given.pt", "--config", "c.yaml", "--json"], capsys)
    lines = {line["client"]: line for line in found["clients"]}
    assert lines["Bern"]["why"] == "fewer than 10 samples" and lines["Bern"]["samples"] is None
    assert lines["Bern"]["accuracy"] is None and lines["Bern"]["slope"] is None
    rome = lines["Rome"]
    assert rome["samples"] == 60 and rome["accuracy_ci95"] == pytest.approx(wilson(rome["accuracy"], 60))
    for name in ("slope", "in_the_large", "auroc", "brier"):
        assert rome[f"{name}_ci95"][0] <= rome[name] <= rome[f"{name}_ci95"][1]
    run = folder / "runs/ev/version_0"
    with (run / "evaluation.csv").open() as file:
        assert [line["client"] for line in csv.DictReader(file)] == list(lines)
    about = json.loads((run / "evaluation.json").read_text())
    assert (about["least"], about["event"]) == ("10", "yes")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["data"]["class_names"] == ["no", "yes"]
    assert summary["rounds"] == 0 and set(summary["results"][0]["per_client"]) == {"Oslo", "Rome"}
    given = torch.load(folder / "given.pt", weights_only=True)
    again = Classifier(MLP(2, [], 2), num_classes=2)
    again.load_state_dict(given)  # the file is as it was


@pytest.mark.parametrize(
    "word",
    [
        "--trainer.callbacks=FedPer",
        "--trainer.callbacks=IFCA",
        "--trainer.callbacks=FedET",
        "--trainer.held_out=[Bern,Oslo]",
    ],
)
def test_methods_and_who_is_held_out_play_no_role(word, folder, capsys):
    alone = last_line(["evaluate", "given.pt", "--config", "c.yaml", "--json"], capsys)
    found = last_line(["evaluate", "given.pt", "--config", "c.yaml", word, "--json"], capsys)
    assert found["clients"] == alone["clients"]
    with (folder / "runs/ev/version_1/metrics.csv").open() as file:
        assert "Bern" not in {line["client"] for line in csv.DictReader(file)}  # below the floor


def test_a_configuration_that_names_no_model_takes_the_one_of_the_command(folder, capsys):
    (folder / "c.yaml").write_text(CONFIG.replace("{name: ev,", "{name: ev, init_from: null,"))
    assert len(last_line(["evaluate", "given.pt", "--config", "c.yaml", "--json"], capsys)["clients"]) == 3


def test_what_is_no_model_is_told(folder, capsys):
    assert main(["evaluate", "--config", "c.yaml"]) == 2
    assert "there is no model: fedlightning evaluate MODEL" in capsys.readouterr().err
    assert main(["evaluate", "absent.pt", "--config", "c.yaml"]) == 2
    assert "absent.pt' is not a file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["tabular", "hospital_stays", "lung", "notes"])
def test_a_configuration_of_a_table_comes_with_one(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "copy", f"data/{name}"]) == 0
    assert "a made-up table" in capsys.readouterr().out
    assert main(["partition", "--config", f"configs/data/{name}.yaml"]) == 0
    assert os.listdir("partition") and Path("partition/columns.csv").exists()


def test_a_table_without_intervals_explains_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "copy", "data/lung", "models/lung_cox"]) == 0
    torch.save(CoxRegressor(LogisticRegression(7, 1)).state_dict(), "given.pt")
    words = ["--config", "configs/data/lung.yaml", "--config", "configs/models/lung_cox.yaml", "--least", "1"]
    assert main(["evaluate", "given.pt", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "C-index" in shown and "[95 %" not in shown and "Events are" not in shown


def test_the_table_of_one_site_is_compared_with_nobody(folder, capsys):
    rows = (folder / "ill.csv").read_text().splitlines()
    (folder / "ill.csv").write_text("\n".join([rows[0], *(row for row in rows if "Rome" in row)]))
    assert main(["partition", "--config", "c.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "1 client, " in shown and "between clients;" not in shown

"""What a run says of itself is enough to compare it: splits, the cross-client matrix, and the folder read back."""

from __future__ import annotations

import json
import os

import pytest
import torch

from fedlightning import FederatedTrainer

# isort: split
from fedlightning.callbacks import FedAvg, Local, LocalCheckpoint
from fedlightning.cli import main
from fedlightning.client.data_summary import describe
from fedlightning.datamodules import DigitsDataModule, DirichletPartitioner, IIDPartitioner
from fedlightning.options import Evaluation
from fedlightning.run.folder import METRICS_MARK, MetricsFile
from fedlightning.scores.metric_names import bare, higher_is_better
from fedlightning.server.summary import describe_data
from fedlightning.study.finished_runs import load_run, load_study
from fedlightning.study.run_tables import tables_of
from tests.helpers import Toy, toy_data
from tests.study.folders import write_study

DETAILS = ("classes", "splits")


def digits(**options):
    data = DigitsDataModule(options.pop("partitioner", DirichletPartitioner(3, 0.5)), **options)
    data.setup()
    return describe_data(describe(data, details=DETAILS))


def test_fingerprints_tell_splits_apart():
    first = digits()
    assert digits() == first
    assert first["partition"].startswith("DirichletPartitioner(num_clients=3, alpha=0.5")
    other = digits(seed=1)["splits"]
    assert all(other[split] != first["splits"][split] for split in ("train", "val", "test"))
    assert digits(partitioner=IIDPartitioner(3))["splits"]["test"] != first["splits"]["test"]


def test_val_seed_changes_the_validation_cut_alone():
    first, other = digits(), digits(val_seed=7)
    assert digits(val_seed=0) == first
    assert other["splits"]["test"] == first["splits"]["test"]
    assert other["splits"]["val"] != first["splits"]["val"] and other["splits"]["train"] != first["splits"]["train"]
    assert {c: n["val"] for c, n in other["clients"].items()} == {c: n["val"] for c, n in first["clients"].items()}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished local run with the cross-client matrix, beside one that failed."""
    out = tmp_path_factory.mktemp("study")
    trainer = FederatedTrainer(
        max_rounds=2,
        callbacks=[Local(), LocalCheckpoint(monitor="val_loss")],
        seed=3,
        enable_progress_bar=False,
        evaluation=Evaluation(test_data=["local", "pooled", "clients"]),
        default_root_dir=out / "runs",
        name="local",
        version="seed_3",
    )
    trainer.fit(Toy(), toy_data())
    trainer.test()
    entries = [
        {"run": "siloed", "seed": 3, "folder": "runs/local/seed_3", "state": "done", "error": None},
        {"run": "siloed", "seed": 4, "folder": "runs/local/seed_4", "state": "failed", "error": "It broke."},
    ]
    methods = [{"name": "siloed", "configs": [], "baseline": True}]
    (out / "study.json").write_text(json.dumps({"format": 1, "methods": methods, "runs": entries}))
    return out, trainer


def test_cross_client_matrix(study):
    """Row i, column j: client i's model on client j's test data, as scored by hand."""
    out, trainer = study
    run = load_run(out / "runs/local/seed_3")
    data = toy_data()
    for source in run.clients:
        model = trainer.module(source, "best_local").eval()
        for target in run.clients:
            x, y = data.tensors[target]["test"]
            with torch.no_grad():
                expected = (model(x).argmax(-1) == y).float().mean().item()
            where = "local" if source == target else f"client:{target}"
            found = run.scores("acc", data=where)
            assert found[source] == pytest.approx(expected), (source, target)
    assert run.scores("acc", data="client:0").keys() == {"1", "2"}


def test_a_study_read_back(study):
    out, trainer = study
    done, failed = load_study([out])
    assert (done.name, done.seed, done.error, done.baseline) == ("siloed", 3, None, True)
    assert done.summary == json.loads(json.dumps(trainer.summary))
    assert [row.address for row in done.rows] == [row.address for row in trainer.rows]
    assert (failed.seed, failed.error, failed.results) == (4, "It broke.", [])


def test_deployed_is_the_checkpoint_where_there_is_one(study):
    run = load_run(study[0] / "runs/local/seed_3")
    assert run.result("acc")["checkpoint"] == "best_local"
    assert run.result("test_acc", checkpoint="latest")["stage"] == "L1"
    assert run.result("acc", checkpoint="latest", stage="L2")["stage"] == "L2"
    assert run.result("acc", model="global") is None
    assert run.result("nothing") is None


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no summary\.json"):
        load_study([tmp_path])


def test_costs_of_rounds_survive_a_resume(tmp_path):
    common = {"callbacks": [FedAvg()], "enable_progress_bar": False, "default_root_dir": tmp_path, "name": "r"}
    FederatedTrainer(max_rounds=1, version="a", **common).fit(Toy(), toy_data())
    again = FederatedTrainer(max_rounds=3, **common)
    again.fit(Toy(), toy_data(), resume=tmp_path / "r" / "a")
    assert [entry["round"] for entry in again.summary["per_round"]] == [1, 2, 3]
    assert sum(entry["bytes_up"] for entry in again.summary["per_round"]) == again.summary["bytes_up"]


def test_directions():
    assert not any(higher_is_better(name) for name in ("val_loss", "ece", "test_ece", "mse", "token_perplexity"))
    assert all(higher_is_better(name) for name in ("accuracy", "test_f1_macro", "auroc", "closeness"))


def test_directions_of_names_with_slashes_and_capitals():
    lower = (
        "val/loss",
        "test/dice_loss",
        "loss/val",
        "test-loss",
        "valLoss",
        "test_MAE",
        "RMSE",
        "val_MeanSquaredError",
    )
    assert not any(higher_is_better(name) for name in lower)
    assert all(higher_is_better(name) for name in ("val/acc", "test_MultilabelAUROC", "BinaryF1Score", "val/closeness"))


def test_names_without_their_split():
    assert [bare(name) for name in ("test_loss", "test/loss", "val/acc", "loss/val")] == [
        "loss",
        "loss",
        "acc",
        "loss/val",
    ]


DAMAGE = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "cut at a row": lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1])),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b"0.", b"1.", 1)),
}


@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("how", DAMAGE)
def test_scores_that_are_not_what_the_run_wrote_are_a_problem(tmp_path, how, has_mark, capsys):
    (run,) = write_study(tmp_path / "runs", {"fedavg": ["FedAvg"]}, seeds=(0,))
    path = run.path
    if has_mark:
        summary = json.loads((path / "summary.json").read_text())
        mark = MetricsFile(path / "metrics.csv").mark()
        (path / "summary.json").write_text(json.dumps(summary | {METRICS_MARK: mark}))
    assert tables_of(load_run(path)).faults == {}
    DAMAGE[how](path / "metrics.csv")
    found = tables_of(load_run(path)).faults
    if not has_mark and how not in ("empty", "gone"):  # without a mark only what is gone is seen
        return
    assert "is not the file that the run has written" in found["metrics.csv"]
    if (how, has_mark) != ("changed", True):
        return
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "metrics.csv" in capsys.readouterr().err
    kinds = [entry["kind"] for entry in json.loads((tmp_path / "out/comparison.json").read_text())["problems"]]
    assert "damaged_table" in kinds

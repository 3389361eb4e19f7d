"""What programs read: the last line of `--json`, the schema of configurations, and the card of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fedlightning.catalogue import ALGORITHMS
from fedlightning.cli import main
from fedlightning.commands.configs import FOLDER
from fedlightning.commands.json_output import FIELDS, SCHEMA, print_json
from fedlightning.config.schema import config_schema
from tests.test_cli import SMALL

CHECKER = jsonschema.Draft202012Validator(config_schema())


def last_line(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """Run a command; what its last line says."""
    assert main(words) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.pop("command") == words[0] and found.pop("schema") == SCHEMA
    assert set(found) == set(FIELDS[words[0]])
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    words = [
        "fit",
        *SMALL,
        "--trainer.callbacks+=FedProx",
        f"--trainer.default_root_dir={root}",
        "--trainer.logger=false",
    ]
    assert main(words) == 0
    return root / "quickstart" / "version_0"


# -- --json ----------------------------------------------------------------------------------------------------------
def test_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    rows = last_line(["algorithms", "--json"], capsys)["algorithms"]
    assert [row["name"] for row in rows][: len(ALGORITHMS)] == [row.name for row in ALGORITHMS]
    assert "options" not in rows[0]
    (row,) = last_line(["algorithms", "fedprox", "--json"], capsys)["algorithms"]
    assert row["config"] == "configs/algorithms/fedprox.yaml" and row["options"][0]["name"] == "mu"
    assert {row["family"] for row in last_line(["algorithms", "baseline", "--json"], capsys)["algorithms"]} == {
        "baseline"
    }


def test_configs(capsys: pytest.CaptureFixture[str]) -> None:
    found = last_line(["configs", "--json"], capsys)["configs"]
    assert {"quickstart", "algorithms/fenda"} <= {one["name"] for one in found}
    assert all(Path(one["file"]).exists() and one["about"] for one in found)
    assert [one["name"] for one in found if one["about"][-1] in ",:;"] == []


def test_partition(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = last_line(["partition", *SMALL[:2], "--out", str(tmp_path), "--json"], capsys)
    assert len(found["clients"]) == 10 and found["clients"][0]["samples"] == 82 and found["public"] is None
    assert all(Path(file).exists() for file in found["files"])


def test_fit_and_test(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*SMALL, f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false"]
    found = last_line(["fit", *words, "--json"], capsys)
    assert found["rounds"] == 1 and found["failures"] == [] and found["bytes_up"] > 0
    assert {row["split"] for row in found["results"]} == {"val", "test"}
    assert "json" not in yaml.safe_load(Path(found["run"], "config.yaml").read_text())
    again = last_line(["test", "--run", found["run"], "--checkpoint", "latest", "--json"], capsys)
    assert again["run"] == found["run"]
    key = ("test_accuracy", "L1", "latest", "local")
    means = [
        [row["mean"] for row in one["results"] if (row["metric"], row["stage"], row["checkpoint"], row["data"]) == key]
        for one in (found, again)
    ]
    assert means[0] == means[1] and len(means[0]) == 1


@pytest.mark.slow
def test_report(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    found = last_line(["report", str(run), "--out", str(tmp_path), "--json"], capsys)
    assert found["metric"] == "accuracy" and Path(found["page"]).exists()
    assert found["overview"][0]["method"] == "quickstart" and found["problems"]


@pytest.mark.slow
def test_compare_and_sweep(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["compare", "--config", SMALL[1], f"a={SMALL[1]}", *SMALL[2:], "--seeds", "1", "--baselines", "none"]
    found = last_line([*words, "--out", str(tmp_path / "a"), "--json"], capfd)
    assert [row["method"] for row in found["overview"]] == ["a"] and found["failed"] == 0
    words = ["sweep", *SMALL, "--grid", "model.lr=0.1,0.01", "--out", str(tmp_path / "b"), "--json"]
    assert len(last_line(words, capfd)["trials"]) == 2


def test_a_line_has_the_fields_that_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("configs", configs=[float("nan"), Path("a"), (1,)])
    assert json.loads(capsys.readouterr().out)["configs"] == [None, "a", [1]]
    with pytest.raises(KeyError, match="configs --json has the fields"):
        print_json("configs", names=[])


# -- the schema ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_configuration_matches_the_schema(path: Path) -> None:
    CHECKER.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "config",
    [
        {"trainer": {"max_round": 3}},
        {"trainer": {"max_rounds": "three"}},
        {"trainer": {"engine": "sequence"}},
        {"trainer": {"callbacks": [{"class_path": "FedProx", "init_args": {"nu": 0.1}}]}},
        {"data": {"class_path": "DigitsDataModule", "init_args": {"batchsize": 3}}},
        {"trainer": {"callbacks": {"class_path": "fedlightning.callbacks.FENDA", "init_args": {"fusion": "mean"}}}},
    ],
    ids=str,
)
def test_what_is_misspelt_does_not(config: dict[str, Any]) -> None:
    assert list(CHECKER.iter_errors(config))


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"].keys() == {"trainer", "model", "data"}
    jsonschema.Draft202012Validator.check_schema(config_schema())


# -- the card --------------------------------------------------------------------------------------------------------
def test_card(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    out = tmp_path / "card"
    found = last_line(["card", str(run), "--out", str(out), "--license", "mit", "--json"], capsys)
    assert {Path(file).name for file in found["files"]} == {"README.md", "config.yaml", "global.ckpt"}
    text = (out / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    head = yaml.safe_load(front)
    assert head["license"] == "mit" and "FedProx" in head["tags"]
    assert head["model-index"][0]["results"][0]["metrics"][0]["type"] == "accuracy"
    for words in (
        "DirichletPartitioner",
        "Li et al",
        "| 0 |",
        "Wilson",
        "MB went up",
        "Energy was not",
        "No differential",
    ):
        assert words in body, words
    assert main(["card", str(run), "--out", str(out)]) == 2  # what is there is not overwritten


def test_a_card_names_a_method_that_no_catalogue_has_and_asks_for_its_words(run: Path, tmp_path: Path) -> None:
    """It said "trained by FedAvg" of a run with somebody's own method. Such a run may be made in Python, too."""
    folder = tmp_path / "version_0"
    shutil.copytree(run, folder)
    (folder / "config.yaml").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    summary["callbacks"] = {"LocalCheckpoint": {}, "MyMethod": {"strength": 0.5}}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert main(["card", str(folder)]) == 0
    text = (folder / "card/README.md").read_text()
    assert "trained by MyMethod on" in text and "FedAvg" not in text
    assert "**MyMethod**(strength=0.5): *to be added" in text and "- **MyMethod**: *to be added: what it sends" in text


def test_a_run_without_configuration_is_told_from_a_folder_that_is_no_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["test", "--run", str(tmp_path)]) == 2
    assert "has no config.yaml. A run lies in a folder" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "metrics.csv").touch()
    assert main(["test", "--run", str(tmp_path)]) == 2
    assert "that run was made in Python" in " ".join(capsys.readouterr().err.split())


def test_errors_of_a_regression_are_in_its_targets_units_in_whatever_tells_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--json` had deviations beside a terminal with days, and a card of no metric said that there are no scores."""
    rows = [f"{site},{number},{3 * number + len(site)}.5" for site in ("a", "bb") for number in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["site,x,days", *rows]))
    net = {"class_path": "fedlightning.models.MLP", "init_args": {"in_features": 1, "hidden": [2], "num_classes": 1}}
    table = {"path": str(tmp_path / "t.csv"), "target": "days", "client": "site", "batch_size": 8}
    trainer = {"max_rounds": 1, "callbacks": ["FedAvg"], "accelerator": "cpu", "logger": False, "name": "run"}
    config = {
        "model": {"class_path": "fedlightning.models.Regressor", "init_args": {"net": net, "lr": 0.01}},
        "data": {
            "class_path": "fedlightning.datamodules.TabularFederatedDataModule",
            "init_args": table | {"target_statistics": [30.0, 20.0]},
        },
        "trainer": trainer | {"default_root_dir": str(tmp_path)},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(tmp_path / "config.yaml"), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = tmp_path / "run/version_0"
    tested = last_line(["test", "--run", str(folder), "--json"], capsys)["results"]
    factors = {"test_mse": 400, "test_rmse": 20, "test_mae": 20}

    def errors(results: list[dict[str, Any]]) -> list[float]:
        return sorted(row["mean"] for row in results if row["metric"] in factors)

    logged = json.loads((folder / "summary.json").read_text())["results"]
    wanted = [row | {"mean": row["mean"] * factors[row["metric"]]} for row in logged if row["metric"] in factors]
    for results in (json.loads(lines[-1])["results"], tested):
        assert errors(results) == pytest.approx(errors(wanted)) and len(wanted) > 2
    (mean,) = (
        row["mean"] for row in tested if (row["metric"], row["stage"], row["data"]) == ("test_rmse", "L1", "local")
    )
    assert any(f"{mean:.4f}" in line for line in lines[:-1])
    assert main(["card", str(folder)]) == 0
    text = (folder / "card/README.md").read_text()
    assert f"deployed model: {mean:.3f}" in text and "RMSE is in the units of days" in text and "Wilson" not in text


def test_the_card_says_what_privacy_was_spent(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "version_0"
    shutil.copytree(run, folder)
    account = {
        "private": True,
        "epsilon": 3.49996,
        "epsilon_by_client": {"0": 3.49996},
        "delta": 1e-05,
        "unit": "record",
    }
    account |= {"against": "all but the client", "in_the_clear": ["sizes"], "also": []}
    (folder / "privacy.json").write_text(json.dumps(account))
    assert main(["card", str(folder)]) == 0
    text = (folder / "card/README.md").read_text()
    assert "epsilon 3.5, delta 1e-05. record: against all but the client. Not counted: sizes." in text
    assert "scores above are not covered" in text and "No differential privacy" not in text and "{" not in text
    (folder / "privacy.json").write_text(json.dumps(account | {"private": False, "epsilon": None}))
    assert main(["card", str(folder), "--force"]) == 0
    assert "No differential privacy: the noise came from a fixed seed" in (folder / "card/README.md").read_text()


def test_a_card_that_is_written_again_leaves_no_model_of_an_older_one(run: Path, tmp_path: Path) -> None:
    """Whoever uploads the folder would publish clients' models that nobody asked for."""
    folder, out = tmp_path / "version_0", tmp_path / "card"
    shutil.copytree(run, folder)
    (folder / "checkpoints/clients").mkdir(exist_ok=True)
    (folder / "checkpoints/clients/7.ckpt").write_bytes(b"7")
    assert main(["card", str(folder), "--out", str(out), "--clients"]) == 0
    (out / "notes.txt").write_text("mine")
    (folder / "checkpoints/global.ckpt").unlink()
    assert (out / "checkpoints/clients/7.ckpt").exists() and (out / "checkpoints/global.ckpt").exists()
    assert main(["card", str(folder), "--out", str(out), "--force"]) == 0
    kept = sorted(path.name for path in out.rglob("*") if path.is_file())
    assert kept == ["README.md", "config.yaml", "notes.txt"]


def test_a_card_is_not_written_over_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "version_1"
    shutil.copytree(run, other)
    assert main(["card", str(run), "--out", str(other), "--force"]) == 2
    assert "is a run's folder, and a card has files of the same names" in " ".join(capsys.readouterr().err.split())
    mine = tmp_path / "mine"
    (mine / "checkpoints").mkdir(parents=True)
    for name in ("README.md", "checkpoints/global.ckpt"):
        (mine / name).write_text("mine")
    assert main(["card", str(run), "--out", str(mine), "--force"]) == 2
    assert "README.md is not a card, and stays" in " ".join(capsys.readouterr().err.split())
    assert {path.read_text() for path in mine.rglob("*.*") if path.is_file()} == {"mine"}


def test_intervals_of_the_card_are_wilson_s() -> None:
    """Against statsmodels' proportion_confint(8, 10, method="wilson")."""
    from fedlightning.commands.card import _with_interval

    assert _with_interval(0.8, 10, "accuracy") == "0.800 [0.490, 0.943]"
    assert _with_interval(None, 10, "accuracy") == "-" and _with_interval(1.25, 10, "loss") == "1.250"

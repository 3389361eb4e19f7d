"""The command line as its users meet it."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from fedlightning.algorithm import Facts
from fedlightning.cli import main
from fedlightning.commands.folders import find_run
from fedlightning.commands.run import Commands, _as_table
from fedlightning.config.input_errors import REPLACED, InputError, explain, parse_sentence, suggestion
from fedlightning.scores.metric_names import choose_metric
from fedlightning.scores.table import client_table, important_metrics, print_results, results_table

QUICKSTART = str(Path(__file__).parents[1] / "configs/quickstart.yaml")
SMALL = [
    "--config",
    QUICKSTART,
    "--trainer.max_rounds=1",
    "--trainer.local_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--data.partitioner.num_clients=3",
    "--data.max_train=150",
    "--data.max_test=60",
]
MODULES = """
from fedlightning.models import Classifier


class Crash(Classifier):
    def training_step(self, batch, batch_idx):
        return {}["boom"]


class Refuses(Classifier):
    def __init__(self, size: int = 1):
        raise ValueError(f"size={size} is too small")


class Broken(Classifier):
    def __init__(self, size: int = 1):
        self.nothing.there
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLIGHTNING_DEBUG", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds, to be copied."""
    root = tmp_path_factory.mktemp("finished")
    words = [*SMALL, "--trainer.max_rounds=2", f"--trainer.default_root_dir={root}"]
    assert main(["fit", *words]) == 0
    return root / "quickstart/version_0"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs/quickstart/version_0"))


# -- fit ---------------------------------------------------------------------------------------------------------------
def test_fit_writes_the_files_of_a_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
        "config.yaml",
        "metrics.csv",
        "summary.json",
        "checkpoints/last/manifest.json",
        "checkpoints/global.ckpt",
    ):
        assert (finished / name).exists(), name
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert set(config) == {"trainer", "model", "data"}
    assert config["trainer"]["seed"] == 0
    assert config["trainer"]["max_rounds"] == 2
    assert config["model"]["init_args"]["net"]["init_args"]["norm"] == "none"


def test_fit_prints_tables_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL]) == 0
    shown = capsys.readouterr().out
    for text in (
        "Results on test data",
        "accuracy",
        "best_local",
        "best_global",
        "Run: runs/quickstart/version_0",
        "±",
    ):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_runs_config_runs_again_with_the_same_numbers(finished: Path) -> None:
    words = ["--config", str(finished / "config.yaml"), "--trainer.default_root_dir=again"]
    assert main(["fit", *words]) == 0
    old, new = (
        json.loads((path / "summary.json").read_text()) for path in (finished, Path("again/quickstart/version_0"))
    )
    assert old["results"] == new["results"]
    assert (finished / "metrics.csv").read_text() == Path("again/quickstart/version_0/metrics.csv").read_text()


def test_without_tests_after_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--test_after_fit=false", "--trainer.evaluation.stages=[G]"]) == 0
    assert "Results on validation data" in capsys.readouterr().out
    summary = json.loads(Path("runs/quickstart/version_0/summary.json").read_text())
    assert {row["split"] for row in summary["results"]} == {"val"}


@pytest.mark.parametrize("config_given", [True, False])
def test_resume_a_run(run: Path, config_given: bool) -> None:
    words = [*SMALL, "--resume=last"] if config_given else ["--resume", str(run)]
    assert main(["fit", *words, "--trainer.max_rounds=3"]) == 0
    assert not (run.parent / "version_1").exists()
    assert json.loads((run / "summary.json").read_text())["rounds"] == 3
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_rounds"] == 3


def test_same_seed_same_first_weights_as_in_python() -> None:
    from lightning import seed_everything

    from fedlightning.models import Classifier, DigitsCNN

    by_cli = Commands("fit", [*SMALL, "--trainer.seed=7"]).model
    seed_everything(7, verbose=False)
    by_hand = Classifier(DigitsCNN(), num_classes=10)
    for name, value in by_hand.state_dict().items():
        assert torch.equal(value, by_cli.state_dict()[name])
    other = Commands("fit", [*SMALL, "--trainer.seed=8"]).model
    assert not torch.equal(other.net.conv1.weight, by_cli.net.conv1.weight)


def test_classes_by_short_names() -> None:
    words = (
        "--trainer.callbacks+=FedProx --trainer.callbacks.mu=0.25 --model Classifier --model.net MLP "
        "--model.net.in_features 64 --model.net.hidden [8] --model.net.num_classes 10 --model.num_classes 10 "
        "--data DigitsDataModule --data.partitioner IIDPartitioner --data.partitioner.num_clients 4"
    )
    cli = Commands("fit", words.split())
    assert type(cli.trainer.callbacks.callbacks[0]).__name__ == "FedProx"
    assert cli.trainer.callbacks.callbacks[0].hyperparameters()["mu"] == 0.25
    assert type(cli.model.net).__module__ == "fedlightning.models.networks"
    assert cli.datamodule.partitioner.num_clients == 4


def test_later_files_replace_lists_and_plus_appends() -> None:
    Path("a.yaml").write_text(
        "trainer: {callbacks: [{class_path: fedlightning.callbacks.FedProx, init_args: {mu: 0.5}}]}"
    )
    Path("b.yaml").write_text("trainer: {callbacks: [{class_path: fedlightning.callbacks.FedProx}]}")
    cli = Commands("fit", [*SMALL, "-c", "a.yaml", "-c", "b.yaml", "--trainer.callbacks+=FedAdam"])
    keys = [callback.key for callback in cli.trainer.callbacks]
    assert keys == ["FedProx", "FedAdam"]


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (["--trainer.logger=false"], []),
        (["--trainer.logger=true"], ["CSVLogger"]),
        (
            ["--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger", "--trainer.logger.save_dir=board"],
            ["TensorBoardLogger"],
        ),
    ],
)
def test_loggers_by_name(words: list[str], kinds: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = Commands("fit", [*SMALL, *words, "--trainer.evaluation.stages=[G]"])
        cli.fit(test_after_fit=False)
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == kinds
    if kinds == ["TensorBoardLogger"]:
        assert list(Path("board").rglob("events.*"))


def test_print_config_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--print_config"]) == 0
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    assert main(["fit", "--config", "printed.yaml", "--print_config"]) == 0
    assert capsys.readouterr().out == printed
    for command in (
        "fit",
        "validate",
        "test",
        "evaluate",
        "predict",
        "onboard",
        "leakage",
        "partition",
        "serve",
        "site",
    ):
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: fedlightning {command}")
        assert "`" not in shown
        assert "known subclasses" not in shown
        assert "max_epochs" not in shown
        assert ":class:" not in shown
        section = re.search(r"\nthis command:\n(.*?)\n\n", shown, re.DOTALL)
        assert section is not None
        for option in re.split(
            r"\n  (?=--)", section[1].removeprefix("  ")
        ):  # a text before the type, in the same line or below
            words = " ".join(option.split())
            assert not re.match(r"(--\S+ \S+ )+\((required, )?type: ", words), words
    assert main([]) == 0
    assert "fedlightning fit --config" in capsys.readouterr().out


# -- finished and interrupted runs -------------------------------------------------------------------------------------
def test_test_and_validate_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.csv").read_text()
    summary = json.loads((run / "summary.json").read_text())["results"]
    assert main(["test", "--run", str(run), "--checkpoint", "best_local"]) == 0
    shown = capsys.readouterr().out
    assert "best_local" in shown
    assert "latest" not in shown
    assert (run / "metrics.csv").read_text() == before  # the same scores are not written twice
    assert sorted(map(str, json.loads((run / "summary.json").read_text())["results"])) == sorted(map(str, summary))
    assert main(["validate", "--run", "runs/quickstart"]) == 0  # the newest version
    assert "validation data" in capsys.readouterr().out


def test_test_an_interrupted_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedlightning.contract import FederatedCallback

    class Interrupt(FederatedCallback):
        facts = Facts(takes_part=False)

        def on_round_start(self, server: object) -> None:
            if server.round == 1:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

    cli = Commands("fit", [*SMALL, "--trainer.max_rounds=2"])
    cli.trainer.callbacks.callbacks.append(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        cli.fit()
    assert main(["test", "--run", "runs/quickstart/version_0", "--checkpoint=latest"]) == 0
    assert "after 1 of 2 rounds" in capsys.readouterr().out
    assert main(["fit", "--resume", "runs/quickstart/version_0"]) == 0
    results = [
        json.loads((path / "summary.json").read_text())["results"] for path in (finished, find_run("runs/quickstart"))
    ]
    assert results[0] == results[1]


def test_predict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["predict", "--run", str(run), "--client", "1", "--checkpoint", "best_local", "--out", "p/one.pt"]) == 0
    assert "Predictions of client 1's model (best_local, after " in capsys.readouterr().out
    assert torch.load("p/one.pt").shape[1] == 10
    assert main(["predict", "--run", str(run), "--out", "all.pt"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Predictions of the global model (latest, after " in said and "on all clients' test data, shape" in said
    assert torch.load("all.pt").shape == (60, 10)
    assert main(["predict", "--run", str(run), "--out", "all.csv"]) == 0
    with open("all.csv") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["sample", *(f"output_{number}" for number in range(10))]
    assert [int(line["sample"]) for line in lines] == [*range(60)]
    assert [float(line["output_3"]) for line in lines] == torch.load("all.pt")[:, 3].tolist()


def test_only_numbers_of_samples_make_a_table() -> None:
    assert _as_table(torch.tensor([0.5, 1.5]), []).splitlines() == ["sample,prediction", "0,0.5", "1,1.5"]
    assert _as_table(torch.tensor([[0.25, 0.75]]), ["no", "yes"]).splitlines() == ["sample,no,yes", "0,0.25,0.75"]
    for predictions in (torch.zeros(2, 3, 4), [{"mask": torch.zeros(2)}]):
        with pytest.raises(InputError, match=r"a line of numbers for each sample; .* Let --out end with .pt"):
            _as_table(predictions, [])


# -- partition and the rest --------------------------------------------------------------------------------------------
def test_partition_shows_the_windows_of_data_that_drift(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "--config", str(Path(QUICKSTART).parent / "data/drifting_digits.yaml"), "--out=who"]) == 0
    shown = capsys.readouterr().out
    assert "by window, in the order of time" in shown and "of their variance is between windows" in shown
    assert Path("who/windows.png").stat().st_size > 1000


def test_partition_says_that_a_shift_grows(capsys: pytest.CaptureFixture[str]) -> None:
    data = str(Path(QUICKSTART).parent / "data/growing_shift_digits.yaml")
    assert main(["partition", "--config", data, "--data.init_args.source.init_args.max_train=100", "--out=who"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "change by the round" in shown and "growing over 5 rounds); shown is their last state." in shown


def test_partition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", *SMALL, "--out=who"]) == 0
    shown = capsys.readouterr().out
    assert "3 clients" in shown
    assert "TV" in shown
    with Path("who/partition.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["split"] for row in rows} == {"train", "val", "test"}
    assert sum(int(row["samples"]) for row in rows) == 210
    assert Path("who/partition.png").stat().st_size > 1000
    assert not Path("runs").exists()


def test_partition_of_data_alone_and_of_many_classes(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    from fedlightning.commands.partition import partition_table
    from fedlightning.datamodules import PartitionReport

    data = str(Path(QUICKSTART).parent / "data/digits.yaml")
    assert main(["partition", "--config", data]) == 0
    report = PartitionReport(["0", "1"], [str(i) for i in range(62)], np.eye(2, 62, dtype=np.int64) * 7)
    console = Console(width=80, record=True)
    console.print(partition_table(report, 80))
    assert "largest class" in console.export_text()


def test_algorithms_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "fedprox"]) == 0
    shown = capsys.readouterr().out
    for text in ("MLSys 2020", "mu", "0.1", "configs/algorithms/fedprox.yaml"):
        assert text in shown
    assert main(["algorithms", "fed*"]) == 0
    assert "SCAFFOLD" not in capsys.readouterr().out
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    probe = 'COMP_WORDS=(fedlightning fit --trainer.max_r); COMP_CWORD=2; _fedlightning; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{probe}"], capture_output=True, text=True)
    assert done.stdout.strip() == "--trainer.max_rounds", done.stderr


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "data and model must be given: pass --config FILE"),
        (["--config", "nope.yaml"], "File does not exist: '.*nope.yaml'"),
        (["--config", "bad.yaml"], "parsing"),
        (["--config", "seed.yaml"], "no option 'seed_everything'. Use trainer.seed"),
        ([*SMALL, "--config", "typo.yaml"], "trainer has no option 'max_round'. Did you mean max_rounds"),
        ([*SMALL, "--trainer.callbacks+=FedPrx"], "no class 'FedPrx'. Did you mean FedProx"),
        ([*SMALL, "--trainer.callbacks+=FedProx", "--trainer.callbacks.mue=1"], "mue"),
        (
            [*SMALL, "--model=fedlightning.models.Clasifier"],
            "no class 'fedlightning.models.Clasifier'. Did you mean Class",
        ),
        ([*SMALL, "--model=no_such_module.Net"], "no module 'no_such_module'"),
        ([*SMALL, "--model.net=DigtsCNN"], "model.net: there is no class 'DigtsCNN'. Did you mean DigitsCNN"),
        ([*SMALL, "--model.net=MLP"], "MLP needs in_features, hidden, num_classes"),
        ([*SMALL, "--model.lrr=3"], "Classifier has no option 'lrr' .in model.. Did you mean lr"),
        ([*SMALL, "--data=FedProx"], "'fedlightning.callbacks.FedProx' is not a LightningDataModule"),
        ([*SMALL, "--trainer.max_rounds=x"], "trainer.max_rounds: must be a whole number, not 'x'"),
        ([*SMALL, "--images=2"], "no option '--images'. Options: fedlightning COMMAND --help"),
        ([*SMALL, "--trainer.max_round=2"], "no option '--trainer.max_round'. Did you mean --trainer.max_rounds"),
        ([*SMALL, "--trainer.evaluation.stages=[G,X]"], "must be one of 'G', 'L1', 'L2', not 'X'"),
        ([*SMALL, "--trainer.local_steps=3"], "got both local_epochs=1 and local_steps=3"),
        ([*SMALL, "--trainer.max_epochs=3"], "Use max_rounds and local_epochs"),
        ([*SMALL, "--trainer.callbacks+=FedProx", "--trainer.callbacks.mu=-1"], "FedProx got mu=-1.0"),
        (
            [
                *SMALL,
                "--trainer.callbacks+=SCAFFOLD",
                "--trainer.callbacks.server_lr=2",
                "--trainer.callbacks+=FedAdam",
            ],
            "SCAFFOLD and FedAdam both claim 'server_step'",
        ),
        ([*SMALL, "--trainer.callbacks=FedPer", "--trainer.callbacks.personal=[net.nothere]"], "net.nothere"),
        ([*SMALL, "--trainer.callbacks=FENDA", "--trainer.callbacks.head=net.nothere"], "no submodule `net.nothere`"),
        ([*SMALL, "--trainer.callbacks=FedBN"], "FedBN keeps batch normalisation local"),
        ([*SMALL, "--model.num_classes=5", "--model.net.num_classes=5"], "is outside 0 .. 4"),
        ([*SMALL, "--model.lr=1e38", "--trainer.local_epochs=4"], "NaN"),
        ([*SMALL, "--data=MNISTDataModule", "--data.root=nowhere"], "MNISTDataModule did not find"),
        ([*SMALL, "--data=lightning.pytorch.demos.boring_classes.BoringDataModule"], "Wrap it: Partitioned"),
        ([*SMALL, "--data.partitioner.num_clients=5000"], "DirichletPartitioner cannot give 5000 clients"),
        ([*SMALL, "--trainer.precision=foo"], "Precision 'foo' is invalid"),
        ([*SMALL, "--resume=last"], "There is nothing to resume"),
        ([*SMALL, "--resume=nowhere"], "'nowhere' does not exist"),
        ([*SMALL, "--model=modules.Refuses"], "size=1 is too small"),
    ],
)
def test_bad_input_is_a_sentence_and_leaves_nothing(
    words: list[str], sentence: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    Path("bad.yaml").write_text("trainer: [1,\n  a: b: c\n")
    Path("seed.yaml").write_text("seed_everything: 3\n")
    Path("typo.yaml").write_text("trainer: {max_round: 3}\n")
    write_modules(monkeypatch)
    assert main(["fit", *words]) == 2
    captured = capsys.readouterr()
    said = captured.err.strip().splitlines()
    assert re.search(sentence, said[-1]), captured.err
    assert said[-1].startswith("fedlightning fit: ")
    assert "Traceback" not in captured.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fitt"], "no command 'fitt'. Did you mean fit"),
        (["test"], "--run runs/NAME/version_N"),
        (["test", "--run", "nowhere"], "'nowhere' does not exist"),
        (["test", "--run", "runs", "--checkpoint", "best_x"], "no checkpoint 'best_x'"),
        (["predict", "--run", "runs/quickstart", "--client", "77"], "no client '77'"),
        (["algorithms", "fedprx"], "no algorithm 'fedprx'. Did you mean FedProx"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_bad_input_of_other_commands(
    words: list[str], sentence: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["runs/quickstart" if word == "runs" else word for word in words]
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("model", ["Crash", "Broken"])
def test_a_crash_of_the_users_code_keeps_its_traceback(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_modules(monkeypatch)
    assert main(["fit", *SMALL, f"--model=modules.{model}"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "modules.py" in shown


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--trainer.max_rounds=0", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("FEDLIGHTNING_DEBUG", "1")
    assert main(["fit", "--config", "nope.yaml"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("name", REPLACED)
def test_arguments_of_lightnings_trainer_name_what_takes_their_place(name: str) -> None:
    for text in (f"Group 'trainer' does not accept option '{name}'", f"Unrecognized arguments: --trainer.{name}=3"):
        assert parse_sentence(text).endswith(f" Use {REPLACED[name]}.")


def test_sentences() -> None:
    assert suggestion("fedprx", ["FedProx", "SCAFFOLD"]) == "Did you mean FedProx?"
    assert parse_sentence("something new\nand more") == "something new; and more."
    assert explain(KeyError("x")) is None
    assert explain(FileNotFoundError(2, "No such file or directory", "x.csv")) == "No such file or directory: 'x.csv'."


def write_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("modules.py").write_text(MODULES)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "modules", raising=False)


# -- tables ------------------------------------------------------------------------------------------------------------
def rows(clients: int = 3, metrics: tuple[str, ...] = ("loss", "accuracy", "my_score")) -> list[dict[str, object]]:
    return [
        {
            "model": "personal", "stage": stage, "checkpoint": checkpoint, "data": data, "split": "test",
            "metric": f"test_{metric}", "mean": 0.5, "weighted_mean": 0.5, "std": 0.1,
            "per_client": {str(i): None if i == 1 else 0.5 for i in range(clients)},
        }
        for checkpoint, stage in (("latest", "G"), ("latest", "L2"), ("best_local", "L1"))
        for data in ("local", "pooled")
        for metric in metrics
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_fit_their_terminal(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_results(rows(metrics=("loss", "accuracy", "f1_macro", "auroc", "x", "y")), console=console)
    shown = console.export_text()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


def test_the_table_of_clients_is_of_the_metric_that_runs_are_compared_by() -> None:
    for names, first in ((("loss", "mse", "rmse"), "rmse"), (("loss", "c_index"), "c_index"), (("loss", "acc"), "acc")):
        found = [{"metric": f"test_{name}", "split": "test"} for name in names]
        assert important_metrics(found)[0] == first == choose_metric([list(names)])


def test_important_metrics_come_first() -> None:
    assert important_metrics(rows()) == ["accuracy", "loss", "my_score"]
    assert important_metrics(rows(), headline="loss") == ["loss", "accuracy", "my_score"]
    assert important_metrics(rows(), headline="not there") == important_metrics(rows())
    table = client_table(rows())
    assert table is not None
    assert table.row_count == 3
    assert results_table(rows()).row_count == 6


def test_slashes_are_names_of_splits_too() -> None:
    found = [row | {"metric": row["metric"].replace("_", "/", 1)} for row in rows()]
    assert important_metrics(found) == ["accuracy", "loss", "my_score"]


def test_what_does_not_fit_is_named() -> None:
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_results(rows(), console=console)
    assert "No room for loss, my_score; the results have them." in " ".join(console.export_text().split())
    print_results(rows(), console=console, headline="my_score")
    text = " ".join(console.export_text().split())
    assert "No room for accuracy, loss; the results have them." in text and "test data: my_score" in text


def test_a_model_for_which_there_is_room_is_shown() -> None:
    more = (("latest", "L1"), ("best_global", "G"))
    others = [row | {"checkpoint": name, "stage": stage} for name, stage in more for row in rows()]
    table = client_table(rows() + others, width=80)
    assert table is not None
    assert [str(column.header) for column in table.columns][-2:] == ["best_global G", "best_local L1"]


def test_many_clients_and_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    print_results(rows(clients=21))
    assert "Each client" not in capsys.readouterr().out
    print_results([], "val")
    assert "no results" in capsys.readouterr().out


# -- as a process ------------------------------------------------------------------------------------------------------
@pytest.mark.slow  # the example and `algorithms` run as processes always, and what bad input says is seen in this one
@pytest.mark.parametrize("well", [True, False])
def test_the_console_script(here: Path, well: bool) -> None:
    call: Callable[..., subprocess.CompletedProcess[str]] = lambda *words: subprocess.run(  # noqa: E731
        [sys.executable, "-m", "fedlightning.cli", *words], capture_output=True, text=True, cwd=here
    )
    if well:
        good = call("fit", *SMALL)
        assert good.returncode == 0, good.stderr
        assert "Results on test data" in good.stdout
        return
    bad = call("fit", *SMALL, "--trainer.local_steps=2")
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1


# -- the current folder, shipped configurations, dry runs --------------------------------------------------------------
def test_modules_in_the_current_folder_are_found_last(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Appended to the path: a folder called `callbacks` there must not shadow what is installed."""
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry not in ("", str(here))])
    (here / "my_nets.py").write_text("from fedlightning.models import MLP\nclass Mine(MLP): pass\n")
    (here / "lightning.py").write_text("raise ImportError('shadowed')\n")
    net = [
        "--model.net=my_nets.Mine",
        "--model.net.in_features=64",
        "--model.net.hidden=[4]",
        "--model.net.num_classes=10",
    ]
    assert main(["fit", *SMALL, *net, "--dry-run"]) == 0
    assert sys.path[-1] == str(here)
    assert "Nothing was written" in capsys.readouterr().out
    assert not (here / "runs").exists()


def test_the_package_runs_as_a_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fedlightning", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedlightning", run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith("fedlightning ")


def test_a_dry_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--dry-run=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"] == 1 and len(found["clients"]) == 3
    assert "accuracy" in found["metrics"]


def test_shipped_configurations_are_listed_and_copied(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    assert "\nalgorithms/fenda " in listed and "\nquickstart " in listed
    assert main(["configs", "copy", "quickstart", "models"]) == 0
    assert (here / "configs/quickstart.yaml").read_text() == Path(QUICKSTART).read_text()
    assert len(list((here / "configs/models").iterdir())) == len(list(Path(QUICKSTART).parent.glob("models/*.yaml")))
    assert main(["configs", "copy", "quickstart"]) == 2
    assert "configs/quickstart.yaml is there already" in capsys.readouterr().err
    assert main(["configs", "copy", "quikstart"]) == 2
    assert "There is no configuration 'quikstart'. Did you mean quickstart?" in capsys.readouterr().err


@pytest.mark.slow
def test_compare_checks_its_metric_before_the_first_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", str(QUICKSTART), "--seeds", "1", "--baselines", "none", "--metric", "acuracy", "--out", "out"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--metric is 'acuracy'" in said and "Did you mean accuracy" in said
    assert not (here / "out").exists()

"""A LightningCLI project whose `main.py` has FederatedCLI in place of LightningCLI."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fedlightning import FederatedCLI, FederatedTrainer
from fedlightning.cli import main
from fedlightning.config.value_checks import refuse_misread
from fedlightning.datamodules import DigitsDataModule, IIDPartitioner, Partitioned
from fedlightning.errors import ConfigurationError
from fedlightning.options import Evaluation, Seeds
from fedlightning.project import INSTEAD

PROJECT = """
import torch
from lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self, num_features: int, width: int = 4, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(num_features, width), torch.nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


class Data(LightningDataModule):
    def __init__(self, num_features: int = 3, batch_size: int = 8):
        super().__init__()
        self.num_features, self.batch_size, self.columns = num_features, batch_size, num_features

    def setup(self, stage=None):
        x = torch.arange(60 * self.num_features).reshape(60, -1).float() / 100
        self.data = TensorDataset(x, (x[:, 0] > 1).long())

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    val_dataloader = train_dataloader
"""
IID = ["--clients.partitioner=IIDPartitioner", "--clients.partitioner.num_clients=3"]
FAST = ["--trainer.max_rounds=1", "--trainer.enable_progress_bar=False"]


class Linked(FederatedCLI):
    link = {"apply_on": "parse"}

    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.num_features", "model.num_features", **self.link)


class LinkedObject(Linked):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.columns", "model.num_features", apply_on="instantiate")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of the project, its two classes, and a clean command line."""
    (tmp_path / "project_of_a_test.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("project_of_a_test", None)
    import project_of_a_test

    return project_of_a_test


def saved(version: int = 0) -> dict:
    return yaml.safe_load(Path(f"runs/federation/version_{version}/config.yaml").read_text())


def test_a_migrated_main_file_trains_and_its_run_is_tested_by_fedlightning(project, tmp_path):
    """The classes stand in `main.py` itself, as in a first project, and one word was changed in it."""
    last = "if __name__ == '__main__':\n    LightningCLI(Net, Data)\n"
    text = f"from fedlightning import FederatedCLI\n{PROJECT}\n{last.replace('LightningCLI', 'FederatedCLI')}"
    (tmp_path / "main.py").write_text(text)
    words = ["fit", *IID, *FAST, "--model.num_features=3", "--data.batch_size=4", "--trainer.callbacks+=FedProx"]
    done = subprocess.run([sys.executable, "main.py", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    config = saved()
    assert config["model"] == {"class_path": "main.Net", "init_args": {"num_features": 3, "width": 4, "lr": 0.1}}
    inside = config["data"]["init_args"]
    assert config["data"]["class_path"] == "fedlightning.datamodules.Partitioned"
    assert inside["datamodule"] == {"class_path": "main.Data", "init_args": {"num_features": 3, "batch_size": 4}}
    assert main(["test", "--run", "runs/federation/version_0"]) == 0


@pytest.mark.parametrize(("cli", "features"), [(Linked, 5), (LinkedObject, 5)])
def test_linked_arguments_are_in_the_model_and_in_the_file_of_the_run(project, cli, features, capsys):
    made = cli(project.Net, project.Data, args=["fit", *IID, *FAST, "--data.num_features=5"])
    assert made.model.hparams.num_features == features == made.model.net[0].in_features
    assert saved()["model"]["init_args"]["num_features"] == features


class WithStopping(FederatedCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_lightning_class_args(EarlyStopping, "stopping")
        parser.set_defaults({"stopping.monitor": "val_loss", "stopping.patience": 7})
        parser.add_argument("--mail", default="nobody")

    def before_fit(self):
        self.told = [self.config.mail, type(self.datamodule)]

    def after_fit(self):
        self.told.append(self.trainer.rounds_done)


def test_callbacks_hooks_defaults_and_arguments_of_the_project_stay(project):
    defaults = {"callbacks": [{"class_path": "FedProx", "init_args": {"mu": 0.5}}], "max_rounds": 2, "seed": 3}
    defaults |= {"evaluation": 2}
    words = [
        "fit",
        *IID,
        "--trainer.evaluation.stages=[G,L1]",
        "--trainer.enable_progress_bar=False",
        "--model.num_features=3",
        "--mail=me",
    ]
    line = WithStopping(project.Net, project.Data, trainer_defaults=defaults, args=words)
    assert line.told == ["me", Partitioned, 2]
    assert (line.trainer.arguments["seed"], line.trainer.callbacks.callbacks[0].mu) == (Seeds(3), 0.5)
    assert line.trainer.arguments["evaluation"] == Evaluation(2, stages=["G", "L1"])
    assert line.trainer.ordinary_callbacks[0].patience == 7
    assert [row["class_path"].rpartition(".")[2] for row in saved()["trainer"]["callbacks"]] == [
        "FedProx",
        "EarlyStopping",
    ]


def test_without_run_there_are_the_objects_by_any_class(project):
    words = [*IID, "--model=project_of_a_test.Net", "--model.num_features=3", "--data=project_of_a_test.Data"]
    line = FederatedCLI(run=False, args=words)
    assert isinstance(line.model, project.Net) and isinstance(line.datamodule.partitioner, IIDPartitioner)
    line = FederatedCLI(project.Net, DigitsDataModule, run=False, args=["--model.num_features=64", "--data.seed=2"])
    assert type(line.datamodule) is DigitsDataModule and line.datamodule.seed == 2
    line = FederatedCLI(
        project.Net, DigitsDataModule, subclass_mode_model=True, subclass_mode_data=True, run=False,
        args=["--model=project_of_a_test.Net", "--model.num_features=64", "--data=DigitsDataModule"],
    )  # fmt: skip
    assert type(line.datamodule) is DigitsDataModule


def test_a_command_line_without_options_is_read(project):
    refuse_misread([], {})  # main.py fit, where everything has a default


def test_the_data_are_shown_without_a_whole_model(project, capsys):
    FederatedCLI(project.Net, project.Data, args=["partition", *IID, "--model.num_features=3", "--split=val"])
    assert "3 clients" in capsys.readouterr().out and Path("partition").is_dir()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["fit", "--model.num_features=3"],
            r"project_of_a_test.Data does not know .*--clients.partitioner=IIDPartitioner",
        ),
        (["fit", *IID], "num_features"),
        (["fit", "--trainer.max_epochs=3"], "no option '--trainer.max_epochs'. Use max_rounds and local_epochs"),
        (["fit", "--optimizer=Adam"], "no option '--optimizer'. Use configure_optimizers of the module"),
        (["fit", "--seed_everything=3"], "no option '--seed_everything'. Use trainer.seed"),
        (["fit", "--config=old.yaml"], "no option 'ckpt_path'. Use --resume FOLDER"),
        (["fti"], "There is no command 'fti'. Did you mean fit"),
    ],
)
def test_what_is_no_option_here_is_refused_in_a_sentence(project, words, sentence, capsys):
    Path("old.yaml").write_text("ckpt_path: last\n")
    with pytest.raises(SystemExit) as stop:
        FederatedCLI(project.Net, project.Data, args=words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in error
    assert re.search(sentence, error), error


def test_every_argument_of_lightningcli_is_here_or_has_a_sentence(project):
    names = set(inspect.signature(LightningCLI).parameters) - set(inspect.signature(FederatedCLI).parameters)
    assert names == set(INSTEAD)
    for name in names:
        with pytest.raises(ConfigurationError, match=f"FederatedCLI has no argument '{name}'. Use "):
            FederatedCLI(project.Net, project.Data, args=["fit"], **{name: 1})


def test_lightningcli_with_the_federated_trainer_names_what_to_write(project):
    with pytest.raises(MisconfigurationException, match=r"FederatedTrainer.*write FederatedCLI\(MyModule, MyData\)"):
        LightningCLI(project.Net, project.Data, trainer_class=FederatedTrainer, args=["fit"])
    assert "FederatedCLI" not in repr(FederatedTrainer)


@pytest.mark.slow
def test_a_main_file_without_its_guard_is_refused(project, tmp_path):
    (tmp_path / "bare.py").write_text(f"from fedlightning import FederatedCLI\n{PROJECT}\nFederatedCLI(Net, Data)\n")
    words = ["fit", *IID, *FAST, "--model.num_features=3"]
    done = subprocess.run([sys.executable, "bare.py", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "if __name__ == '__main__'" in done.stderr and "Traceback" not in done.stderr

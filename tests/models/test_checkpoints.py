"""A checkpoint opens on its own, whether the Classifier came from Python, from YAML or from LightningCLI."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.models import MLP, Classifier, DigitsCNN, SmallTransformer
from fedlightning.models.recipes import callable_recipe, module_recipe

YAML = """
class_path: fedlightning.models.Classifier
init_args:
  net: {class_path: fedlightning.models.MLP, init_args: {in_features: 4, hidden: [8], num_classes: 3}}
  num_classes: 3
  optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
  scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1}}
"""


class Stranger(nn.Module):
    """A network that does not say how it was made."""

    head_name = "fc"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x)
        return logits


class Widened(MLP):
    """A subclass with another constructor: the inherited recipe would not fit."""

    def __init__(self, factor: int) -> None:
        super().__init__(4, [4 * factor], 3)


class Ready(Classifier):
    """A user's subclass with its own arguments."""

    def __init__(self, width: int = 5, lr: float = 0.2) -> None:
        super().__init__(MLP(4, [width], 3), 3, lr=lr)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 3), batch_size=8)


def quiet() -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip


def saved(module: LightningModule, folder: Path) -> Path:
    trainer = quiet()
    trainer.fit(module, datamodule=Data())
    path = folder / "model.ckpt"
    trainer.save_checkpoint(path)
    return path


def assert_same(one: LightningModule, other: LightningModule) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_round_trip_from_python(tmp_path: Path) -> None:
    optimizer = functools.partial(torch.optim.AdamW, lr=0.03, betas=(0.8, 0.9))
    module = Classifier(MLP(4, [8], 3), 3, optimizer=optimizer, label_smoothing=0.1)
    path = saved(module, tmp_path)
    loaded = Classifier.load_from_checkpoint(path, weights_only=True)  # plain values only
    assert_same(loaded, module)
    assert loaded.label_smoothing == 0.1
    made = loaded.configure_optimizers()
    assert type(made) is torch.optim.AdamW and made.defaults["lr"] == 0.03 and made.defaults["betas"] == (0.8, 0.9)
    assert_same(Classifier.load_from_checkpoint(saved(loaded, tmp_path)), loaded)  # and once more
    assert loaded.hparams["net"] == module.hparams["net"] == module_recipe(module.net)


def test_a_change_on_loading(tmp_path: Path) -> None:
    path = saved(Classifier(MLP(4, [8], 3), 3, lr=0.2), tmp_path)
    assert Classifier.load_from_checkpoint(path).lr == 0.2
    assert Classifier.load_from_checkpoint(path, lr=0.4).lr == 0.4


def test_network_without_a_recipe(tmp_path: Path) -> None:
    module = Classifier(Stranger(4), 3, optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    path = saved(module, tmp_path)
    with pytest.raises(TypeError, match=r"how to build one.*load_from_checkpoint\(path, net=Stranger\(\.\.\.\)\)"):
        Classifier.load_from_checkpoint(path)
    loaded = Classifier.load_from_checkpoint(path, net=Stranger(4))
    assert_same(loaded, module)
    assert type(loaded.configure_optimizers()) is torch.optim.Adam


def test_recipes_that_would_lie_are_not_written() -> None:
    assert module_recipe(Widened(2)) is None
    net = MLP(4, [], 3)
    net.init_args["hidden"] = torch.nn.ReLU()
    assert module_recipe(net) is None
    assert callable_recipe(functools.partial(torch.optim.SGD, lr=torch.tensor(0.1))) is None
    assert callable_recipe(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) is None
    recipe = callable_recipe(torch.optim.Adam)
    assert recipe == {"class_path": "torch.optim.adam.Adam", "init_args": {}}


def test_optimizer_that_cannot_be_written_warns(tmp_path: Path) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    path = saved(Classifier(MLP(4, [], 3), 3, optimizer=optimizer), tmp_path)
    with pytest.warns(UserWarning, match="optimizer of this checkpoint was a function that cannot be written down"):
        Classifier.load_from_checkpoint(path)
    assert Classifier.load_from_checkpoint(path, optimizer=optimizer).make_optimizer is optimizer


def test_resuming_with_the_trainer(tmp_path: Path) -> None:
    path = saved(Classifier(Stranger(4), 3), tmp_path)
    module = Classifier(Stranger(4), 3)
    trainer = quiet()
    trainer.fit(module, datamodule=Data(), ckpt_path=path)
    assert_same(module, Classifier.load_from_checkpoint(path, net=Stranger(4)))


def test_subclass_with_its_own_arguments(tmp_path: Path) -> None:
    module = Ready(width=7, lr=0.3)
    loaded = Ready.load_from_checkpoint(saved(module, tmp_path))
    assert_same(loaded, module)
    assert loaded.lr == 0.3


@pytest.mark.parametrize(
    "net",
    [DigitsCNN(norm="batch"), SmallTransformer(9, 3, dim=8, num_heads=2, num_layers=1)],
    ids=lambda net: type(net).__name__,
)
def test_other_networks_from_yaml_and_back(net: nn.Module, tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "net")
    config = yaml.safe_load(yaml.safe_dump({"net": module_recipe(net)}))
    again = parser.instantiate_classes(parser.parse_object(config)).net
    assert type(again) is type(net) and module_recipe(again) == module_recipe(net)


def test_from_yaml_without_lightning_cli(tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    module = parser.instantiate_classes(parser.parse_object({"model": yaml.safe_load(YAML)})).model
    assert type(module) is Classifier
    made = module.configure_optimizers()
    assert type(made["optimizer"]) is torch.optim.AdamW and made["optimizer"].defaults["weight_decay"] == 0.01
    assert_same(pickle.loads(pickle.dumps(module)), module)
    assert_same(Classifier.load_from_checkpoint(saved(module, tmp_path), weights_only=True), module)


def test_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit"])
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": yaml.safe_load(YAML)}))
    options = ["accelerator=cpu", "max_epochs=1", "logger=false", "enable_progress_bar=false"]
    cli = LightningCLI(
        LightningModule, Data, subclass_mode_model=True, run=False, save_config_callback=None,
        seed_everything_default=False,
        args=["--config", str(config), *(f"--trainer.{option}" for option in options)],
        trainer_defaults={"enable_model_summary": False, "enable_checkpointing": False},
    )  # fmt: skip
    module = cli.model
    assert type(module) is Classifier and module.hparams["net"]["init_args"]["hidden"] == [8]
    assert_same(copy.deepcopy(module), module)
    assert_same(pickle.loads(pickle.dumps(module)), module)  # holds nothing of the command line
    path = saved(module, tmp_path)
    for cls in (Classifier, LightningModule):
        loaded = cls.load_from_checkpoint(path, weights_only=True)
        assert type(loaded) is Classifier
        assert_same(loaded, module)
        assert type(loaded.configure_optimizers()["optimizer"]) is torch.optim.AdamW

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.commands.run import Commands
from fedlightning.datamodules import Partitioned
from fedlightning.models import MLP, Classifier


class Saved(pl.LightningDataModule):
    """A data module that reads its own hyper-parameters, as many do."""

    def __init__(self, path: str = "somewhere", batch_size: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.where = self.hparams.path

    def train_dataloader(self):
        data = TensorDataset(torch.zeros(40, 4), torch.arange(40) % 2)
        return DataLoader(data, batch_size=self.hparams.batch_size)


class Inner(pl.LightningModule):
    def __init__(self, width: int = 3, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, self.hparams.width)


class Outer(pl.LightningModule):
    """A module around one that it is given and one that it makes."""

    def __init__(self, inner: pl.LightningModule, lr: float = 0.1, width: int = 9) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["inner"])
        self.inner, self.own = inner, Inner(width=self.hparams.width)
        self.save_hyperparameters("lr")


class Twice(Outer):
    """Saves before and after its base class."""

    def __init__(self, inner: pl.LightningModule, extra: int = 1, **kwargs) -> None:
        self.extra = extra
        super().__init__(inner, **kwargs)
        self.save_hyperparameters(ignore=["inner"])


pytestmark = pytest.mark.filterwarnings("ignore")
HERE = __name__
DATA = ["--data=fedlightning.datamodules.Partitioned", f"--data.datamodule={HERE}.Saved"]
MODEL = ["--model=Classifier", "--model.net=MLP", "--model.net.in_features=4", "--model.net.hidden=[3]"]
MODEL += ["--model.net.num_classes=2", "--model.num_classes=2"]
IID = ["--data.partitioner=fedlightning.datamodules.IIDPartitioner", "--data.partitioner.num_clients=2"]


def keys(module):
    return {name: value for name, value in module.hparams.items() if not isinstance(value, torch.nn.Module)}


def made(*words):
    cli = Commands("fit", [*words, "--trainer.max_rounds=1"])
    return cli.model, cli.datamodule


def test_a_wrapped_data_module_keeps_its_own_hyperparameters():
    _, data = made(*MODEL, *DATA, *IID, "--data.batch_size=5", "--data.datamodule.init_args.path=here")
    inner = data.datamodule
    assert isinstance(data, Partitioned) and isinstance(inner, Saved)
    assert dict(inner.hparams) == dict(Saved("here").hparams) == {"path": "here", "batch_size": 7}
    assert inner.where == "here"
    data.setup()
    assert data.batch_size == 5


@pytest.mark.parametrize("kind", ["Outer", "Twice"])
def test_modules_inside_a_module_keep_their_own(kind):
    words = [f"--model={HERE}.{kind}", f"--model.inner={HERE}.Inner", "--model.inner.init_args.width=5"]
    module, _ = made(*words, "--model.lr=0.25", *DATA, *IID)
    assert dict(module.inner.hparams) == {"width": 5, "lr": 0.5} and module.inner.layer.out_features == 5
    # A module made inside a constructor has what Lightning finds in Python: it reads the frames of both constructors.
    assert keys(module.own) == keys({"Outer": Outer, "Twice": Twice}[kind](Inner(width=5), lr=0.25).own)
    assert module.hparams.lr == 0.25
    assert module.hparams["_class_path"] == f"{HERE}.{kind}"
    assert ("extra" in module.hparams) == (kind == "Twice")


def test_modules_of_the_same_class_inside_each_other():
    inner = [f"--model.inner={HERE}.Outer", f"--model.inner.init_args.inner={HERE}.Inner"]
    module, _ = made(f"--model={HERE}.Outer", *inner, "--model.inner.init_args.width=2", "--model.lr=0.25", *DATA, *IID)
    assert (
        module.inner.hparams.lr == 0.1 and module.inner.hparams.width == 2 and "_class_path" not in module.inner.hparams
    )
    assert module.hparams.lr == 0.25 and module.hparams.width == 9 and module.hparams["_class_path"].endswith("Outer")


def test_the_hyperparameters_of_the_outer_module_are_lightnings(tmp_path):
    module, _ = made(*MODEL, *DATA, *IID)
    assert module.hparams["_class_path"] == "fedlightning.models.Classifier"
    assert module.hparams["_instantiator"] == "lightning.pytorch.cli.instantiate_module"
    assert module.hparams["net"]["class_path"].endswith("MLP")
    direct = Classifier(MLP(4, [3], 2), num_classes=2)
    assert set(direct.hparams) <= set(module.hparams)
    assert "save_hyperparameters" in pl.core.mixins.HyperparametersMixin.save_hyperparameters.__qualname__

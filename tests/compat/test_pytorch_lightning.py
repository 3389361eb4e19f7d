"""`import pytorch_lightning`: the same code under another name. Its modules, callbacks and loggers can be federated."""

from __future__ import annotations

import importlib
import os
import sys

import pytest
import torch
from torch.nn import functional as F

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.compat import pytorch_lightning as compat
from tests.helpers import make_trainer, toy_data

# isort: split
import lightning.pytorch

pytest.importorskip("pytorch_lightning.core.module")


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] in compat.PACKAGES]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, compat.OldNames)]
    os.environ.pop(compat.SWITCH, None)


@pytest.fixture
def clean():
    """No `pytorch_lightning` is imported, and none is left behind."""
    forget()
    yield
    forget()


def module_class(pl):
    class Base(pl.LightningModule):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(6, 3)

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.hparams.lr)

    class Net(Base):
        def __init__(self, lr=0.1):
            super(Net, self).__init__(lr)  # noqa: UP008  the form that names the class must go on working

    return Net


def scores(module, *callbacks, **options):
    trainer = make_trainer(None, [FedAvg(), *callbacks], evaluation=1, **options)
    trainer.fit(module, toy_data([12, 10]))
    return trainer, [(row.metric, row.stage, row.value) for row in trainer.rows]


@pytest.mark.filterwarnings("ignore:Counter derives from")
def test_an_instance_is_adapted_and_gives_the_same_numbers(clean, tmp_path):
    pl = importlib.import_module("pytorch_lightning")
    seen = []

    class Counter(pl.Callback):
        def on_train_batch_end(self, *args):
            seen.append(1)

    torch.manual_seed(0)
    theirs = module_class(pl)(lr=0.2)
    torch.manual_seed(0)
    ours = module_class(lightning.pytorch)(lr=0.2)
    stock = importlib.import_module("pytorch_lightning.callbacks").EarlyStopping("train_loss", patience=9)
    with pytest.warns(UserWarning, match="derives from pytorch_lightning's LightningModule"):
        trainer, found = scores(theirs, Counter(), stock)
    assert seen and found == scores(ours)[1]
    assert trainer.federation.engine.runner.loop.used == "fast"  # no method counts as overridden
    assert isinstance(theirs, lightning.pytorch.LightningModule) and isinstance(theirs, pl.LightningModule)
    assert type(theirs.hparams).__module__ == "lightning.fabric.utilities.data" and dict(theirs.hparams) == {"lr": 0.2}


def test_loggers_and_data_modules_are_adapted(clean, tmp_path):
    pl = importlib.import_module("pytorch_lightning")
    logger = importlib.import_module("pytorch_lightning.loggers").CSVLogger(tmp_path)
    FederatedTrainer(logger=logger, default_root_dir=tmp_path)
    assert type(logger) is lightning.pytorch.loggers.CSVLogger
    data = type("Data", (pl.LightningDataModule,), {})()
    with pytest.warns(UserWarning, match="Data derives from"):
        compat.adapt(data)
    assert isinstance(data, lightning.pytorch.LightningDataModule)


def test_another_version_is_refused_with_what_to_do(clean, monkeypatch):
    pl = importlib.import_module("pytorch_lightning")
    monkeypatch.setattr(pl, "__version__", "1.9.5")
    with pytest.raises(ValueError, match=r"Net derives from .*\(1\.9\.5 and .*import lightning\.pytorch as pl"):
        scores(module_class(pl)())


def test_the_old_names_give_the_present_modules(clean):
    compat.use_lightning_for_pytorch_lightning()
    compat.use_lightning_for_pytorch_lightning()  # a second call has no effect
    pl = importlib.import_module("pytorch_lightning")
    assert pl is lightning.pytorch
    assert importlib.import_module("pytorch_lightning.callbacks.timer").Timer is lightning.pytorch.callbacks.Timer
    assert importlib.import_module("lightning_fabric.utilities") is importlib.import_module(
        "lightning.fabric.utilities"
    )
    assert pl.__spec__.name == "lightning.pytorch"
    with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.lite"):
        importlib.import_module("pytorch_lightning.lite")
    scores(module_class(pl)())


def test_it_is_too_late_once_it_is_imported(clean):
    importlib.import_module("pytorch_lightning")
    with pytest.raises(RuntimeError, match="already, so its classes"):
        compat.use_lightning_for_pytorch_lightning()
    compat.use_lightning_if_possible()
    assert not any(isinstance(finder, compat.OldNames) for finder in sys.meta_path)

"""Schedulers and callbacks that monitor a metric of the validation: visits validate, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.helpers import Toy, make_trainer, toy_data

# isort: split
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint


class Plateau(Toy):
    """Lowers its learning rate whenever the monitored value does not fall."""

    def __init__(self, monitor: str = "val_loss", **options):
        super().__init__(**options)
        self.monitor = monitor

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=100.0)  # lowers in every epoch
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


def fitted(module, callbacks=(), sizes=(30, 40), root=None, **options):
    trainer = make_trainer(root, list(callbacks), max_rounds=1, **options)
    trainer.fit(module, toy_data(list(sizes)))
    return trainer


def how(trainer) -> str:
    return trainer.federation.engine.runner.loop.used


class Rates(Callback):
    seen: list[float]

    def on_train_epoch_start(self, trainer, pl_module):
        type(self).seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_a_plateau_scheduler_follows_the_clients_own_validation_loss():
    Rates.seen = []
    trainer = fitted(Plateau(lr=0.4), [Rates()], sizes=(30,), local_epochs=3)
    assert "val_loss" in how(trainer)
    assert Rates.seen[-3:] == [0.4, 0.2, 0.1]


def test_validation_in_visits_changes_no_number_and_is_only_done_where_something_needs_it():
    module = Toy(dropout=0.5)
    plain = fitted(module, [EarlyStopping("train_loss", patience=9)], local_epochs=2)
    watched = fitted(module, [EarlyStopping("val_loss", patience=9)], local_epochs=2)
    assert how(plain) == "fast" and how(watched).startswith("trainer")
    states = [one.module().state_dict() for one in (plain, watched)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    "module, callbacks, options, sentence",
    [
        (
            Plateau("val_los"),
            (),
            {},
            r"ReduceLROnPlateau monitors 'val_los', but Plateau logs train_loss, val_acc, val_loss",
        ),
        (
            Toy(),
            (EarlyStopping("nope"),),
            {},
            r"EarlyStopping monitors 'nope', but Toy logs train_loss, val_acc, val_loss",
        ),
        (
            Plateau(),
            (),
            {"check_val_every_n_epoch": 2},
            r"1 local epoch\(s\): check_val_every_n_epoch=2 never validates",
        ),
        (Plateau(), (), {"local_loop": "fast"}, r"local_loop='fast' cannot be used: .*val_loss"),
    ],
)
def test_a_metric_that_never_comes_is_named_with_those_that_do(module, callbacks, options, sentence):
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        fitted(module, callbacks, **options)


def test_a_client_without_validation_data_is_named():
    data = toy_data([30, 40])
    data.client_dataloader, whole = (
        lambda client, split: None if split == "val" else whole(client, split),
        data.client_dataloader,
    )
    trainer = make_trainer(None, [EarlyStopping("val_loss")], max_rounds=1)
    with pytest.raises(RuntimeError, match="client '0' has no validation data"):
        trainer.fit(Toy(), data)


def test_an_error_of_the_module_stays_its_own():
    class Broken(Plateau):
        def training_step(self, batch, batch_idx):
            raise KeyError("labels")

    with pytest.raises(RuntimeError, match="KeyError: 'labels'"):
        fitted(Broken())


def test_a_metric_that_nobody_insists_on_is_a_warning():
    with pytest.warns(UserWarning, match="EarlyStopping monitors 'nope', but Toy logs"):
        fitted(Toy(), [EarlyStopping("nope", strict=False)])


def test_early_stopping_goes_on_from_visit_to_visit():
    trainer = make_trainer(None, [EarlyStopping("val_loss", patience=1, min_delta=100.0)], max_rounds=3, local_epochs=3)
    trainer.fit(Toy(), toy_data([32]))
    # round 1: the best value, then none better; then the patience is used up, and a visit ends after its first epoch
    assert [entry["steps"] for entry in trainer.federation.history] == [2 * 4, 4, 4]


@pytest.mark.parametrize("work", [{"local_epochs": 2}, {"local_steps": 2}])
def test_checkpoints_inside_clients_lie_in_their_own_folders(tmp_path: Path, work):
    trainer = fitted(Toy(), [ModelCheckpoint(monitor="val_loss")], root=tmp_path, **work)
    found = {path.parent.relative_to(trainer.run.path).as_posix() for path in trainer.run.path.rglob("epoch=*.ckpt")}
    assert found == {"clients/0/checkpoints", "clients/1/checkpoints"}

"""What cannot work is refused in a sentence that names the thing, the value, the rule and the way out."""

from __future__ import annotations

import inspect
from datetime import timedelta

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning import FederatedTrainer, load
from fedlightning.callbacks import FedAdam, FedBN, FedPer, FedProx
from fedlightning.contract import FederatedCallback
from fedlightning.datamodules import IIDPartitioner
from fedlightning.engines.attempts import FederationError
from fedlightning.errors import ConfigurationError
from fedlightning.options.replaced import ATTRIBUTES, OF_METHODS, REPLACED
from tests.helpers import Toy, federate, make_trainer, toy_data


class WithoutRange(FederatedCallback):
    def __init__(self, share) -> None:
        self.share = share


class ByHand(Toy):
    """Steps its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("local_loop", ["auto", "trainer"])
@pytest.mark.parametrize(
    "option", [{"gradient_clip_val": 1}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}]
)
def test_what_automatic_optimization_does_is_refused_for_a_module_that_steps_by_hand(option, local_loop, tmp_path):
    """Lightning's Trainer refuses it; the fast loop went on without it."""
    ((name, value),) = option.items()
    with pytest.raises(ConfigurationError, match=f"^{name}={value} does nothing for ByHand, which optimizes by hand"):
        federate(ByHand(), toy_data(), root=tmp_path, local_loop=local_loop, **option)


@pytest.mark.parametrize("option", [{}, {"gradient_clip_val": 0.0}, {"accumulate_grad_batches": 1}])
def test_what_does_nothing_anyway_is_let_in(option, tmp_path):
    federate(ByHand(), toy_data(), root=tmp_path, max_rounds=1, **option)


def test_numbers_of_numpy_are_numbers(tmp_path):
    trainer = make_trainer(tmp_path, max_rounds=np.int64(2), participation=np.float32(0.5), seed=np.int64(3))
    assert [type(trainer.arguments[name]) for name in ("max_rounds", "participation")] == [int, float]
    assert type(trainer.arguments["seed"].run) is int
    assert type(trainer.max_rounds) is int
    assert make_trainer(tmp_path, max_time={"hours": np.int64(1)})._max_time == timedelta(hours=1)
    with pytest.raises(ConfigurationError, match=r"max_rounds=2\.5\. Use a whole number"):
        make_trainer(tmp_path, max_rounds=np.float32(2.5))


ARGUMENTS = [
    ({"local_epochs": 2, "local_steps": 5}, "got both local_epochs=2 and local_steps=5.*Leave one out"),
    ({"max_rounds": 0}, r"max_rounds=0. Use a whole number in \[1, inf\)"),
    ({"max_rounds": 2.5}, "max_rounds=2.5. Use a whole number"),
    ({"local_epochs": -1}, "local_epochs=-1. Use"),
    ({"local_steps": 0}, "local_steps=0. Use"),
    ({"local_steps": True}, "local_steps=True. Use"),
    ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0. Use"),
    ({"evaluation": -1}, r"Evaluation got every=-1. Use a whole number in \[0, inf\). 0 switches it off"),
    ({"save_state": "always"}, "save_state='always'. Use"),
    ({"participation": 0.0}, r"participation=0.0. Use .*in \(0, 1\]. A float is a share"),
    ({"participation": 1.5}, "participation=1.5. Use"),
    ({"participation": 0}, "participation=0. Use"),
    ({"participation": "half"}, "participation='half'. Use"),
    ({"lr_decay": 0}, "lr_decay=0. Use .* A factor per round"),
    ({"lr_decay": "slow"}, "lr_decay='slow'. Use"),
    ({"optimizer_state": "new"}, "optimizer_state='new'. Use 'reset' or 'keep', or None"),
    ({"float_buffers": "mean"}, "float_buffers='mean'. Use 'average', 'local' or 'server'"),
    ({"engine": "warp"}, "engine='warp'. Use an EngineOptions, or 'sequential', 'processes'"),
    ({"callbacks": [FedProx]}, r"callbacks holds .*FedProx.*Pass instances"),
    ({"callbacks": ["fedprox"]}, "callbacks holds 'fedprox', which is not a callback"),
    ({"max_time": "1h"}, "max_time='1h' is not of the form 'DD:HH:MM:SS'"),
    ({"max_time": 3600}, "max_time=3600. Use a text"),
    ({"max_time": {"hour": 1}}, "max_time={'hour': 1} is not a time"),
    ({"max_time": {"seconds": -1}}, "max_time={'seconds': -1} is not a time"),
    ({"max_rounds": None}, "max_rounds=None. Use a whole number"),
    ({"participation": float("nan")}, "participation=nan. Use .* It must be finite"),
    ({"seed": None}, "FederatedTrainer got seed=None. Use a Seeds, or a whole number"),
    ({"evaluation": None}, "FederatedTrainer got evaluation=None. Use an Evaluation, or a whole number"),
    ({"failures": None}, "FederatedTrainer got failures=None. Use a FailurePolicy, or 'skip', 'retry' or 'stop'"),
    ({"name": None}, "name=None. Use a text"),
    ({"version": 3}, "version=3. Use a text"),
    ({"default_root_dir": None}, "default_root_dir=None must be the path"),
    ({"default_root_dir": "a\0b"}, r"default_root_dir='a.x00b' cannot name a folder"),
    ({"default_root_dir": "a\ud800b"}, "cannot name a folder: it is longer than 255 bytes or holds characters"),
    ({"default_root_dir": "/tmp/" + 300 * "a"}, "cannot name a folder: it is longer than 255 bytes"),
    ({"engine": ["sequential"]}, r"engine=\['sequential'\] is unknown. Choose one of"),
    ({"logger": "csv"}, "logger='csv' is not a logger"),
    ({"fast_dev_run": "yes"}, "fast_dev_run='yes'. Use True or False"),
    ({"callbacks": "fedprox"}, "callbacks='fedprox'. Use a list, each a Callback"),
    ({"callbacks": FedProx}, "callbacks=<class .* must be a list of callbacks"),
    ({"callbacks": [WithoutRange(float("nan"))]}, "WithoutRange has share=nan; it must be finite"),
    ({"callbacks": [WithoutRange(float("inf"))]}, "WithoutRange has share=inf; it must be finite"),
    ({"num_nodes": 2}, "num_nodes=2, but this process was not started on several machines"),
    ({"limit_val_batches": -1}, "limit_val_batches=-1. Use .* an int a number of them"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), ARGUMENTS, ids=[f"{number}-{next(iter(a))}" for number, (a, _) in enumerate(ARGUMENTS)]
)
def test_arguments(arguments, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        FederatedTrainer(**arguments)


@pytest.mark.parametrize(
    ("args", "given", "sentence"),
    [
        ((), {"max_round": 3}, "^FederatedTrainer has no argument 'max_round'. Did you mean max_rounds?"),
        ((), {"tpus": 3}, "no argument 'tpus'. It has max_rounds, local_epochs"),
        ((), {"num_clients": 3}, r"no argument 'num_clients'. Use the partitioner's, as in Partitioned\("),
        ((), {"lr": 3}, "no argument 'lr'. Use the module's"),
        ((3,), {}, "^FederatedTrainer got 3, and takes no argument without a name. Name it, as in max_rounds=...$"),
    ],
)
def test_arguments_that_there_are_not(args, given, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        FederatedTrainer(*args, **given)


@pytest.mark.parametrize("name", ["__init__", *OF_METHODS])
def test_every_argument_of_lightnings_trainer_is_here_or_has_a_sentence(name):
    theirs = set(inspect.signature(getattr(Trainer, name)).parameters)
    here = set(inspect.signature(getattr(FederatedTrainer, name)).parameters)
    assert theirs <= here | set(REPLACED if name == "__init__" else OF_METHODS[name])


@pytest.mark.parametrize(("method", "name"), [(method, name) for method, names in OF_METHODS.items() for name in names])
def test_what_lightnings_methods_take_is_refused_in_a_sentence_before_anything_else(method, name, tmp_path):
    with pytest.raises(ConfigurationError, match=f"^{method}\\(\\) has no argument '{name}'. Use ") as error:
        getattr(make_trainer(tmp_path), method)(**{name: "last"})
    assert OF_METHODS[method][name] in str(error.value) and not list(tmp_path.iterdir())


def test_attributes_of_lightnings_trainer_name_what_takes_their_place(tmp_path):
    trainer = make_trainer(tmp_path)
    for name, instead in ATTRIBUTES.items():
        with pytest.raises(AttributeError, match="has no attribute") as error:
            getattr(trainer, name)
        assert str(error.value).endswith(f"Use {instead}.") and hasattr(Trainer, name)
    assert not hasattr(trainer, "nothing")


def test_callbacks_are_those_that_the_trainer_was_made_with(tmp_path):
    trainer = make_trainer(tmp_path, [FedProx(mu=0.1)])
    with pytest.raises(AttributeError, match=r"no attribute 'append'. Use FederatedTrainer\(callbacks=\[...\]\)"):
        trainer.callbacks.append(FedAdam())
    with pytest.raises(ConfigurationError, match=r"LearningRateFinder cannot be added .* Tuner tunes on one client"):
        Tuner(trainer).lr_find(Toy(), toy_data())


def test_a_compiled_module_is_not_the_module():
    with pytest.raises(
        ConfigurationError, match=r"OptimizedModule as model. Pass the module that torch.compile was given"
    ):
        FederatedTrainer().fit(torch.compile(Toy()), toy_data())


def test_several_wrong_callbacks():
    with pytest.raises(ValueError, match="FedAdam and Other both claim 'server_step'"):
        FederatedTrainer(callbacks=[FedAdam(), type("Other", (FedAdam,), {})()])


class Plain(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4, 6), torch.zeros(4).long()))


LOADER = DataLoader(TensorDataset(torch.zeros(4, 6), torch.zeros(4).long()), batch_size=2)
DATA = [
    ({"datamodule": Plain()}, r"Plain does not know which client has which samples. Wrap it: Partitioned\("),
    ({}, r"fit\(\) got no data. Pass datamodule=Partitioned"),
    ({"datamodule": {"a": LOADER}}, r"data are a dict. Loaders by client go by their name: fit\(model, train_data"),
    ({"datamodule": [LOADER]}, "data are a list, which does not say which client.*train_dataloaders={'site 1'"),
    ({"datamodule": LOADER}, r"data are a DataLoader.* Partitioned\(MyDataModule\(\), IIDPartitioner\(10\)\)"),
    ({"datamodule": IIDPartitioner(2)}, r"data are a IIDPartitioner.* Pass Partitioned\(MyDataModule\(\), IIDPart"),
    ({"datamodule": Plain}, r"the class Plain, not an instance. Pass Plain\(...\)"),
    ({"datamodule": toy_data(), "train_dataloaders": {"a": LOADER}}, "a datamodule and train_dataloaders. Pass one"),
    (
        {"datamodule": toy_data(), "val_dataloaders": {"a": LOADER}},
        "a datamodule and val_dataloaders. The datamodule has",
    ),
    ({"train_dataloaders": [LOADER]}, "train_dataloaders is a list. Pass one loader per client, by name"),
    ({"train_dataloaders": {"a": iter(LOADER)}}, r"train_dataloaders\['a'\] is a .*, which ends after one epoch"),
    (
        {"train_dataloaders": {"a": LOADER.dataset}},
        r"train_dataloaders\['a'\] is a TensorDataset, which has no batches",
    ),
    ({"train_dataloaders": {}}, "train_dataloaders is empty. Give one loader per client"),
    (
        {"train_dataloaders": {"a": LOADER}, "val_dataloaders": {"b": LOADER}},
        "val_dataloaders has client 'b', train_dataloaders has not",
    ),
]


@pytest.mark.parametrize(("given", "sentence"), DATA)
def test_data(given, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        make_trainer(tmp_path).fit(Toy(), **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Toy, r"got the class Toy, not an instance. Pass Toy\(...\)"),
        (nn.Linear(6, 3), "got Linear as model. Pass a LightningModule"),
        (None, "There is no model to train"),
    ],
)
def test_models(model, sentence, tmp_path):
    with pytest.raises(ConfigurationError, match=sentence):
        make_trainer(tmp_path).fit(model, datamodule=toy_data())


class NoOptimizer(Toy):
    def configure_optimizers(self):
        return None


def test_nothing_to_optimise(tmp_path):
    with pytest.raises(ValueError, match=r"NoOptimizer.configure_optimizers returns nothing.*Return an optimizer"):
        federate(NoOptimizer(), toy_data(), root=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([FedPer(personal=["net.9"])], r"'?net\.9'?"),
        ([FedBN()], "FedBN.*has no BatchNorm layer"),
        ([FedPer(num_layers=2)], "FedPer leaves nothing to share"),
    ],
)
def test_algorithms_that_cannot_work_are_refused_before_anything_is_written(callbacks, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(), callbacks, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_labels_out_of_range():
    data = toy_data([8, 8])
    for client in data.tensors.values():
        client["train"] = (client["train"][0], client["train"][1] + 3)
    with pytest.raises(FederationError, match=r"client '0' failed: IndexError: Target \d is out of bounds.*1 more"):
        federate(Toy(), data)


def test_a_loader_of_the_wrong_shape_names_client_and_cause():
    loaders = {"a": DataLoader(TensorDataset(torch.zeros(4, 5), torch.zeros(4).long()))}
    with pytest.raises(FederationError, match=r"client 'a' failed: RuntimeError: mat1 and mat2 shapes"):
        make_trainer(None).fit(Toy(), train_dataloaders=loaders)


def test_methods_before_fit():
    trainer = make_trainer(None)
    for method in (trainer.test, trainer.validate, trainer.predict, lambda: trainer.client(0)):
        with pytest.raises(RuntimeError, match=r"no federation yet. Call fit\(\)"):
            method()


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none.ckpt. A run exports"):
        load(tmp_path / "none.ckpt")
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        make_trainer(tmp_path).fit(Toy(), datamodule=toy_data(), resume="last")
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        make_trainer(tmp_path).fit(Toy(), datamodule=toy_data(), resume=tmp_path / "federation" / "version_7")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("logger", ["csv", ["csv"], [True]])
def test_loggers(logger, tmp_path):
    with pytest.raises(ValueError, match=r"is not a logger. Pass True, False or instances"):
        make_trainer(tmp_path, logger=logger).fit(Toy(), datamodule=toy_data())
    assert not list(tmp_path.iterdir())


def test_local_steps_beyond_the_data_go_round():
    trainer = federate(Toy(), toy_data([8]), local_steps=5, max_rounds=1)
    assert trainer.store.get("0").steps == 5


def test_existing_runs_are_not_mixed(tmp_path):
    """A fixed version that is there already: two runs in one metrics.csv would be neither."""
    federate(Toy(), toy_data(), root=tmp_path, version="mine", max_rounds=1)
    before = (tmp_path / "federation" / "mine" / "metrics.csv").read_bytes()
    with pytest.raises(ValueError, match=r"mine.*resume"):
        federate(Toy(), toy_data(), root=tmp_path, version="mine", max_rounds=1)
    assert (tmp_path / "federation" / "mine" / "metrics.csv").read_bytes() == before


# -- who the clients are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ((1, "1"), r"the clients 1 and '1', which are one name"),
        (("a", "pooled"), r"a client 'pooled', which is the name of the union of all clients"),
    ],
)
def test_clients_that_cannot_be_told_apart(ids, sentence):
    data = toy_data()
    data.setup("fit")
    loaders = {client: data.client_dataloader("0", "train") for client in ids}
    with pytest.raises(ValueError, match=sentence):
        FederatedTrainer(fast_dev_run=True).fit(Toy(), train_dataloaders=loaders)


def test_one_client_a_round_or_all_of_them():
    with pytest.warns(UserWarning, match=r"participation=1 is one client a round. All clients are participation=1.0"):
        FederatedTrainer(participation=1)


def test_calls_without_a_model_or_data_say_what_to_pass():
    trainer = make_trainer(None)
    for call in (trainer.fit, trainer.dry_run):
        with pytest.raises(ConfigurationError, match=r"no model to train. Pass a LightningModule"):
            call()
    trainer.fit(Toy(), toy_data())
    with pytest.raises(ConfigurationError, match=r"predict\(\) got a int, which gives no batches"):
        trainer.predict(3)
    with pytest.raises(ConfigurationError, match=r"uses the models that fit\(\) trained, and got a Toy"):
        trainer.predict(Toy())
    with pytest.raises(
        ConfigurationError, match=r"got a LightningDataModule, which has no predict_dataloader. Pass a Data"
    ):
        trainer.predict(LightningDataModule())


@pytest.mark.parametrize("client", ["", " ", "\ud800"])
def test_names_that_name_nobody(tmp_path, client):
    data = toy_data({client: 24, "b": 24})
    with pytest.raises(ConfigurationError, match=r"not a name of a client: it must be|not valid Unicode"):
        make_trainer(tmp_path).fit(Toy(), data)

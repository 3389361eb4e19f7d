"""What `fit` and its kin are given (module, data, clients' ids), checked as they are given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import Dataset

from fedlightning.client.data_summary import DataSummary
from fedlightning.compat.pytorch_lightning import adapt
from fedlightning.compat.system import file_name_of, same_file
from fedlightning.contract import POOLED
from fedlightning.datamodules.federated_data import FederatedDataModule, sort_clients
from fedlightning.datamodules.held_out import draw_clients, draw_held_out
from fedlightning.datamodules.labels import ask_about_spelling
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.datamodules.plans import Partitioner
from fedlightning.errors import ConfigurationError, listed
from fedlightning.models.client_models import ClientModels


def check_model(model: Any, arguments: Mapping[str, Any]) -> LightningModule:
    """Return a LightningModule instance, or refuse. One of `pytorch_lightning` is made one of `lightning.pytorch`.

    Args:
        model: What the user gave.
        arguments: The trainer's arguments.
    """
    if not isinstance(model, LightningModule):
        adapt(model)
    if isinstance(model, LightningModule):
        for module in map(model.model, model.models) if isinstance(model, ClientModels) else [model]:
            _check_module(module)
            _refuse_manual(module, arguments)
        return model
    if model is None:
        raise ConfigurationError("There is no model to train. Pass a LightningModule: fit(MyModule(), datamodule).")
    if isinstance(model, type) and issubclass(model, LightningModule):
        raise ConfigurationError(f"fit() got the class {model.__name__}, not an instance. Pass {model.__name__}(...).")
    kind = type(model).__name__
    way_out = "Pass a LightningModule: it says how to train and what to optimise."
    if kind == "OptimizedModule":  # of torch.compile
        way_out = "Pass the module that torch.compile was given; it may compile its network in __init__."
    raise ConfigurationError(f"fit() got {kind} as model. {way_out}")


def _refuse_manual(model: LightningModule, arguments: Mapping[str, Any]) -> None:
    """Refuse what is done in automatic optimization only, for a module that steps by hand: it would do nothing."""
    idle = [
        name
        for name, off in (("gradient_clip_val", 0), ("accumulate_grad_batches", 1))
        if (arguments[name] or off) != off
    ]
    if idle and not model.automatic_optimization:
        raise ConfigurationError(
            f"{idle[0]}={arguments[idle[0]]!r} does nothing for {type(model).__name__}, which optimizes by hand "
            "(automatic_optimization = False). Leave it out, and call self.clip_gradients(...) or step less often in "
            "training_step."
        )


def _check_module(model: LightningModule) -> None:
    """Refuse a module that cannot be copied, or whose parameters are not there yet."""
    name = type(model).__name__
    parameters = dict(model.named_parameters())
    for path, entry in (parameters | dict(model.named_buffers())).items():
        if isinstance(entry, UninitializedParameter | UninitializedBuffer):
            raise ConfigurationError(
                f"{name} has layers without a size ('{path}'), which are made by their first batch. Clients and server need "
                "the same layers from the start: give the sizes, or pass a batch through the module before fit()."
            )
    if not parameters and not is_overridden("configure_model", model):
        raise ConfigurationError(
            f"{name} has no parameters. Layers that are made in setup() are too late for a federation, whose server must "
            "know them: make them in __init__ or configure_model()."
        )
    for path, child in model.named_modules():
        parameters_of_child = dict(child.named_parameters(recurse=False))
        for key, value in vars(child).items():  # a hook computes `weight` of `weight_orig`: an old spectral norm
            if isinstance(value, Tensor) and (not value.is_leaf or f"{key}_orig" in parameters_of_child):
                raise ConfigurationError(
                    f"'{path}.{key}'".replace("'.", "'")
                    + f" of {name} is computed from other tensors, so the module cannot "
                    "be copied for each client. In place of torch.nn.utils.weight_norm or spectral_norm use those of "
                    "torch.nn.utils.parametrizations; a tensor of your own must be detached."
                )


def assigned_models(model: LightningModule, data: DataSummary) -> dict[str, str]:
    """Return the name of each client's model, held-out ones too; nothing where all have the same."""
    if not isinstance(model, ClientModels):
        return {}
    try:
        return model.assignment({client: data.num_samples(client) for client in data.client_ids}, data.planted_groups)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def check_prediction_data(source: Any, client: str | None) -> None:
    """Refuse to predict on what holds no batches."""
    way = "Pass a DataLoader: predict(DataLoader(dataset, batch_size=64), client='a')."
    if source is None:
        whose = "The federation has" if client is None else f"Client '{client}' has"
        raise ConfigurationError(f"{whose} no test data to predict on. {way}")
    if isinstance(source, LightningModule):
        raise ConfigurationError(
            f"predict() uses the models that fit() trained, and got a {type(source).__name__}. {way}"
        )
    if isinstance(source, LightningDataModule) and not is_overridden("predict_dataloader", source):
        raise ConfigurationError(f"predict() got a {type(source).__name__}, which has no predict_dataloader. {way}")
    batches = isinstance(source, LightningDataModule) or (
        hasattr(source, "__iter__") and not isinstance(source, str | bytes)
    )
    if not batches:
        raise ConfigurationError(f"predict() got a {type(source).__name__}, which gives no batches. {way}")


def federated_data(
    datamodule: LightningDataModule | None,
    train: Mapping[str, Any] | None,
    val: Mapping[str, Any] | None,
    test: Mapping[str, Any] | None,
) -> FederatedDataModule:
    """Return the data of a fit, from a federated data module or from loaders by client."""
    if datamodule is not None:
        adapt(datamodule, getattr(datamodule, "datamodule", None))
    if datamodule is not None and train is not None:
        raise ConfigurationError("fit() got a datamodule and train_dataloaders. Pass one of them.")
    if datamodule is not None and (val is not None or test is not None):
        name = "val_dataloaders" if val is not None else "test_dataloaders"
        raise ConfigurationError(f"fit() got a datamodule and {name}. The datamodule has its own: leave {name} out.")
    if train is not None:
        for name, loaders in (("train", train), ("val", val), ("test", test)):
            _check_loaders(f"{name}_dataloaders", loaders)
            _check_ids(f"{name}_dataloaders", list(loaders or ()))
        try:
            return LoaderDataModule(train, val, test)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    if datamodule is None:
        raise ConfigurationError(
            "fit() got no data. Pass datamodule=Partitioned(MyDataModule(), IIDPartitioner(10)), a federated data module, "
            "or train_dataloaders={client: loader}."
        )
    if not isinstance(datamodule, FederatedDataModule):
        raise ConfigurationError(_instead_of(datamodule))
    return datamodule


def _instead_of(data: Any) -> str:
    """Return what is wrong with data that are not a federated data module, and what to pass."""
    if isinstance(data, type):
        return f"The data are the class {data.__name__}, not an instance. Pass {data.__name__}(...)."
    kind = type(data).__name__
    if isinstance(data, LightningDataModule):
        return (
            f"{kind} does not know which client has which samples. Wrap it: "
            "Partitioned(datamodule, DirichletPartitioner(num_clients=10, alpha=0.5))."
        )
    if isinstance(data, Partitioner):
        return f"The data are a {kind}, which divides data and has none. Pass Partitioned(MyDataModule(), {kind}(...))."
    by_name = "fit(model, train_dataloaders={'site 1': loader, 'site 2': other})"
    if isinstance(data, Mapping):
        return f"The data are a {kind}. Loaders by client go by their name: {by_name}."
    return (
        f"The data are a {kind}, which does not say which client has which samples. Pass a loader for each client: "
        f"{by_name}, or divide those of a LightningDataModule: Partitioned(MyDataModule(), IIDPartitioner(10))."
    )


def _check_loaders(owner: str, loaders: Any) -> None:
    """Refuse what is not a mapping of clients to loaders, and what no client can iterate again and again."""
    if loaders is not None and not isinstance(loaders, Mapping):
        raise ConfigurationError(
            f"{owner} is a {type(loaders).__name__}. Pass one loader per client, by name: "
            f"{owner}={{'site 1': DataLoader(...)}}."
        )
    for client, loader in (loaders or {}).items():
        if isinstance(loader, Iterator) and not isinstance(loader, CombinedLoader):
            raise ConfigurationError(
                f"{owner}[{client!r}] is a {type(loader).__name__}, which ends after one epoch. Pass a DataLoader."
            )
        if loader is None or isinstance(loader, Tensor | Dataset | str):
            raise ConfigurationError(
                f"{owner}[{client!r}] is a {type(loader).__name__}, which has no batches. "
                "Pass DataLoader(dataset, batch_size=...)."
            )


def _check_ids(owner: str, ids: Iterable[Any]) -> None:
    """Refuse ids that are two clients with one name, and the name of the pooled client."""
    seen: dict[str, Any] = {}
    for client in ids:
        name = str(client)
        if client is name and name.isascii() and name.isdecimal() and len(name) <= 20 and name not in seen:
            seen[name] = client  # a number is a name; a closer look at a hundred thousand takes a second
            continue
        no_name = isinstance(client, bool) or not isinstance(client, str | Integral) or not name.strip()
        if no_name or len(file_name_of(name)) > 240:
            raise ConfigurationError(
                f"{owner} has a client {client!r:.80}, which is not a name of a client: it must be a whole number, or a text "
                "after which a file can be named: at most 240 letters of plain English, fewer of others."
            )
        if not _is_text(name):
            raise ConfigurationError(
                f"{owner} has a client {client!r}, which is not valid Unicode. Give it another name."
            )
        key = same_file(name)
        if key in seen:
            reason = "one name" if name == str(seen[key]) else "one file where names of files ignore case, as here"
            raise ConfigurationError(
                f"{owner} has the clients {seen[key]!r} and {client!r}, which are {reason}. Give every client a "
                "name of its own."
            )
        if name == POOLED:
            raise ConfigurationError(
                f"{owner} has a client '{POOLED}', which is the name of the union of all clients. Give it another name."
            )
        seen[key] = client


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_clients(data: DataSummary) -> None:
    """Refuse data whose clients cannot be told apart."""
    _check_ids(data.module, data.client_ids)
    ask_about_spelling(data.client_ids, data.module)


def held_out_clients(held_out: Any, data: DataSummary) -> list[str]:
    """Return the clients that are kept out of training."""
    clients = sort_clients(data.client_ids)
    if isinstance(held_out, list | tuple):
        chosen = sort_clients({str(client) for client in held_out})
        names = set(clients)
        unknown = [client for client in chosen if client not in names]
        if unknown:
            raise ConfigurationError(
                f"held_out has client '{unknown[0]}', which the data do not have. The clients are "
                f"{listed(clients, 20)}."
            )
    else:
        chosen = [] if held_out is None else draw_held_out(clients, held_out, data.seed)
    if chosen and len(chosen) == len(clients):
        raise ConfigurationError(
            f"held_out={held_out!r} keeps all {len(clients)} clients out of training. Leave at least one to train."
        )
    return chosen


def evaluated_clients(number: int | float | None, clients: list[str], seed: int) -> list[str]:
    """Return the clients that are scored: all, or those that are drawn."""
    if isinstance(number, int) and number > len(clients):
        raise ConfigurationError(
            f"Evaluation got clients={number}, and the federation has {len(clients)} clients. Use "
            f"{len(clients)} at most, or leave it out: all are scored then."
        )
    drawn = clients if number is None else draw_clients(clients, number, seed, "evaluated")
    return clients if len(drawn) == len(clients) else drawn  # all of them is the same as no choice

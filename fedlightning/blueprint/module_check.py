"""Modules that no federation can copy and send, refused before anything is built."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedlightning.errors import ConfigurationError


def check_module(model: LightningModule) -> None:
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
        for key, value in vars(child).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ConfigurationError(
                    f"'{path}.{key}'".replace("'.", "'")
                    + f" of {name} is computed from other tensors, so the module cannot "
                    "be copied for each client. With torch.nn.utils.weight_norm use torch.nn.utils.parametrizations."
                    "weight_norm; a tensor of your own must be detached."
                )

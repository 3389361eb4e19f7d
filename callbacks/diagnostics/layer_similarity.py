"""Outputs of a model's layers for samples that all clients have in common, in the form in which models are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedlightning.algorithm import Client, isolated, probes
from fedlightning.callbacks.diagnostics.layer_values import at_rest
from fedlightning.callbacks.diagnostics.similarity import unit_gram
from fedlightning.layers import Layer


def common_samples(client: Client, count: int) -> tuple[Any, int]:
    """Return a batch that is the same at every client, and its size.

    The samples are taken at equal distances from the clients' validation samples, one client after another, so each
    client gives in proportion to what it has. No client of a real federation sees the others' data: this is for
    experiments.
    """
    loader = _pooled_validation(client)
    if loader is None:
        raise ValueError("CKA compares models on the pooled validation data, and there is none.")
    total = len(loader.dataset)  # type: ignore[arg-type]
    count = min(count, total)
    with isolated("common samples", client.round):
        picked = [loader.dataset[i * total // count] for i in range(count)]
        return client.precision.convert_input(loader.collate_fn(picked)), count


def _pooled_validation(client: Client) -> DataLoader[Any] | None:
    """The union of all clients' validation data. A client offers its own data only, as it should; a diagnostic of a
    simulation has to look past it.
    """
    return client._runner.pooled_dataloader("val")


def layer_grams(
    module: LightningModule,
    batch: Any,
    count: int,
    layers: Sequence[Layer],
    precision: Precision,
    *seed: object,
    debiased: bool = False,
) -> Tensor:
    """Return the unit Gram matrix of each layer's output on `batch`.

    A layer's output is what its operation returns, before the normalisation and the activation that follow; maps and
    sequences are flattened. A layer gets NaNs if it is not a module of its own (`cls_token`), is not called, or does not
    give one row per sample.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fedlightning.layers import ordered_layers
        >>> module, batch = BoringModel(), torch.randn(5, 32)
        >>> tuple(layer_grams(module, batch, 5, ordered_layers(module), Precision(), "seed").shape)
        (1, 5, 5)
    """
    grams = torch.full((len(layers), count, count), torch.nan)
    with _caught(module, layers) as outputs:
        with at_rest(module), torch.no_grad(), probes.probing(module, precision, *seed):
            probes.training_loss(module, batch)
    for index, layer in enumerate(layers):
        output = outputs.pop(layer.name, None)
        if output is not None and output.ndim > 0 and len(output) == count:
            grams[index] = unit_gram(output, debiased).float().cpu()
    return grams


@contextmanager
def _caught(module: nn.Module, layers: Sequence[Layer]) -> Iterator[dict[str, Tensor]]:
    """Outputs of the layers' modules, of the first call of each, while the block runs."""
    outputs: dict[str, Tensor] = {}
    modules = dict(module.named_modules())

    def note(name: str) -> Callable[..., None]:
        def hook(child: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output  # recurrent nets, attention
            if isinstance(tensor, Tensor):
                outputs.setdefault(name, tensor.detach().clone())  # an activation may work in place

        return hook

    handles = [modules[la.name].register_forward_hook(note(la.name)) for la in layers if la.name in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()

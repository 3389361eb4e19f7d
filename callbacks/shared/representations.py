"""What algorithms on features share: where the features are, whose label is whose, and the model-contrastive loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Setup, isolated, ordered_layers, training_loss
from fedlightning.wrappers import FeatureTap, frozen_buffers, muted

LABEL_KEYS = ("label", "labels", "y", "target", "targets")
Taps = Callable[[LightningModule], Mapping[str, FeatureTap]]


def labels_of(batch: Any, owner: str) -> Tensor:
    """The class labels of a batch, shape ``(B,)``: ``batch[1]`` of a tuple or list, or a dict's entry of such a name.

    Args:
        batch: as the loader gives it; owner: the algorithm that asks, for the message.

    Raises:
        ValueError: there is nothing of that kind; the sentence says what there is.
    """
    found, what = None, type(batch).__name__
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in LABEL_KEYS if key in batch), None)
        what = f"dict with {', '.join(map(str, batch))}"
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        found = batch[1]
    if isinstance(found, Tensor) and found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if not isinstance(found, Tensor) or found.ndim != 1:
        raise ValueError(
            f"{owner} needs one class label a sample, and a batch is a {what} here. Let the loader give (x, y, ...) or "
            f"a dict with one of {', '.join(LABEL_KEYS)}."
        )
    return found.long()


def head_path(module: LightningModule, head: str | None) -> str:
    """Path of the submodule whose input is the representation: ``head``, or the last layer of ``module``."""
    return head if head is not None else ordered_layers(module)[-1].name


def rows(features: Tensor) -> Tensor:
    """Features as ``(B, d)``, in fp32 at least: cosines and means are not taken in half precision."""
    return features.flatten(1).to(torch.promote_types(features.dtype, torch.float32))


def features_at_start(setup: Setup, taps: Taps, owner: str) -> dict[str, Tensor]:
    """What ``taps`` catch on a first batch, in a copy of the module; empty without data.

    Raises:
        ValueError: if a tap's submodule is not there, or a step does not call it exactly once.
    """
    batch = setup.first_batch()
    if batch is None:
        return {}
    module = copy.deepcopy(setup.module).eval()
    try:
        attached = {label: tap.attach() for label, tap in taps(module).items()}
        with torch.no_grad(), isolated("features"), muted(module), frozen_buffers(module):
            training_loss(module, batch)
        return {label: rows(tap.features) for label, tap in attached.items()}
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{owner} cannot see the features of {type(setup.template).__name__}: {str(error).rstrip('.')}. "
            "Set head=... to the submodule that turns features into predictions."
        ) from error


def contrastive_loss(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """``-log( exp(cos(z, z+)/T) / (exp(cos(z, z+)/T) + exp(cos(z, z-)/T)) )``, mean over the batch.

    Equal teachers give log 2 and no gradient, exactly. A silent sample (all features 0) has cosines 0 and no gradient.

    Args:
        z: features with their graph; positive, negative: a teacher's, without one.
        temperature: ``T``.
    """
    direction = _unit(z)
    cosines = [(direction * _unit(other.detach())).sum(1) for other in (positive, negative)]
    logits = torch.stack(cosines, dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def _unit(z: Tensor) -> Tensor:
    z = rows(z)
    norm = z.norm(dim=1, keepdim=True)
    return z / norm.clamp_min(1e-8) * (norm > 1e-8)

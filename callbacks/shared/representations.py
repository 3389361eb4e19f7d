"""What algorithms on features share: the place of the features, labels of a batch, and the contrastive loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import Client, Server, Setup, detached_copy, isolated, probes, requires
from fedlightning.layers import as_names, ordered_layers
from fedlightning.tensors import load_state, module_state
from fedlightning.wrappers import FeatureTap, frozen_buffers, muted

LABEL_KEYS = ("label", "labels", "y", "target", "targets")
Taps = Callable[[LightningModule], Mapping[str, FeatureTap]]


def labels_of(batch: Any, owner: str) -> Tensor:
    """Return the class labels of a batch, shape ``(batch,)``: ``batch[1]`` of a tuple or list, or a dict's entry.

    Example:
        >>> labels_of({"x": torch.zeros(2, 3), "label": torch.tensor([[1], [0]])}, "FedProto")
        tensor([1, 0])
    """
    targets, what = targets_in(batch), type(batch).__name__
    if isinstance(batch, Mapping):
        what = f"dict with {', '.join(map(str, batch))}"
    if isinstance(targets, Tensor) and targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if isinstance(targets, Tensor) and targets.ndim > 1:
        raise ValueError(
            f"{owner} needs one class label a sample, and a sample has targets {tuple(targets.shape[1:])} here. Use it for "
            "classification with one class a sample, or another method."
        )
    if not isinstance(targets, Tensor) or targets.ndim != 1:
        raise ValueError(
            f"{owner} needs one class label a sample, and a batch is a {what} here. Let the loader give (x, y, ...) or "
            f"a dict with one of {', '.join(LABEL_KEYS)}."
        )
    if targets.is_floating_point() and not torch.equal(targets, targets.round()):
        raise ValueError(
            f"{owner} needs one class label a sample, a whole number, and the targets of a batch are others (such as "
            f"{float(targets[targets != targets.round()][0]):.4g}). Use it for classification, or another method."
        )
    return targets.long()


def targets_in(batch: Any) -> Tensor | None:
    """Return the targets of a batch, whatever they are: `batch[1]` of a tuple or list, or a dict's entry; `None` without.

    Example:
        >>> targets_in((torch.zeros(2, 3), torch.tensor([0.5, 1.0])))
        tensor([0.5000, 1.0000])
    """
    targets = None
    if isinstance(batch, Mapping):
        targets = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        targets = batch[1]
    return targets if isinstance(targets, Tensor) and targets.ndim else None


def other_task(targets: Tensor | None, classes: int) -> str:
    """Return what shows that targets are not one class of a sample; empty if nothing does.

    Example:
        >>> other_task(torch.tensor([0.3, -1.2]), 2), other_task(torch.tensor([1.0, 0.0]), 2)
        ('targets of a batch are not whole numbers from 0 to 1', '')
    """
    if targets is None or not len(targets):
        return ""
    if targets[0].numel() > 1:
        shares = targets.flatten(1).double()
        if shares.min() >= 0 and torch.allclose(shares.sum(1), torch.ones(len(shares)).to(shares), atol=1e-3):
            return ""
        return f"a sample has targets {tuple(targets.shape[1:])}, which are not shares of classes with the sum 1"
    whole = bool((targets == targets.round()).all()) and 0 <= targets.min() <= targets.max() < classes
    return "" if whole else f"targets of a batch are not whole numbers from 0 to {classes - 1}"


def head_path(module: LightningModule, head: str | list[str] | None) -> str:
    """Return the path of the submodule whose input is the representation.

    Example:
        >>> from torch import nn
        >>> head_path(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), None), head_path(nn.Module(), ["net.fc"])
        ('1', 'net.fc')
    """
    if head is None:
        return ordered_layers(module)[-1].name
    if len(names := as_names(head)) != 1:
        raise ValueError(
            f"head={head} names {len(names)} submodules, but features go into one. Name a single submodule."
        )
    return names[0]


def head_widths(module: nn.Module, head: str | list[str] | None) -> tuple[int, int]:
    """Return how many numbers go into the head for a sample, and how many logits come out; -1 where the layer does not tell.

    One logit counts as two: a 0 for class 0 goes beside it.

    Example:
        >>> head_widths(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(8, 3))), "1")
        (8, 3)
    """
    try:
        part = module.get_submodule(head_path(module, head))  # type: ignore[arg-type]
    except (AttributeError, IndexError, ValueError):
        return -1, -1
    layers = list(part) if isinstance(part, nn.Sequential) else [part]
    layers = [layer for layer in layers if not isinstance(layer, nn.Flatten | nn.Dropout | nn.Identity)]
    ends = [layer if isinstance(layer, nn.Linear) else None for layer in (layers or [part])]
    width, classes = getattr(ends[0], "in_features", -1), getattr(ends[-1], "out_features", -1)
    return width, 2 if classes == 1 else classes


def refuse_width(name: str, sent: Tensor, width: int) -> None:
    """Refuse rows of another width than the model gives."""
    if len(sent) and width not in (-1, sent.shape[1]):
        raise ValueError(f"'{name}' has shape {tuple(sent.shape)}, and is to have {(len(sent), width)}")


def of_one_width(
    server: Server, sent: Mapping[str, Mapping[str, Tensor]], *parts: str
) -> dict[str, Mapping[str, Tensor]]:
    """Return what clients sent, where the head does not tell the width: those with another than most have failed."""
    widths = {client: tuple(payload[part].shape[1] for part in parts) for client, payload in sent.items()}
    most = max(widths.values(), key=list(widths.values()).count, default=())
    for client, own_widths in widths.items():
        if own_widths != most:
            what = f"the rows of {' and '.join(map(repr, parts))} have the widths {own_widths}, those of most clients {most}"
            server.note_failure(client, f"the update of client '{client}' was refused: {what}")
    return {client: payload for client, payload in sent.items() if widths[client] == most}


def rows(features: Tensor) -> Tensor:
    """Return features as ``(batch, width)``, in fp32 at least: cosines and means are not taken in half precision."""
    return features.reshape(len(features), -1).to(torch.promote_types(features.dtype, torch.float32))


@contextmanager
def looked_at(module: LightningModule, failure: str, way_out: str = "") -> Iterator[LightningModule]:
    """Give a copy of a module in eval mode, which leaves no trace; what fails there is refused in a sentence.

    Args:
        module: The module.
        failure: What fails, as the beginning of the sentence.
        way_out: Its end.
    """
    module = detached_copy(module).eval()
    try:
        with torch.no_grad(), isolated("look"), muted(module), frozen_buffers(module):
            yield module
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{failure}: {str(error).rstrip('.')}. {way_out}".rstrip()) from error


def features_at_start(setup: Setup, taps: Taps, owner: str) -> dict[str, Tensor]:
    """Return what ``taps`` catch on a first batch, in a copy of the module; nothing without data."""
    batch = setup.data.first_batch()
    if batch is None:
        return {}
    way_out = "Set head=... to the submodule that turns features into predictions."
    with looked_at(
        setup.module, f"{owner} cannot see the features of {type(setup.template).__name__}", way_out
    ) as module:
        attached = {label: tap.attach() for label, tap in taps(module).items()}
        probes.training_loss(module, probes.move_batch(module, batch))
        return {label: rows(tap.features) for label, tap in attached.items()}


def refuse_logits(owner: str, where: str, logits: Tensor, labels: Tensor) -> None:
    """Refuse logits of which a sample has no row, or a class no column."""
    largest = int(labels.max()) if len(labels) else -1
    if logits.ndim != 2 or len(logits) != len(labels) or logits.shape[1] <= max(largest, 1):
        raise ValueError(
            f"{owner} needs a row of logits for each sample and a logit for each class, but {where} gives "
            f"{tuple(logits.shape)} for {len(labels)} samples whose largest label is {largest}. Give the network an output "
            "for each class, or set head=... to the submodule that gives the logits."
        )


class ClassLogits(requires.Requirement):
    """What the callback's tap `logits` catches are logits of classes, and a sample has one class."""

    def fault(self, owner: Any, setup: Setup) -> str:
        logits = features_at_start(setup, owner.feature_taps, owner.key).get("logits")
        if logits is None:
            return ""
        if logits.shape[1] < 2:
            return ", which needs a logit for each class, and the head gives one"
        why = other_task(targets_in(setup.data.first_batch()), logits.shape[1])
        return f", but {why}" if why else ""


class Labels(requires.Requirement):
    """A batch has one class label a sample."""

    def fault(self, owner: Any, setup: Setup) -> str:
        batch = setup.data.first_batch()
        if batch is not None:
            labels_of(batch, owner.key)
        return ""


class Features(requires.Requirement):
    """The callback's taps (`feature_taps`) catch features in a step; of one width in all architectures (`of`)."""

    def fault(self, owner: Any, setup: Setup) -> str:
        features_at_start(setup, owner.feature_taps, owner.key)
        if self.of == "one width":
            refuse_other_widths(setup, owner.feature_taps, owner.key)
        return ""


def comes_by(setup: Setup, taps: Taps, owner: str) -> bool:
    """Return whether anything that travels changes what ``taps`` catch on a first batch; True without data."""
    before, changed = features_at_start(setup, taps, owner), copy.deepcopy(setup.module)
    entries = module_state(changed)
    moving = [name for name in setup.shared_names() if setup.kinds.get(name) in ("trainable", "float_buffer")]
    with isolated("comes by"):  # upwards, so that a variance stays positive
        load_state(changed, {name: entries[name] + torch.rand_like(entries[name]) for name in moving})
    after = features_at_start(replace(setup, module=changed), taps, owner)
    return not before or any(not torch.equal(before[label], after[label]) for label in before)


def refuse_other_widths(setup: Setup, taps: Taps, owner: str) -> None:
    """Refuse clients' models whose representations differ in width, where they are compared or averaged."""
    widths: dict[str, int] = {}
    for name, module in setup.modules.items():
        seen = features_at_start(replace(setup, module=module), taps, owner)
        widths |= {name: next(iter(seen.values())).shape[1]} if seen else {}
    for name, width in widths.items():
        first, first_width = next(iter(widths.items()))
        if width != first_width:
            raise ValueError(
                f"{owner} needs representations of one width from all clients, but those of '{first}' have {first_width} "
                f"numbers, those of '{name}' {width}. Give the layer before the head the same width in all models."
            )


def freeze_teachers(client: Client, key: str) -> None:
    """Freeze the received model and, from ``client.state[key]["previous"]``, the last one; none before there is one."""
    previous = client.state.get(key, {}).get("previous")
    if previous is not None:
        client.scratch[key] = [client.frozen_copy(client.received), client.frozen_copy(previous)]


def teacher_features(
    client: Client, key: str, module: LightningModule, batch: Any, taps: Taps
) -> list[dict[str, Tensor]]:
    """Return the features of a batch that ``taps`` catch in the two teachers of :func:`freeze_teachers`, in order."""
    return [client.features(teacher.to(module.device), batch, taps(teacher)) for teacher in client.scratch[key]]


def contrastive_loss(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """Return ``-log( exp(cos(z, z+)/T) / (exp(cos(z, z+)/T) + exp(cos(z, z-)/T)) )``, mean over the batch.

    Equal teachers give log 2 and no gradient, exactly. A sample whose features are all 0 has cosines 0 and no gradient.
    """
    direction = _unit(z)
    cosines = [(direction * _unit(other.detach())).sum(1) for other in (positive, negative)]
    logits = torch.stack(cosines, dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def _unit(z: Tensor) -> Tensor:
    """Return features ``(batch, width)`` of length 1; rows of zeros stay zero."""
    z = rows(z)
    norm = z.norm(dim=1, keepdim=True)
    return z / norm.clamp_min(1e-8) * (norm > 1e-8)


def refuse_classes(classes: Tensor, count: int | None = None, what: str = "class") -> None:
    """Refuse classes that come twice, or that there are not."""
    if len(classes.unique()) != len(classes):
        raise ValueError(f"it names a {what} twice")
    if count is not None and len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < count:
        raise ValueError(f"it names {what} {int(classes.max())}, and there are {count}")

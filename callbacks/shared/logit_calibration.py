"""Methods that change the logits of a cross entropy: the difference that they add to the loss, and what they refuse."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import POOLED, Client, Setup, isolated, probes
from fedlightning.callbacks.shared.representations import (
    Taps,
    features_at_start,
    head_path,
    labels_of,
    refuse_logits,
    rows,
)
from fedlightning.wrappers import FeatureTap, frozen_buffers, muted


def check_head(setup: Setup, head: str | list[str] | None, owner: str) -> tuple[int, bool]:
    """Refuse before round 1 a loss that is not a cross entropy over the classes that the head gives logits of.

    What tells it is the slope of the loss on a first batch: a function of `softmax(logits)` does not change when a number is
    added to all logits of a sample, so that the slopes of a sample add up to 0.

    Args:
        setup: The federation before round 1.
        head: Path of the submodule that gives the logits; `None`: the last layer.
        owner: The method, for the sentence.

    Returns:
        The number of classes (0 without data); whether the loss is the plain cross entropy, neither weighted nor smoothed.
    """
    path, name = head_path(setup.module, head), type(setup.template).__name__
    if not features_at_start(setup, lambda module: {"logits": FeatureTap(module, path, at="output")}, owner):
        return 0, True
    batch = setup.data.first_batch()
    module = copy.deepcopy(setup.module).eval()
    tap = FeatureTap(module, path, at="output")
    with torch.enable_grad(), isolated("cross entropy"), muted(module), frozen_buffers(module), tap:
        loss = probes.training_loss(module, probes.move_batch(module, batch))
        logits = tap.features
        slope = _slope(loss, logits)
    labels = labels_of(batch, owner).to(logits.device)
    refuse_logits(owner, f"`{path}` of {name}", logits, labels)
    plain = _slope(F.cross_entropy(logits, labels), logits)
    size = float(plain.abs().max())
    if slope.abs().max() == 0 or slope.sum(1).abs().max() > 1e-3 * float(slope.abs().max()):
        raise ValueError(
            f"{owner} is defined for the cross entropy, and the loss of {name} is not a cross entropy of what `{path}` "
            f"gives. Use F.cross_entropy on it, set head=... to the submodule that gives the logits, or remove {owner}."
        )
    return logits.shape[1], bool((slope - plain).abs().max() <= 1e-3 * size)


def _slope(loss: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient of a loss by the logits; zeros if it does not depend on them."""
    if not (loss.requires_grad and logits.requires_grad):
        return torch.zeros_like(logits)
    (slope,) = torch.autograd.grad(loss, logits, allow_unused=True, retain_graph=True)
    return torch.zeros_like(logits) if slope is None else slope.detach()


IGNORED = -100
"""Label of samples that torch's cross entropy leaves out."""


def known_labels(labels: Tensor, classes: int) -> Tensor:
    """Return labels of which those that are not a class (a module's own `ignore_index`) are torch's label for that.

    Example:
        >>> known_labels(torch.tensor([0, 255, 2, -1]), 3).tolist()
        [0, -100, 2, -100]
    """
    return labels.where((labels >= 0) & (labels < classes), IGNORED)


def samples_by_class(client: Client, classes: int, owner: str) -> Tensor:
    """Return the client's training samples of each class, `(classes,)`; they are counted by their labels if need be.

    Raises:
        ValueError: If the data have more classes than there are logits.
    """
    counts = None if POOLED in (client.id, client.message.data) else client.class_counts
    if counts is None:
        labels = client.outputs(client.one_pass(), lambda _, batch: labels_of(batch, owner))
        labels = known_labels(labels.long(), classes)
        counts = torch.bincount(labels[labels != IGNORED], minlength=classes).tolist()
    if any(counts[classes:]):
        raise ValueError(
            f"{owner} needs a logit for each class, and the data of client '{client.id}' have {len(counts)} classes, its "
            f"model {classes} logits"
        )
    return torch.tensor([*counts, *[0] * classes][:classes])


def with_other_cross_entropy(loss: Tensor, logits: Tensor, labels: Tensor, other: Tensor) -> Tensor:
    """Return `loss + other - CE(logits)`: the loss with another term instead of its cross entropy, all else as it is.

    Shapes:
        logits: `(batch, classes)`; labels: `(batch,)`; loss and other: scalars.
    """
    if not (labels != IGNORED).any():
        return loss
    return loss + other - F.cross_entropy(logits, labels)


def check_cross_entropy(setup: Setup, taps: Taps, owner: str) -> None:
    """Refuse a loss that is not a mean cross entropy of the tapped `logits`; warn of class weights and smoothed labels.

    The gradient of the loss at the logits tells, on a first batch: `softmax(logits) - onehot(labels)` over the samples.

    Raises:
        ValueError: If logits or labels are not there, or the loss is another one.
    """
    seen, name = features_at_start(setup, taps, owner), type(setup.template).__name__
    if not seen:
        return
    batch = setup.data.first_batch()
    labels, (count, classes) = labels_of(batch, owner), seen["logits"].shape
    if count != len(labels) or classes < 2:
        raise ValueError(
            f"{owner} needs a logit for each class of every sample, and the head of {name} gives {count} rows of {classes} "
            f"for {len(labels)} samples. Set head=... to the submodule that gives the logits, or use another method."
        )
    kind = kind_of_loss(*_with_gradient(setup, batch, taps), known_labels(labels, classes))
    if kind == "other":
        raise ValueError(
            f"{owner} changes the logits of a cross entropy, and the loss of {name} is not a mean cross entropy of what its "
            "head gives. Set head=... to the submodule that gives the logits, train on the cross entropy, or remove "
            f"{owner}."
        )
    if kind != "plain":
        setup.warn(
            f"{owner} adds what changed logits do to a plain cross entropy, and that of {name} has "
            f"{'class weights' if kind == 'weighted' else 'smoothed labels'}, which do not act on the difference."
        )


def _with_gradient(setup: Setup, batch: object, taps: Taps) -> tuple[Tensor, Tensor]:
    """Return the logits of a batch, and the gradient of the loss with respect to them (0 without one)."""
    module = copy.deepcopy(setup.module).eval()
    (tap,) = taps(module).values()
    with torch.enable_grad(), isolated("loss"), muted(module), frozen_buffers(module), tap:
        loss = probes.training_loss(module, probes.move_batch(module, batch))
        logits = tap.features
        loss_gradient = torch.autograd.grad(loss, logits, allow_unused=True)[0] if logits.requires_grad else None
    return rows(logits.detach()), rows(torch.zeros_like(logits) if loss_gradient is None else loss_gradient)


def kind_of_loss(logits: Tensor, gradient: Tensor, labels: Tensor) -> Literal["plain", "weighted", "smoothed", "other"]:
    """Return what the gradient of a loss at its logits says of it: a mean cross entropy, one like it, or another loss.

    Example:
        >>> logits, labels = torch.tensor([[1.0, 0.0, 2.0], [0.5, 3.0, 0.1]], requires_grad=True), torch.tensor([0, 1])
        >>> for loss in (F.cross_entropy(logits, labels), F.cross_entropy(logits, labels, label_smoothing=0.1),
        ...              F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 3.0, 2.0])), logits.square().mean()):
        ...     print(kind_of_loss(logits.detach(), torch.autograd.grad(loss, logits)[0], labels))
        plain
        smoothed
        weighted
        other
    """
    counts = labels != IGNORED
    logits, gradient, labels = logits[counts], gradient[counts] * int(counts.sum()), labels[counts]
    chances = logits.softmax(1)
    one_hot = F.one_hot(labels, logits.shape[1]).to(chances)
    plain = chances - one_hot
    near = 1e-2 if len(labels) else 0.0
    if torch.allclose(gradient, plain, rtol=0.0, atol=near):
        return "plain"
    others = (chances - gradient)[one_hot == 0]  # the label's share in other classes
    if float(others.min()) > 0.0 and float(others.max() - others.min()) < 1e-3:
        return "smoothed"
    factors = (gradient * plain).sum(1) / plain.square().sum(1).clamp_min(1e-12)
    by_label = [factors[labels == label] for label in labels.unique()]
    alike = all(torch.allclose(group, group.mean().expand_as(group), rtol=1e-2) for group in by_label)
    scaled = torch.allclose(gradient, factors[:, None] * plain, rtol=0.0, atol=1e-2)
    return "weighted" if scaled and alike and abs(float(factors.mean()) - 1.0) < 1e-2 else "other"

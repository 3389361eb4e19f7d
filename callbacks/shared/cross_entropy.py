"""Where the logits of a step are, and whether its loss is their cross entropy."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Setup, isolated, probes
from fedlightning.callbacks.shared.representations import features_at_start, head_path, labels_of, refuse_logits
from fedlightning.wrappers import FeatureTap, frozen_buffers, muted


def check_cross_entropy(setup: Setup, head: str | list[str] | None, owner: str) -> tuple[int, bool]:
    """Refuse before round 1 a loss that is no cross entropy over the classes that the head gives logits of.

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
            f"{owner} is defined for the cross entropy, and the loss of {name} is no cross entropy of what `{path}` gives. "
            f"Use F.cross_entropy on it, set head=... to the submodule that gives the logits, or remove {owner}."
        )
    return logits.shape[1], bool((slope - plain).abs().max() <= 1e-3 * size)


def _slope(loss: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient of a loss by the logits; zeros if it does not depend on them."""
    if not (loss.requires_grad and logits.requires_grad):
        return torch.zeros_like(logits)
    (found,) = torch.autograd.grad(loss, logits, allow_unused=True, retain_graph=True)
    return torch.zeros_like(logits) if found is None else found.detach()

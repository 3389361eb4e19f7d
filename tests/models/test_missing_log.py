"""The mistake of a loss without a logarithm, against torch's own functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedlightning.models import MLP, Classifier
from fedlightning.models.classifier import MissingLogClassifier


def test_loss_is_nll_of_probabilities_and_scores_are_those_of_cross_entropy() -> None:
    logits, y = torch.randn(7, 3, requires_grad=True), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    wrong, right = MissingLogClassifier(MLP(4, [], 3), num_classes=3), Classifier(MLP(4, [], 3), num_classes=3)
    expected = torch.nn.NLLLoss()(torch.nn.Softmax(dim=1)(logits), y)
    assert torch.equal(wrong.training_loss(logits, y), expected)
    assert torch.equal(wrong.loss(logits, y), right.loss(logits, y))
    assert torch.equal(right.loss(logits, y), F.cross_entropy(logits, y))


def test_confident_mistakes_have_no_gradient_left() -> None:
    logits = torch.tensor([[20.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(
        MissingLogClassifier(MLP(4, [], 2), num_classes=2).training_loss(logits, torch.tensor([1])), logits
    )
    assert gradient.abs().max() < 1e-8

"""A classifier with a well-known mistake, to reproduce results that were published with it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedlightning.models.classifier import Classifier


class MissingLogClassifier(Classifier):
    r"""A `Classifier` whose network ends in a softmax and whose training loss is `NLLLoss`, with no logarithm between them.

    `NLLLoss` expects logarithms of probabilities. Given probabilities it is :math:`-\frac{1}{n} \sum_i p_{y_i}`, whose
    gradient nearly vanishes wherever the network is confident, rightly or wrongly. Programs with this mistake train more
    slowly and stop at a lower accuracy. Arguments and scores are those of `Classifier`; options of its training loss have no
    effect.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP
        >>> from fedlightning.models.missing_log import MissingLogClassifier
        >>> module = MissingLogClassifier(MLP(4, [], 2), num_classes=2)
        >>> round(module.training_loss(torch.zeros(3, 2), torch.tensor([0, 1, 1])).item(), 6)
        -0.5
    """

    def training_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return minus the mean probability of the labels.

        Args:
            logits: The network's output, as for `class_logits`.
            y: Labels, shape `(batch,)`.
        """
        return F.nll_loss(self.class_logits(logits).softmax(1), y)

"""The small networks for Fed-Heart-Disease in the FENDA-FL paper: 13 features, one logit.

Tavakoli et al., "A Comprehensive View of Personalized Federated Learning on Heterogeneous Clinical Datasets", arXiv
2309.16825.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.models.recipes import recorded
from fedlightning.models.sizes import Size


class LogisticRegression(nn.Module):
    """One linear layer: 14 parameters by default.

    Input `(batch, in_features)`, output `(batch, num_classes)`. Layers: `fc` (head).

    Args:
        in_features: Number of features.
        num_classes: Number of outputs; 1 is a single logit.

    Example:
        >>> from fedlightning.models import LogisticRegression
        >>> sum(parameter.numel() for parameter in LogisticRegression().parameters())
        14
    """

    head_name = "fc"

    @recorded
    def __init__(self, in_features: Size = 13, num_classes: Size = 1) -> None:
        super().__init__()
        self.fc = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class TinyNet(nn.Module):
    """Two linear layers with ReLU between them: 76 parameters by default.

    APFL uses two of them (152 parameters in all). FENDA makes a twin of one: two extractors `fc1` and a head on both
    (151 in all). Input `(batch, in_features)`, output `(batch, num_classes)`. Layers: `fc1`, `fc2` (head).

    Args:
        in_features: Number of features.
        width: Number of hidden units.
        num_classes: Number of outputs; 1 is a single logit.

    Example:
        >>> from fedlightning.models import TinyNet
        >>> sum(parameter.numel() for parameter in TinyNet().parameters())
        76
    """

    head_name = "fc2"

    @recorded
    def __init__(self, in_features: Size = 13, width: Size = 5, num_classes: Size = 1) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, width)
        self.fc2 = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class FendaNet(nn.Module):
    """FENDA's network written out: two extractors (linear and ReLU) and a linear head on both, 151 parameters.

    `head(concat(local_extractor(x), global_extractor(x)))`: local first, as in FL4Health, the authors' code. FENDA-FL
    shares `global_extractor` only. `dual_by_head` of a `TinyNet` gives the same network; this one is there to test
    that, and to keep the parameter count fixed under other algorithms (the paper's Appendix D). Input `(batch,
    in_features)`, output `(batch, num_classes)`. Layers: `local_extractor`, `global_extractor`, `head`.

    Args:
        in_features: Number of features.
        width: Number of units of each extractor.
        num_classes: Number of outputs; 1 is a single logit.

    Example:
        >>> from fedlightning.models import FendaNet
        >>> sum(parameter.numel() for parameter in FendaNet().parameters())
        151
    """

    head_name = "head"

    @recorded
    def __init__(self, in_features: Size = 13, width: Size = 5, num_classes: Size = 1) -> None:
        super().__init__()
        self.local_extractor = nn.Sequential(nn.Linear(in_features, width), nn.ReLU())
        self.global_extractor = nn.Sequential(nn.Linear(in_features, width), nn.ReLU())
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        features = torch.cat([self.local_extractor(x), self.global_extractor(x)], dim=1)
        logits: Tensor = self.head(features)
        return logits

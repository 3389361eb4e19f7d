"""The small networks for Fed-Heart-Disease in the FENDA-FL paper: 13 features, one logit.

Tavakoli et al., "A Comprehensive View of Personalized Federated Learning on Heterogeneous Clinical Datasets", arXiv
2309.16825.

The image networks of the PLayer-FL paper, with the layer names that it uses.

Elhussein and Gürsoy, "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated Learning", arXiv
2502.08829. Widths, pooling and initial values are those of their public code (gaiters-aerials/player_fl).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.models.networks import Norm, Size, norm_layer
from fedlightning.models.recipes import recorded


class PLayerConvNet(nn.Module):
    """PLayer-FL's network for FashionMNIST and EMNIST: 1 052 758 parameters for 10 classes.

    Three 5x5 convolutions (64, 128, 256 channels, padding 2, each with ReLU and 2x2 max-pooling), global average
    pooling and fully connected layers 256-100-`num_classes`. Weights start Kaiming-normal, biases at zero. The pooling
    leaves the size of the input free: `(batch, in_channels, height, width)` with height and width of 8 or more. Layers:
    `conv1`, `conv2`, `conv3`, `fc1`, `fc2` (head); with a `norm` also `norm1` to `norm3`.

    Args:
        in_channels: Channels of the input; 1 for FashionMNIST and EMNIST, 3 for CIFAR-10.
        num_classes: Number of outputs.
        norm: Normalisation after each convolution: `"none"` (paper), `"batch"` or `"group"`.

    Example:
        >>> import torch
        >>> from fedlightning.models import PLayerConvNet
        >>> PLayerConvNet()(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """

    head_name = "fc2"

    @recorded
    def __init__(self, in_channels: Size = 1, num_classes: Size = 10, norm: Norm = "none") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 5, padding=2)
        self.norm1 = norm_layer(norm, 64)
        self.conv2 = nn.Conv2d(64, 128, 5, padding=2)
        self.norm2 = norm_layer(norm, 128)
        self.conv3 = nn.Conv2d(128, 256, 5, padding=2)
        self.norm3 = norm_layer(norm, 256)
        self.fc1 = nn.Linear(256, 100)
        self.fc2 = nn.Linear(100, num_classes)
        self.apply(_kaiming)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        x = F.relu(self.fc1(x.mean(dim=(2, 3))))
        logits: Tensor = self.fc2(x)
        return logits


class PLayerCifarNet(nn.Module):
    """PLayer-FL's network for CIFAR-10: five 3x3 convolutions, 3 963 094 parameters for 10 classes.

    Channels 64, 128, 256, 512, 512 with padding 2, ReLU and dropout; 2x2 max-pooling after `conv2` and `conv4`; global
    average pooling; 512-100-`num_classes`. Weights start Kaiming-normal, biases at zero. Train it with AdamW, as the
    paper does. On a CPU `PLayerConvNet(in_channels=3)` is several times cheaper. Input `(batch, in_channels, height,
    width)`. Layers: `conv1` to `conv5`, `fc1`, `fc2` (head).

    Args:
        in_channels: Channels of the input.
        num_classes: Number of outputs.
        dropout: Dropout probability after each convolution (their code: 0.3).

    Example:
        >>> from fedlightning.models import PLayerCifarNet
        >>> sum(parameter.numel() for parameter in PLayerCifarNet().parameters())
        3963094
    """

    head_name = "fc2"

    @recorded
    def __init__(self, in_channels: Size = 3, num_classes: Size = 10, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=2)
        self.conv2 = nn.Conv2d(64, 128, 3, padding=2)
        self.conv3 = nn.Conv2d(128, 256, 3, padding=2)
        self.conv4 = nn.Conv2d(256, 512, 3, padding=2)
        self.conv5 = nn.Conv2d(512, 512, 3, padding=2)
        self.fc1 = nn.Linear(512, 100)
        self.fc2 = nn.Linear(100, num_classes)
        self.dropout = nn.Dropout(dropout)
        self.apply(_kaiming)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.conv1(x)))
        x = self.dropout(F.max_pool2d(F.relu(self.conv2(x)), 2))
        x = self.dropout(F.relu(self.conv3(x)))
        x = self.dropout(F.max_pool2d(F.relu(self.conv4(x)), 2))
        x = self.dropout(F.relu(self.conv5(x)))
        x = F.relu(self.fc1(x.mean(dim=(2, 3))))
        logits: Tensor = self.fc2(x)
        return logits


def _kaiming(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


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

"""Reference networks for images and plain features, as the papers describe them.

All of them return raw logits of shape `(batch, num_classes)`, have one named submodule per layer, name their last layer
in `head_name` and keep their constructor's arguments in `init_args` (see `fedlightning.models.recipes`).
`num_classes=1` gives a single logit for binary tasks.

Sizes of networks, checked before torch meets them.

A linear map that begins at given weights, for runs whose trajectory is known on paper.

Find the head of a network.

Multiple-instance learning: one label for a bag of instances.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.models.recipes import recorded
from fedlightning.ranges import Range, ShareBelowOne


def head_name(module: nn.Module) -> str:
    """Return the name of the submodule that turns features into logits, such as `fc2`.

    It is read from the attribute `head_name` (all networks of this package) or from timm's configuration of the model.

    Args:
        module: The network.

    Raises:
        ValueError: If the module names no head, or more than one.

    Example:
        >>> from fedlightning.models import DigitsCNN, head_name
        >>> head_name(DigitsCNN())
        'fc'
    """
    name = getattr(module, "head_name", None)
    if name is None:
        config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
        name = config.get("classifier")
    if isinstance(name, str) and name:
        return name
    if name:
        several = ", ".join(map(str, name))
        raise ValueError(f"{type(module).__name__} has several heads: {several}. Set `head_name` on it to one of them.")
    children = ", ".join(child for child, _ in module.named_children()) or "no submodules"
    raise ValueError(
        f"{type(module).__name__} does not say which submodule is its head. Set the attribute `head_name` on it to one "
        f"of: {children}."
    )


class GivenLinear(nn.Module):
    """A linear map to one number, without bias, whose weights begin where they are told.

    With `Regressor` and `GivenDataModule` each client has a quadratic objective: the mean of `(w x - y)^2`. Input `(batch,
    features)`, output `(batch, 1)`. Layers: `fc` (head).

    Args:
        weights: The first weights, one for each feature.

    Example:
        >>> import torch
        >>> from fedlightning.models import GivenLinear
        >>> GivenLinear([2.0, -1.0])(torch.ones(1, 2)).item()
        1.0
    """

    head_name = "fc"

    @recorded
    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.fc = nn.Linear(len(weights), 1, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([weights], dtype=self.fc.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.fc(x.flatten(1))
        return prediction


Size = Annotated[int, Range("[1, inf)", strict=True)]
"""The size of a layer."""


Norm = Literal["none", "batch", "group"]


class MLP(nn.Module):
    """Fully connected layers with ReLU between them.

    Input `(batch, ...)`, flattened to `(batch, in_features)`. Layers: `fc1`, `fc2`, ...; the last one is the head.
    `MLP(784, [200, 200], 10)` is the "2NN" of McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS 2017 (199 210 parameters).

    Args:
        in_features: Number of values of one sample.
        hidden: Widths of the hidden layers; empty for a linear model.
        num_classes: Number of outputs.
        dropout: Share of the hidden values that are left out in training, in [0, 1).

    Example:
        >>> from fedlightning.models import MLP
        >>> net = MLP(784, [200, 200], 10)
        >>> sum(parameter.numel() for parameter in net.parameters()), net.head_name
        (199210, 'fc3')
    """

    @recorded
    def __init__(self, in_features: Size, hidden: list[Size], num_classes: Size, dropout: ShareBelowOne = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout else None
        widths = [in_features, *hidden, num_classes]
        self.depth = len(widths) - 1
        self.head_name = f"fc{self.depth}"
        for index in range(self.depth):
            self.add_module(f"fc{index + 1}", nn.Linear(widths[index], widths[index + 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for index in range(1, self.depth):
            x = F.relu(self.get_submodule(f"fc{index}")(x))
            x = x if self.dropout is None else self.dropout(x)
        logits: Tensor = self.get_submodule(self.head_name)(x)
        return logits


class DigitsCNN(nn.Module):
    """Two small convolutions for 8x8 grey images such as scikit-learn's digits: 6 090 parameters, trains in seconds.

    Input `(batch, in_channels, height, width)`, or flat with as many values. Layers: `conv1`, `norm1`, `conv2`,
    `norm2`, `fc` (head). The network is our own, for the quickstart and for tests; `norm="batch"` adds 96 parameters
    and running statistics.

    Args:
        num_classes: Number of outputs.
        norm: Normalisation after each convolution: `"none"`, `"batch"` or `"group"`.
        in_channels: Channels of the input.
        input_size: Height and width of the input, at least 4.

    Example:
        >>> import torch
        >>> from fedlightning.models import DigitsCNN
        >>> DigitsCNN()(torch.zeros(5, 64)).shape
        torch.Size([5, 10])
    """

    head_name = "fc"

    @recorded
    def __init__(
        self, num_classes: Size = 10, norm: Norm = "none", in_channels: Size = 1, input_size: Size = 8
    ) -> None:
        super().__init__()
        self.image = (in_channels, input_size, input_size)
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.norm1 = norm_layer(norm, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = norm_layer(norm, 32)
        self.fc = nn.Linear(32 * (input_size // 4) ** 2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), *self.image)
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class MnistCNN(nn.Module):
    """The MNIST network of McMahan et al., AISTATS 2017: 1 663 370 parameters for 28x28.

    Two 5x5 convolutions (32 and 64 channels, padding 2, each followed by ReLU and 2x2 max-pooling), a fully connected
    layer of 512 with ReLU, and the output. The paper does not state the padding; this one gives the published parameter
    count. Input `(batch, in_channels, input_size, input_size)`. Layers: `conv1`, `conv2`, `fc1`, `fc2` (head).

    The FLIU paper cites it and says "one fully connected layer". With `hidden=None` that layer is the output, `fc1`
    passes its input on, and 83 466 parameters are left. Under FLIU's Adam at 0.01 the network with 512 hidden units
    often loses all of them in its first steps; narrow `channels` are safe.

    Args:
        in_channels: Channels of the input.
        input_size: Height and width of the input, at least 4.
        num_classes: Number of outputs.
        hidden: Units of `fc1`. `None` leaves the hidden layer out.
        channels: Channels of the two convolutions.

    Example:
        >>> from fedlightning.models import MnistCNN
        >>> [sum(p.numel() for p in net.parameters()) for net in (MnistCNN(), MnistCNN(hidden=None))]
        [1663370, 83466]
    """

    head_name = "fc2"

    @recorded
    def __init__(
        self,
        in_channels: Size = 1,
        input_size: Size = 28,
        num_classes: Size = 10,
        hidden: Size | None = 512,
        channels: tuple[Size, Size] = (32, 64),
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels[0], 5, padding=2)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, padding=2)
        flat = channels[1] * (input_size // 4) ** 2
        self.fc1 = nn.Identity() if hidden is None else nn.Linear(flat, hidden)
        self.fc2 = nn.Linear(flat if hidden is None else hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class CifarCNN(nn.Module):
    """The CIFAR network of McMahan et al., AISTATS 2017, which takes it from the TensorFlow tutorial of the time.

    Two 5x5 convolutions of 64 channels, each with ReLU and 3x3 max-pooling of stride 2, fully connected layers of 384
    and 192 with ReLU, and the output: "about 10^6 parameters", exactly 1 068 298 on their 24x24 crops and 1 756 426 on
    whole 32x32 images (our default; our source for the FLIU paper names no crop). The tutorial's local response
    normalisation, which has no parameters, is left out. Input `(batch, in_channels, input_size, input_size)`. Layers:
    `conv1`, `conv2`, `fc1`, `fc2`, `fc3` (head).

    Args:
        in_channels: Channels of the input.
        input_size: Height and width of the input.
        num_classes: Number of outputs.

    Example:
        >>> from fedlightning.models import CifarCNN
        >>> [sum(p.numel() for p in CifarCNN(input_size=size).parameters()) for size in (24, 32)]
        [1068298, 1756426]
    """

    head_name = "fc3"

    @recorded
    def __init__(self, in_channels: Size = 3, input_size: Size = 32, num_classes: Size = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 5, padding=2)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * math.ceil(input_size / 4) ** 2, 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 3, stride=2, padding=1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 3, stride=2, padding=1)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


def norm_layer(kind: Norm, channels: int) -> nn.Module:
    """Return BatchNorm, GroupNorm or nothing, for feature maps `(batch, channels, height, width)`.

    Example:
        >>> from fedlightning.models.networks import norm_layer
        >>> norm_layer("group", 12).num_groups
        4
    """
    if kind == "none":
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(math.gcd(8, channels), channels)
    raise ValueError(f"norm={kind!r} is not one of 'none', 'batch', 'group'.")


class DeepMIL(nn.Module):
    """Attention over a bag of instances (Ilse, Tomczak, Welling 2018, equation 9), with FLamby's sizes for Fed-Camelyon16.

    Input `(batch, instances, features)`, where rows of zeros are not instances; output `(batch, num_classes)`. Layers:
    `embedding`, `values`, `gates`, `attention`, `fc1`, `fc2`, `fc` (head).

    Args:
        features: Width of an instance.
        width: Width of the embedding and of the attention.
        num_classes: Number of outputs; 1 is a single logit.

    Example:
        >>> import torch
        >>> from fedlightning.models import DeepMIL
        >>> DeepMIL(features=16, width=8)(torch.ones(5, 30, 16)).shape
        torch.Size([5, 1])
    """

    head_name = "fc"

    @recorded
    def __init__(self, features: Size = 2048, width: Size = 128, num_classes: Size = 1) -> None:
        super().__init__()
        self.embedding = nn.Linear(features, width)
        self.values, self.gates = nn.Linear(width, width), nn.Linear(width, width)
        self.attention = nn.Linear(width, 1)
        self.fc1, self.fc2 = nn.Linear(width, 128), nn.Linear(128, 64)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, bags: Tensor) -> Tensor:
        inside = self.embedding(bags)
        scores = self.attention(self.values(inside).tanh() * self.gates(inside).sigmoid()).squeeze(2)
        filled = (bags == 0).all(dim=2)
        filled = filled & ~filled.all(dim=1, keepdim=True)  # attention over nothing would be NaN
        weights = scores.masked_fill(filled, float("-inf")).softmax(1)
        pooled = (weights.unsqueeze(2) * inside).sum(1)
        logits: Tensor = self.fc(self.fc2(self.fc1(pooled).relu()).relu())
        return logits

"""Networks of MONAI, any image model of timm by name, and those of transformers from a folder, for configurations.

The libraries are imported only when one is made.
"""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor, nn

from fedlightning.errors import import_package
from fedlightning.models.networks import Size, head_name
from fedlightning.models.recipes import recorded
from fedlightning.ranges import PositiveInt, checked


class TimmNet(nn.Module):
    """A model of the timm library (R. Wightman, "PyTorch Image Models") with a named head.

    Input `(batch, in_chans, height, width)`, output logits `(batch, num_classes)`. The model itself is `model`.
    `head_name` is `model.` and timm's own name of the classifier: `model.fc` (resnet18), `model.classifier`
    (efficientnet_b0, mobilenetv3), `model.head` (vit). Everything else is the extractor.

    Args:
        model_name: Name of the model in timm, such as `resnet18`.
        num_classes: Number of outputs.
        in_chans: Channels of the input.
        pretrained: Start from timm's published weights, which are downloaded. A loaded checkpoint never downloads.
        model_args: More arguments of `timm.create_model`, such as `{"img_size": 32, "patch_size": 4}` for a vit.

    Raises:
        ImportError: If timm is not installed.
        ValueError: If timm has no such model, or the model has no head or more than one.

    Example:
        >>> from fedlightning.models import TimmNet
        >>> TimmNet("resnet18", num_classes=10).head_name  # doctest: +SKIP
        'model.fc'
    """

    @checked
    def __init__(
        self,
        model_name: str,
        num_classes: PositiveInt,
        in_chans: int = 3,
        pretrained: bool = False,
        model_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        timm = import_package("timm", "TimmNet needs timm", "vision")
        if ":" not in model_name and not timm.is_model(model_name.partition(".")[0]):  # timm checks "hf-hub:..."
            close = difflib.get_close_matches(model_name, timm.list_models(), n=5)
            hint = f"Did you mean {', '.join(close)}?" if close else "timm.list_models() names them all."
            raise ValueError(f"timm has no model {model_name!r}. {hint}")
        extra = dict(model_args or {})
        self.init_args = {
            "model_name": model_name,
            "num_classes": num_classes,
            "in_chans": in_chans,
            "pretrained": False,
            "model_args": extra,
        }
        self.model: nn.Module = timm.create_model(
            model_name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans, **extra
        )
        self.head_name = f"model.{head_name(self.model)}"

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits


def timm_model(
    model_name: str, num_classes: int, in_chans: int = 3, pretrained: bool = False, **kwargs: Any
) -> TimmNet:
    """Return a `TimmNet` with more arguments of `timm.create_model` as keywords, for Python code.

    Args:
        model_name: As for `TimmNet`.
        num_classes: As for `TimmNet`.
        in_chans: As for `TimmNet`.
        pretrained: As for `TimmNet`.
        **kwargs: The `model_args` of `TimmNet`.

    Raises:
        ImportError: If timm is not installed.
        ValueError: If timm has no such model, or the model has no head or more than one.

    Example:
        >>> from fedlightning.models import timm_model
        >>> timm_model("resnet18", num_classes=10, in_chans=1).head_name  # doctest: +SKIP
        'model.fc'
    """
    return TimmNet(model_name, num_classes, in_chans, pretrained, model_args=kwargs)


def load_pretrained(
    folder: str,
    task: str = "SequenceClassification",
    num_labels: PositiveInt | None = None,
    adapters: dict[str, Any] | None = None,
) -> nn.Module:
    """Return a model of transformers from a folder, for `HFModule`.

    Args:
        folder: The folder, or a name that transformers knows.
        task: What follows `AutoModelFor` in the name of the class.
        num_labels: Classes of a new head.
        adapters: Arguments of `peft.LoraConfig`: a `PeftModel` with new adapters, for `FedIT(r=None)`. `None`: without.

    Example:
        >>> from fedlightning.models import load_pretrained
        >>> load_pretrained("MiniLM", num_labels=2, adapters={"r": 8, "target_modules": ["query"]})  # doctest: +SKIP
    """
    transformers = import_package("transformers", "load_pretrained needs transformers, which peft brings along", "lora")
    options = {} if num_labels is None else {"num_labels": num_labels}
    model: nn.Module = getattr(transformers, f"AutoModelFor{task}").from_pretrained(folder, **options)
    if adapters is None:
        return model
    peft = import_package("peft", "load_pretrained(adapters=...) needs peft", "lora")
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**adapters))
    return adapted


class MonaiUNet(nn.Module):
    """MONAI's residual U-Net (Kerfoot et al. 2018) in two or three dimensions, for `Segmenter`.

    Input `(batch, in_channels, *space)`, with each side a multiple of `2^(len(widths) - 1)`; output `(batch,
    num_classes, *space)`. Instance normalisation: nothing of a client's data stays in it but weights. Layers: `model`
    (all of it, the head included).

    Args:
        num_classes: Number of classes, background included.
        in_channels: Channels of the input.
        dimensions: 2 or 3.
        widths: Filters of each level; each level but the first halves the sides.
        units: Residual units of a level.

    Raises:
        ImportError: If MONAI is not installed (the extra `clinical`).

    Example:
        >>> from fedlightning.models import MonaiUNet
        >>> MonaiUNet(num_classes=2).head_name  # doctest: +SKIP
        'model'
    """

    head_name = "model"

    @recorded
    def __init__(
        self,
        num_classes: Size,
        in_channels: Size = 1,
        dimensions: Size = 3,
        widths: list[Size] = [8, 16, 32],  # noqa: B006 - not changed, and a default in YAML is a list
        units: int = 2,
    ) -> None:
        super().__init__()
        nets = import_package("monai.networks.nets", "MonaiUNet needs MONAI", "clinical")
        strides = [2] * (len(widths) - 1)
        self.model = nets.UNet(
            dimensions, in_channels, num_classes, list(widths), strides, num_res_units=units, norm="instance"
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

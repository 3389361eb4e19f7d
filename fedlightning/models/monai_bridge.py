"""Networks of MONAI, which is imported only when one is made."""

from __future__ import annotations

from torch import Tensor, nn

from fedlightning.errors import missing_package
from fedlightning.models.recipes import recorded
from fedlightning.models.sizes import Size


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
        try:
            from monai.networks.nets import UNet
        except ImportError as error:
            raise ImportError(missing_package("MonaiUNet needs MONAI", "clinical")) from error
        strides = [2] * (len(widths) - 1)
        self.model = UNet(
            dimensions, in_channels, num_classes, list(widths), strides, num_res_units=units, norm="instance"
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

"""Figure of images beside what an attacker made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedlightning.report.drawing import panel


def side_by_side(images: Sequence[Any]) -> Figure:
    """Draw true images above those that were found.

    Args:
        images: `(2, count, channels, height, width)`, from 0 to 1.
    """
    values = np.asarray(images, dtype=float)
    framed = np.pad(values, ((0, 0), (0, 0), (0, 0), (1, 1), (1, 1)), constant_values=np.nan)
    rows = [np.concatenate(list(row), axis=2) for row in framed]
    image = np.concatenate(rows, axis=1)
    figure, axes = panel(height=min(4.0, 5.0 * image.shape[1] / image.shape[2]))
    inside = 1.0 - np.isnan(image[0])  # the page shows between images
    image = np.nan_to_num(image)
    pixels = image[:3].transpose(1, 2, 0) if len(image) >= 3 else image[0]
    axes.imshow(pixels, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest", alpha=inside)
    height = framed.shape[3]
    axes.set_yticks([height / 2 - 0.5, 1.5 * height - 0.5], ["true", "found"])
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure

"""Check labels before a classifier learns from them."""

from __future__ import annotations

import torch
from torch import Tensor


def check_labels(y: Tensor, num_classes: int) -> None:
    """Check that labels are whole numbers `0 .. num_classes - 1`.

    Nothing is checked where values cannot be read (`torch.func.vmap`).

    Example:
        >>> import torch
        >>> from fedlightning.models.labels import check_labels
        >>> check_labels(torch.tensor([0, 2]), num_classes=3)
        >>> check_labels(torch.tensor([0, 3]), num_classes=3)
        Traceback (most recent call last):
        ValueError: Label 3 is outside 0 .. 2: ...
    """
    if y.numel() == 0 or y.dtype == torch.bool:
        return
    try:
        low, high = (bound.item() for bound in torch.aminmax(y))
        whole = not y.is_floating_point() or bool((y == y.round()).all())
    except RuntimeError:  # inside torch.func.vmap
        return
    if not whole:
        raise ValueError("The labels hold fractions. Classifier needs one whole number a sample, not probabilities.")
    if low < 0 or high >= num_classes:
        label = int(low if low < 0 else high)
        way_out = "Remove unlabelled samples" if label < 0 else f"Set num_classes={label + 1}"
        raise ValueError(
            f"Label {label} is outside 0 .. {num_classes - 1}: the Classifier has {num_classes} classes. "
            f"{way_out} or map the labels to 0 .. {num_classes - 1} in the dataset."
        )

"""Find the head of a network."""

from __future__ import annotations

from torch import nn


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

"""Find a network's head by name, and the layer in it where features arrive."""

from __future__ import annotations

from difflib import get_close_matches

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedlightning.seeding import isolated
from fedlightning.wrappers.mixing import user_class

Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_submodule(module: nn.Module, name: str) -> nn.Module:
    """The submodule with dotted path ``name``.

    Raises:
        ValueError: there is none; the sentence lists the names there are, close matches first.
    """
    names = [found for found, _ in module.named_modules() if found]
    if name not in dict(module.named_modules(remove_duplicate=False)) or not name:
        close = get_close_matches(name, names, n=5, cutoff=0.5)
        close += [
            found for found in names if found.rpartition(".")[2] == name.rpartition(".")[2] and found not in close
        ]
        listed = close + [found for found in names if found not in close]
        shown = ", ".join(listed[:20]) + (f", ... ({len(listed)} in all)" if len(listed) > 20 else "")
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise ValueError(
            f"{user_class(module).__name__} has no submodule `{name}`.{hint} Its submodules: {shown or 'none'}."
        )
    return module.get_submodule(name)


def registered_names(module: nn.Module, child: nn.Module) -> list[str]:
    """Every dotted path under which ``child`` is registered in ``module``."""
    return [name for name, found in module.named_modules(remove_duplicate=False) if found is child]


def within(name: str, prefixes: list[str]) -> bool:
    """Whether ``name`` is one of the module paths ``prefixes`` or lies under one of them."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def require_body(module: nn.Module, head: str) -> None:
    """Refuse a head that holds all there is to train.

    Raises:
        ValueError: no parameter lies outside the head, so nothing is left to be an extractor.
    """
    heads = registered_names(module, find_submodule(module, head))
    if all(within(name, heads) for name, _ in module.named_parameters(remove_duplicate=False)):
        raise ValueError(
            f"FENDA needs an extractor and a head, but all parameters of {user_class(module).__name__} are in "
            f"`{head}`. Name a smaller submodule as the head, or give the model a layer before it."
        )


def entry_layer(module: nn.Module, head: str) -> str:
    """The path of the layer of ``head`` that the features meet first: its first layer with parameters.

    Raises:
        ValueError: that layer is no ``nn.Linear`` and no 1x1 convolution, so it cannot be given a wider input.
    """
    root = find_submodule(module, head)
    name, layer = next(
        (
            (name, layer)
            for name, layer in root.named_modules()
            if any(True for _ in layer.parameters(recurse=False)) or parametrize.is_parametrized(layer)
        ),
        ("", root),
    )
    path = f"{head}.{name}" if name else head
    plain = isinstance(layer, nn.Linear) and not isinstance(layer, nn.LazyLinear)
    if isinstance(layer, Convolution):
        plain = all(size == 1 for size in layer.kernel_size) and layer.groups == 1
    if not plain or parametrize.is_parametrized(layer):
        raise ValueError(
            f"The head `{head}` of {user_class(module).__name__} begins with `{path}` ({user_class(layer).__name__}); "
            f"only a plain nn.Linear or a 1x1 convolution can be widened for concatenated features. Name the linear "
            f"layer itself as the head, or use fusion='sum', which leaves the head as it is."
        )
    for other, parameter in module.named_parameters(remove_duplicate=False):
        owner = other.rpartition(".")[0]
        if parameter is layer.weight and not within(owner, registered_names(module, layer)):
            raise ValueError(
                f"The weight of the head layer `{path}` is tied to `{other}`, so it cannot be widened. "
                f"Use fusion='sum', which leaves the head as it is."
            )
    return path


def width(layer: nn.Module) -> int:
    """Number of features that a Linear or a convolution takes."""
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def feature_dim(layer: nn.Module) -> int:
    """The dimension along which features lie in the input of ``layer``: last for Linear, channels for a convolution."""
    return -1 - len(layer.kernel_size) if isinstance(layer, Convolution) else -1


def widen(layer: nn.Module, features: int, seed: object) -> None:
    """Give a Linear or 1x1 convolution ``features`` inputs, in place, freshly initialised under an addressed seed."""
    assert isinstance(layer, (nn.Linear, *Convolution))
    old: Tensor = layer.weight
    shape = (old.shape[0], features, *old.shape[2:])
    layer.weight = nn.Parameter(torch.empty(shape, dtype=old.dtype, device=old.device), old.requires_grad)
    if isinstance(layer, nn.Linear):
        layer.in_features = features
    else:
        layer.in_channels = features
    with isolated(seed, "fenda-head"):
        layer.reset_parameters()


def output_width(extractor: nn.Module) -> int | None:
    """How many features ``extractor`` gives, read off its last Linear or convolution; ``None`` when it has neither."""
    for layer in reversed(list(extractor.modules())):
        if isinstance(layer, nn.Linear):
            return layer.out_features
        if isinstance(layer, Convolution):
            return layer.out_channels
    return None


def flat(features: Tensor) -> Tensor:
    """(B, ...) to (B, d)."""
    return features.flatten(1)


def fuse(zg: Tensor, zl: Tensor, fusion: str, order: str, dim: int = -1) -> Tensor:
    """Concatenate along ``dim`` (``order`` says which comes first) or add global and local features."""
    if fusion == "sum":
        return zg + zl
    return torch.cat((zg, zl) if order == "global_first" else (zl, zg), dim)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a misspelt option with the list of what there is."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}.")


def replace_everywhere(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` under every name under which ``old`` is registered."""
    for name in registered_names(module, old):
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, new)

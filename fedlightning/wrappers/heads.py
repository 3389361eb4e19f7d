"""Find a network's head by name, and the layer in it that takes the features."""

from __future__ import annotations

from difflib import get_close_matches

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedlightning.seeding import isolated
from fedlightning.wrappers.mixing import user_class

Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_submodule(module: nn.Module, name: str) -> nn.Module:
    """Return the submodule with dotted path `name`.

    Args:
        module: Any module.
        name: The path, such as `"net.fc"`.

    Raises:
        ValueError: If there is none. The message lists the existing names, close matches first.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import find_submodule
        >>> find_submodule(MLP(4, [3], 2), "fc1")
        Linear(in_features=4, out_features=3, bias=True)
    """
    names = [path for path, _ in module.named_modules() if path]
    if name not in dict(module.named_modules(remove_duplicate=False)) or not name:
        close = get_close_matches(name, names, n=5, cutoff=0.5)
        close += [path for path in names if path.rpartition(".")[2] == name.rpartition(".")[2] and path not in close]
        listed = close + [path for path in names if path not in close]
        shown = ", ".join(listed[:20]) + (f", ... ({len(listed)} in all)" if len(listed) > 20 else "")
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise ValueError(
            f"{user_class(module).__name__} has no submodule `{name}`.{hint} Its submodules: {shown or 'none'}."
        )
    return module.get_submodule(name)


def registered_names(module: nn.Module, child: nn.Module) -> list[str]:
    """Return every dotted path under which `child` is registered in `module`.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers.heads import registered_names
        >>> shared = nn.Linear(2, 2)
        >>> registered_names(nn.Sequential(shared, nn.ReLU(), shared), shared)
        ['0', '2']
    """
    return [name for name, submodule in module.named_modules(remove_duplicate=False) if submodule is child]


def within(name: str, prefixes: list[str]) -> bool:
    """Return True if `name` is one of the module paths `prefixes` or lies under one of them.

    Example:
        >>> from fedlightning.wrappers.heads import within
        >>> within("fc1.weight", ["fc1"]), within("fc10.weight", ["fc1"])
        (True, False)
    """
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def require_body(module: nn.Module, head: str) -> None:
    """Check that there are parameters outside the head.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.heads import require_body
        >>> require_body(MLP(4, [3], 2), head="fc2")
    """
    heads = registered_names(module, find_submodule(module, head))
    if all(within(name, heads) for name, _ in module.named_parameters(remove_duplicate=False)):
        raise ValueError(
            f"FENDA needs an extractor and a head, but all parameters of {user_class(module).__name__} are in "
            f"`{head}`. Name a smaller submodule as the head, or give the model a layer before it."
        )


def entry_layer(module: nn.Module, head: str) -> str:
    """Return the path of the first layer with parameters in `head`: the one that takes the features.

    Example:
        >>> from torch import nn
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.heads import entry_layer
        >>> entry_layer(nn.Sequential(MLP(4, [3], 2)), head="0")
        '0.fc1'
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
    """Return the number of features that a Linear layer or a convolution takes.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers.heads import width
        >>> width(nn.Linear(3, 2)), width(nn.Conv2d(16, 32, 1))
        (3, 16)
    """
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def feature_dim(layer: nn.Module) -> int:
    """Return the feature dimension in the input of `layer`: the last for Linear, the channels for a convolution.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers.heads import feature_dim
        >>> feature_dim(nn.Linear(3, 2)), feature_dim(nn.Conv2d(16, 32, 1))
        (-1, -3)
    """
    return -1 - len(layer.kernel_size) if isinstance(layer, Convolution) else -1


def widen(layer: nn.Module, features: int, seed: object) -> None:
    """Give a Linear layer or 1x1 convolution `features` inputs, in place.

    The whole layer is initialised anew under an addressed seed.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers.heads import widen
        >>> layer = nn.Linear(3, 2)
        >>> widen(layer, 6, seed=0)
        >>> layer.weight.shape
        torch.Size([2, 6])
    """
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
    """Return the number of features that `extractor` gives, or `None` if it is unknown.

    It is read from the last Linear layer or convolution.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers.heads import output_width
        >>> output_width(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
        8
    """
    for layer in reversed(list(extractor.modules())):
        if isinstance(layer, nn.Linear):
            return layer.out_features
        if isinstance(layer, Convolution):
            return layer.out_channels
    return None


def flat(features: Tensor) -> Tensor:
    """Return features of shape `(batch, ...)` as `(batch, features)`.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.heads import flat
        >>> flat(torch.zeros(5, 3, 2, 2)).shape
        torch.Size([5, 12])
    """
    return features.flatten(1)


def fuse(zg: Tensor, zl: Tensor, fusion: str, order: str, dim: int = -1) -> Tensor:
    """Concatenate (or add) global and local features.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.heads import fuse
        >>> fuse(torch.zeros(1, 2), torch.ones(1, 2), "concat", "local_first")
        tensor([[1., 1., 0., 0.]])
    """
    if fusion == "sum":
        return zg + zl
    return torch.cat((zg, zl) if order == "global_first" else (zl, zg), dim)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Check that an option is one of the allowed values.

    Example:
        >>> from fedlightning.wrappers.heads import check_choice
        >>> check_choice("fusion", "add", ("concat", "sum"))
        Traceback (most recent call last):
        ValueError: fusion='add' is unknown; choose one of 'concat', 'sum'.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}.")


def replace_everywhere(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` under every name under which `old` is registered.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers.heads import replace_everywhere
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> replace_everywhere(net, net[1], nn.Tanh())
        >>> net[1]
        Tanh()
    """
    for name in registered_names(module, old):
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, new)

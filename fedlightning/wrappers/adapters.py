"""Low-rank adapters on somebody else's module: the network is frozen, small matrices beside its linear layers train.

The layers themselves are those of the ``peft`` library, put into the module at exact paths.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.tensors import tied_names
from fedlightning.wrappers.mixing import AddedParametersMixin, mix, mixins_of

ADAPTER = "default"
"""peft's name of the one adapter that a layer has here; it is part of the state's names."""


class AdapterMixin(AddedParametersMixin):
    """On a module with adapters: they join the optimizer group of their layer, and what is frozen stays frozen."""

    adapted_paths: tuple[str, ...]
    trained_names: tuple[str, ...]
    slowed_modules: tuple[tuple[str, str, Any], ...]

    def added_parameters(self) -> dict[str, str]:
        own = {
            f"{path}.lora_{factor}.{ADAPTER}.weight": f"{path}.base_layer.weight"
            for path in self.adapted_paths
            for factor in "AB"
        }
        return {**super().added_parameters(), **own}

    def train(self, mode: bool = True) -> Any:
        """As ever, but a normalisation layer that does not train keeps its statistics too."""
        super().train(mode)
        for path, child in self.named_modules():
            keeps_statistics = getattr(child, "running_mean", None) is not None
            if keeps_statistics and not any(f"{path}.{name}" in self.trained_names for name in child.state_dict()):
                child.training = False
        return self

    def on_unmix(self) -> None:
        """Merge every adapter into its layer: ``W <- W + (alpha / r) B A``."""
        for path in self.adapted_paths:
            layer: Any = self.get_submodule(path)
            layer.merge()
            _put(self, layer, layer.get_base_layer())
        for path, attribute, value in self.slowed_modules:
            setattr(self.get_submodule(path), attribute, value)
        for name in ("adapted_paths", "trained_names", "slowed_modules"):
            del vars(self)[name]


def add_adapters(
    module: LightningModule,
    *,
    r: int,
    alpha: float,
    dropout: float,
    target_modules: Sequence[str] | None,
    head: Iterable[str],
    train_a: bool,
) -> LightningModule:
    """Freeze ``module`` and give its linear layers adapters (in place).

    Args:
        module: any LightningModule; ``fedlightning.wrappers.unmix`` merges the adapters and gives its class back.
        r, alpha, dropout: rank, scale and input dropout of every adapter.
        target_modules: see :func:`find_linear`.
        head: exact state names that go on training in full.
        train_a: whether the first factor trains too.

    Raises:
        ImportError: peft is not installed.
        ValueError: there is nothing to adapt, or a target that cannot be.
    """
    peft = _peft()
    tied = tied_names(module)
    trained = {other for name in head for other in tied.get(name, {name})}
    paths = find_linear(module, target_modules, trained)
    for name, parameter in module.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)
    for path in paths:
        holder = nn.Module()
        holder.layer = layer = module.get_submodule(path)
        config = peft.LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=["layer"])
        adapted: Any = peft.inject_adapter_in_model(config, holder, ADAPTER).layer
        adapted.lora_A.requires_grad_(train_a)
        _put(module, layer, adapted)
    module = mix(module, AdapterMixin)
    wrapped = cast(AdapterMixin, module)
    wrapped.adapted_paths = tuple(paths)
    wrapped.trained_names = tuple(name for name in module.state_dict() if name in trained)
    wrapped.slowed_modules = tuple(_without_fast_path(module))
    return module.train(module.training)


def adapter_names(module: nn.Module) -> list[str]:
    """State names of what trains: the adapters' trainable factors and the head."""
    if AdapterMixin not in mixins_of(module):
        return []
    wrapped = cast(AdapterMixin, module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    added = [name for name in wrapped.added_parameters() if name in parameters and parameters[name].requires_grad]
    return [*added, *wrapped.trained_names]


def find_linear(module: nn.Module, targets: Sequence[str] | None, head: Iterable[str] = ()) -> list[str]:
    """Paths of the ``nn.Linear`` layers that can be adapted; one that is there under two paths is found once.

    Args:
        module: where to look; linear layers inside ``nn.MultiheadAttention`` are never called, so they are left out.
        targets: exact paths, or ends of paths (``"q_proj"`` means every ``....q_proj``); ``None``: all of them.
        head: state names that are left out.

    Raises:
        ValueError: nothing is found, or a target matches nothing; the sentence lists what there is.
    """
    name = type(module).__name__
    hidden = [path for path, child in module.named_modules() if isinstance(child, nn.MultiheadAttention)]
    linear = [
        path
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear)
        and not any(path.startswith(f"{attention}.") for attention in hidden)
        and f"{path}.weight" not in set(head)
    ]
    if targets is None:
        if not linear:
            raise ValueError(f"{name} has no nn.Linear layer outside the head, so there is nothing to adapt.")
        return linear
    chosen: set[str] = set()
    for target in targets:
        found = [path for path in linear if _ends_in(path, target)]
        if not found and any(_ends_in(f"{path}.out_proj", target) for path in hidden):
            raise ValueError(
                f"'{target}' of {name} is inside nn.MultiheadAttention, which uses its weights without calling it: an "
                f"adapter there would never act. Choose among {linear}."
            )
        if not found:
            close = difflib.get_close_matches(target, linear, n=3, cutoff=0.4)
            raise ValueError(
                f"'{target}' is no nn.Linear layer of {name} outside the head. "
                f"{'Close are' if close else 'There are'} {close or linear}."
            )
        chosen.update(found)
    return [path for path in linear if path in chosen]


def _ends_in(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _put(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` is registered."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is old and parent is not new:
                parent._modules[name] = new


def _without_fast_path(module: nn.Module) -> Iterable[tuple[str, str, Any]]:
    """Keep torch's transformer layers from their fast path, which in eval mode reads weights past the adapters."""
    for path, child in module.named_modules():
        for kind, attribute in (
            (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),
            (nn.TransformerEncoder, "use_nested_tensor"),
        ):
            if isinstance(child, kind) and hasattr(child, attribute) and any(map(_is_adapted, child.modules())):
                yield path, attribute, getattr(child, attribute)
                setattr(child, attribute, 0)


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_B")


def _peft() -> ModuleType:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ImportError(
            'Low-rank adapters need peft, which is not installed: pip install "fedlightning[lora]"'
        ) from error
    return peft

"""Low-rank adapters on somebody else's module: the network is frozen, small matrices beside its linear layers train.

The layers themselves are those of the `peft` library, inserted at exact paths.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils import parametrize

from fedlightning.errors import import_package
from fedlightning.tensors import tied_names
from fedlightning.wrappers.mixing import AddedParametersMixin, mix, mixins_of
from fedlightning.wrappers.submodel import shrink_layer

ADAPTER = "default"
"""Name of the one adapter of a layer, as peft calls it. It is part of the state's names."""


class AdapterMixin(AddedParametersMixin):
    """On a module with adapters: they join the optimizer group of their layer, and frozen layers stay frozen.

    Mixed in by `add_adapters`.

    Attributes:
        adapted_paths: Paths of the layers with adapters.
        trained_names: State names that train in full: the head.
        slowed_modules: Path, attribute and old value of each change that keeps torch's fast path off.
    """

    adapted_paths: tuple[str, ...]
    trained_names: tuple[str, ...]
    slowed_modules: tuple[tuple[str, str, Any], ...]

    def added_parameters(self) -> dict[str, str]:
        adapter_entries = {
            f"{path}.lora_{factor}.{ADAPTER}.weight": f"{path}.base_layer.weight"
            for path in self.adapted_paths
            for factor in "AB"
        }
        return {**super().added_parameters(), **adapter_entries}

    def train(self, mode: bool = True) -> Any:
        """Set the mode as usual, except that a frozen normalisation layer keeps its statistics."""
        super().train(mode)
        for path, child in self.named_modules():
            keeps_statistics = getattr(child, "running_mean", None) is not None
            if keeps_statistics and not any(f"{path}.{name}" in self.trained_names for name in child.state_dict()):
                child.training = False
        return self

    def on_unmix(self) -> None:
        """Merge every adapter into its layer: `W <- W + (alpha / r) B A`."""
        untie_adapted(cast(LightningModule, self))  # a weight that another layer uses too must not change there
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
    r: int | None,
    alpha: float,
    dropout: float,
    target_modules: Sequence[str] | None,
    head: Iterable[str],
    train_a: bool,
) -> LightningModule:
    """Freeze `module` and give its linear layers adapters, in place; without `r`, use those that peft has put there.

    Raises:
        ValueError: If there are adapters although `r` is given, or none although it is not, or those cannot be averaged.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.adapters import adapter_names, add_adapters
        >>> module = Classifier(MLP(4, [3], 2), num_classes=2)
        >>> options = {"r": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["fc1"], "train_a": True}
        >>> _ = add_adapters(module, head=["net.fc2.bias"], **options)  # doctest: +SKIP
        >>> adapter_names(module)  # doctest: +SKIP
        ['net.fc1.lora_A.default.weight', 'net.fc1.lora_B.default.weight', 'net.fc2.bias']
    """
    peft = import_package("peft", "Low-rank adapters need peft", "lora")
    if r is None:
        return _adopt_adapters(module, peft, train_a)
    present = next((path for path, child in module.named_modules() if isinstance(child, _tuned(peft))), None)
    if present is not None:
        raise ValueError(
            f"'{present}' of {type(module).__name__} has adapters of peft already, beside which others would train. Use them "
            "by FedIT(r=None), FFALoRA(r=None), RoLoRA(r=None) or FedSALoRA(r=None), or give the model without them."
        )
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
        if layer.weight.dtype in (torch.float16, torch.bfloat16):  # small steps, and means, would round to nothing
            for factors in (adapted.lora_A, adapted.lora_B):
                factors.to(dtype=torch.float32)
        adapted.lora_A.requires_grad_(train_a)
        _put(module, layer, adapted)
    return _with_mixin(module, paths, trained)


def _tuned(peft: ModuleType) -> Any:
    return peft.tuners.tuners_utils.BaseTunerLayer


def _adopt_adapters(module: LightningModule, peft: ModuleType, train_a: bool) -> LightningModule:
    """Let adapters that peft has put into a module travel, with everything else that trains there."""
    name = type(module).__name__
    tied, paths = tied_names(module), []
    trained = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
    frozen = any(not parameter.requires_grad for parameter in module.parameters())
    if not trained or not frozen:
        raise ValueError(f"{name} has no adapters: {'everything' if trained else 'nothing'} trains in it. Give r.")
    for path, layer in module.named_modules():
        if not isinstance(layer, _tuned(peft)):
            continue
        names = [adapter for part in layer.adapter_layer_names for adapter in getattr(layer, part)]
        if hasattr(layer, "lora_E"):
            raise ValueError(f"'{path}' of {name} is adapted by AdaLoRA, whose ranks change in training. Use LoRA.")
        if set(names) - {ADAPTER}:
            raise ValueError(
                f"'{path}' of {name} has the adapters {sorted(set(names))}. Give one, with the name '{ADAPTER}'."
            )
        weight = f"{path}.base_layer.weight"
        if weight in tied:
            raise ValueError(
                f"'{weight}' of {name} is tied to '{min(tied[weight] - {weight})}', and an adapter of one of the two unties "
                "them. Untie them first, or adapt other layers."
            )
        if ADAPTER in getattr(layer, "lora_A", ()):
            paths.append(path)
            cast(Any, layer).lora_A.requires_grad_(train_a)
    factors = {f"{path}.lora_{factor}.{ADAPTER}.weight" for path in paths for factor in "AB"}
    rest = {other for key in trained if key not in factors for other in tied.get(key, {key})}
    return _with_mixin(module, paths, rest)


def _with_mixin(module: LightningModule, paths: Sequence[str], trained: set[str]) -> LightningModule:
    module = mix(module, AdapterMixin)
    wrapped = cast(AdapterMixin, module)
    wrapped.adapted_paths = tuple(paths)
    wrapped.trained_names = tuple(name for name in module.state_dict() if name in trained)
    wrapped.slowed_modules = tuple(_without_fast_path(module))
    return module.train(module.training)


def adapter_names(module: nn.Module) -> list[str]:
    """Return the state names of what trains: the trainable factors of the adapters, and the head.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.adapters import adapter_names
        >>> adapter_names(MLP(4, [3], 2))
        []
    """
    if AdapterMixin not in mixins_of(module):
        return []
    wrapped = cast(AdapterMixin, module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    added = [name for name in wrapped.added_parameters() if name in parameters and parameters[name].requires_grad]
    tied = tied_names(module)  # a layer that is registered under several paths travels under all of them, or not at all
    return [*(other for name in added for other in sorted(tied.get(name, {name}))), *wrapped.trained_names]


class Adapted(NamedTuple):
    """State names of one adapted layer. One that is registered under several paths has several names for each entry.

    Attributes:
        a: The first factor, of shape `(r, inputs)`.
        b: The second factor, of shape `(outputs, r)`.
        base: The frozen weight, of shape `(outputs, inputs)`.
        every_a: All names of the first factor.
        every_b: All names of the second factor.
        every_base: All names of the frozen weight.
    """

    a: str
    b: str
    base: str
    every_a: tuple[str, ...]
    every_b: tuple[str, ...]
    every_base: tuple[str, ...]


def adapted_layers(module: nn.Module) -> dict[str, Adapted]:
    """Return the state names of every adapted layer, by its path; empty for a module without adapters.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.adapters import adapted_layers
        >>> adapted_layers(MLP(4, [3], 2))
        {}
    """
    if AdapterMixin not in mixins_of(module):
        return {}
    tied = tied_names(module)
    layers = {}
    for path in cast(AdapterMixin, module).adapted_paths:
        names = [f"{path}.lora_{factor}.{ADAPTER}.weight" for factor in "AB"] + [f"{path}.base_layer.weight"]
        every = [tuple(sorted(tied.get(name, {name}))) for name in names]
        layers[path] = Adapted(names[0], names[1], names[2], every[0], every[1], every[2])
    return layers


def save_peft(module: nn.Module, folder: str | Path, base: nn.Module) -> None:
    """Write the adapters of a module as a folder that `peft.PeftModel.from_pretrained(base, folder)` opens.

    What trains in full beside them is there as `modules_to_save`.

    Args:
        module: A module with adapters, such as `trainer.module()` gives, whose network is its attribute `model`.
        folder: The folder.
        base: The network without adapters, as it was before the federation.

    Raises:
        ValueError: If the module has no LoRA adapters, or its frozen network is not `base`, as after FLoRA and FedExLoRA.
    """
    peft, layers = import_package("peft", "Low-rank adapters need peft", "lora"), adapted_layers(module)
    network: Any = module.model
    if hasattr(network, "peft_config"):
        network.save_pretrained(folder)
        return
    if not layers:
        raise ValueError(f"{type(module).__name__} has no LoRA adapters to write. Train it with FedIT or its like.")
    wrapped, state, prefix = cast(Any, module), module.state_dict(), "model."
    heads = sorted({name.removeprefix(prefix).rpartition(".")[0] for name in wrapped.trained_names})
    for name, value in base.state_dict().items():
        path, _, entry = name.rpartition(".")
        entry_value = state[f"{prefix}{path}.base_layer.{entry}" if f"{prefix}{path}" in layers else f"{prefix}{name}"]
        if path not in heads and not torch.equal(entry_value, value):
            raise ValueError(
                f"'{name}' of the federated model is not that of base: the adapters belong to another network. FLoRA and "
                "FedExLoRA change the network; write their model whole, by fedlightning.wrappers.unmix(module)."
            )
    layer = cast(Any, module.get_submodule(next(iter(layers))))
    config = peft.LoraConfig(
        r=layer.r[ADAPTER],
        lora_alpha=layer.scaling[ADAPTER] * layer.r[ADAPTER],
        target_modules=[path.removeprefix(prefix) for path in layers],
        modules_to_save=heads or None,
        base_model_name_or_path=getattr(getattr(base, "config", None), "name_or_path", None),
        inference_mode=True,
    )
    fresh = peft.PeftModel(copy.deepcopy(base), config)
    names = {
        f"{prefix}{path}.lora_{factor}.weight" for path in (p.removeprefix(prefix) for p in layers) for factor in "AB"
    }
    entries = {name.replace(f".{ADAPTER}.", "."): value for name, value in state.items()}
    entries = {name: value for name, value in entries.items() if name in names or name in wrapped.trained_names}
    peft.set_peft_model_state_dict(fresh, {f"base_model.{name}": value for name, value in entries.items()})
    fresh.save_pretrained(folder)


def resize_adapters(module: nn.Module, rank: int, scale: float) -> None:
    """Keep the first `rank` rows of every first factor and columns of every second one, in place.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.adapters import add_adapters, resize_adapters
        >>> module = Classifier(MLP(4, [3], 2), num_classes=2)
        >>> options = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": ["fc1"], "train_a": True}
        >>> _ = add_adapters(module, head=[], **options)  # doctest: +SKIP
        >>> resize_adapters(module, rank=2, scale=1.0)
        >>> tuple(module.net.fc1.lora_A["default"].weight.shape)  # doctest: +SKIP
        (2, 4)
    """
    kept = torch.arange(rank)
    for path in adapted_layers(module):
        layer: Any = module.get_submodule(path)
        a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        if len(a.weight) != rank:
            shrink_layer(a, "weight", (kept, None))
            shrink_layer(b, "weight", (None, kept))
        layer.r[ADAPTER], layer.lora_alpha[ADAPTER], layer.scaling[ADAPTER] = rank, scale * rank, scale


def untie_adapted(module: LightningModule) -> LightningModule:
    """Give adapted layers frozen weights of their own where they share them with other layers, in place.

    As long as nobody changes a frozen weight that does not change what the module computes. A layer that is registered under
    several paths stays one layer.
    """
    users: dict[int, int] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for path in adapted_layers(module):
        layer = cast(Any, module.get_submodule(path)).get_base_layer()
        if parametrize.is_parametrized(layer):
            raise ValueError(
                f"The weight of '{path}' is computed by a parametrization, and adapters cannot become a part of it. Remove "
                "the parametrization, or use FedIT, whose adapters stay beside the weights."
            )
        if users[id(layer.weight)] > 1:
            users[id(layer.weight)] -= 1
            layer.weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
    return module


def find_linear(module: nn.Module, targets: Sequence[str] | None, head: Iterable[str] = ()) -> list[str]:
    """Return the paths of the `nn.Linear` layers that can be adapted; a layer with two paths is found once.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.adapters import find_linear
        >>> find_linear(MLP(4, [3, 3], 2), targets=None, head=["fc3.weight", "fc3.bias"])
        ['fc1', 'fc2']
    """
    name = type(module).__name__
    hidden = [path for path, child in module.named_modules() if isinstance(child, nn.MultiheadAttention)]
    linear = [
        path
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear)
        and not child.weight.is_complex()
        and not any(path.startswith(f"{attention}.") for attention in hidden)
        and f"{path}.weight" not in set(head)
    ]
    if targets is None:
        if not linear:
            raise ValueError(f"{name} has no nn.Linear layer outside the head, so there is nothing to adapt.")
        return linear
    chosen: set[str] = set()
    for target in targets:
        matches = [path for path in linear if _ends_in(path, target)]
        if not matches and any(_ends_in(f"{path}.out_proj", target) for path in hidden):
            raise ValueError(
                f"'{target}' of {name} is inside nn.MultiheadAttention, which uses its weights without calling it: an "
                f"adapter there would never act. Choose among {linear}."
            )
        if not matches:
            close = difflib.get_close_matches(target, linear, n=3, cutoff=0.4)
            raise ValueError(
                f"'{target}' is not an nn.Linear layer of {name} outside the head. "
                f"{'Close are' if close else 'There are'} {close or linear}."
            )
        chosen.update(matches)
    return [path for path in linear if path in chosen]


def _ends_in(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _put(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is registered, except inside `new` itself."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is old and parent is not new:
                parent._modules[name] = new


def _without_fast_path(module: nn.Module) -> Iterable[tuple[str, str, Any]]:
    """Turn off the fast path of torch's transformer layers, which in eval mode reads weights past the adapters."""
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

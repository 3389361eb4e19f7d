"""What a module holds: its tensors by their `state_dict` names, the kind of each, and new values into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.tensors.parametrized import keeps_vectors, settle

State = dict[str, Tensor]
EntryKind = Literal["trainable", "float_buffer", "int_buffer", "frozen"]


def module_state(module: nn.Module, names: Iterable[str] | None = None) -> State:
    """Return the tensors of `module.state_dict()`, detached and sharing memory with the module.

    Args:
        module: Any module. Entries that are not tensors (`_extra_state`) are left out.
        names: Entries to keep, returned in the module's order. `None` keeps all.

    Example:
        >>> from torch import nn
        >>> from fedlightning.tensors import module_state
        >>> {name: tuple(value.shape) for name, value in module_state(nn.Linear(3, 2)).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    chosen = None if names is None else set(names)
    return {
        name: value.detach()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and (chosen is None or name in chosen)
    }


def entry_kinds(module: nn.Module) -> dict[str, EntryKind]:
    """Return the kind of every state entry: `trainable`, `frozen`, `float_buffer` or `int_buffer`.

    Call it before any phase freezes parameters: the kinds of a federation are fixed at its start. Complex buffers count
    as float buffers, boolean ones as integer buffers. A tied parameter has the same kind under each of its names.

    Args:
        module: Any module.

    Example:
        >>> from torch import nn
        >>> from fedlightning.tensors import entry_kinds
        >>> for name, kind in entry_kinds(nn.BatchNorm1d(4)).items():
        ...     print(name, kind)
        weight trainable
        bias trainable
        running_mean float_buffer
        running_var float_buffer
        num_batches_tracked int_buffer
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    kinds: dict[str, EntryKind] = {}
    for name, value in module_state(module).items():
        if name in parameters:
            kinds[name] = "trainable" if parameters[name].requires_grad else "frozen"
        else:
            kinds[name] = "float_buffer" if value.is_floating_point() or value.is_complex() else "int_buffer"
    return kinds


def tied_names(module: nn.Module) -> dict[str, frozenset[str]]:
    """Return all names of every parameter or buffer that has more than one, keyed by each of its names.

    Args:
        module: Any module.

    Example:
        >>> from torch import nn
        >>> from fedlightning.tensors import tied_names
        >>> net = nn.ModuleDict({"embedding": nn.Embedding(5, 2), "out": nn.Linear(2, 5, bias=False)})
        >>> net["out"].weight = net["embedding"].weight
        >>> sorted(tied_names(net)["out.weight"])
        ['embedding.weight', 'out.weight']
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in group}


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `state` into the entries of `module` with the same names; other entries stay.

    A spectral norm's vectors that are no unit vectors, as a mean is none, are worked out anew.

    Args:
        module: The module to write to.
        state: New values of some or all of its entries.

    Raises:
        ValueError: If a name is not in the module or a shape differs. The message names the entry.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.tensors import load_state
        >>> layer = nn.Linear(2, 1)
        >>> load_state(layer, {"bias": torch.tensor([3.0])})
        >>> layer.bias.item()
        3.0
    """
    own = module_state(module)
    with torch.no_grad():
        for name, value in state.items():
            if name not in own:
                raise ValueError(
                    f"State entry '{name}' is not in {type(module).__name__}. Send only names that it has."
                )
            if own[name].shape != value.shape:
                raise ValueError(
                    f"State entry '{name}' has shape {tuple(value.shape)}, but {type(module).__name__} holds "
                    f"{tuple(own[name].shape)}. Both sides must build the same model."
                )
            own[name].copy_(value)
    if keeps_vectors(state):
        settle(module, own)


def optimizers_in(value: Any) -> list[Optimizer]:
    """The optimizers in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(value, Optimizer):
        return [value]
    if isinstance(value, Mapping):
        return optimizers_in(value.get("optimizer"))
    if isinstance(value, list | tuple):
        return [optimizer for item in value for optimizer in optimizers_in(item)]
    return []

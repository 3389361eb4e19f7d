"""What a module holds: its tensors by their `state_dict` names, the kind of each, and new values into it.

What a parametrization keeps beside its weight: the two unit vectors by which a spectral norm knows its matrix.

They are worked out from the matrix, a little in every training step, and an evaluation takes them as they are. So they are
no running statistics: the mean of several clients' vectors is not a unit vector, and vectors that did not come with their
matrix belong to another one. Both kinds are worked out anew; vectors that came as one client left them stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

VECTORS = ("_u", "_v")
"""Names of the vectors in a spectral norm of torch."""
MAX_ITERATIONS = 100
"""Power iterations until vectors that were worked out anew count as found."""


def keeps_vectors(names: Collection[str]) -> bool:
    """Return True if one of a module's entries is such a vector, by its name."""
    return any(name.endswith("._u") and "parametrizations." in name for name in names)


@torch.no_grad()
def settle(module: nn.Module, came: Collection[str]) -> None:
    """Work out a module's vectors anew where they have to be: they are not unit vectors, or their matrix came without them.

    Example:
        >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
        >>> _ = layer.parametrizations.weight.original.data.mul_(5.0)
        >>> settle(layer, ["parametrizations.weight.original"])
        >>> round(float(torch.linalg.matrix_norm(layer.eval().weight, 2)), 4)
        1.0
    """
    for path, layer in module.named_modules():
        for weight, chain in layer.parametrizations.items() if parametrize.is_parametrized(layer) else ():
            prefix = f"{path}.parametrizations.{weight}.".removeprefix(".")
            for place, norm in enumerate(chain):
                vectors = [vector for name, vector in norm.named_buffers(recurse=False) if name in VECTORS]
                its_own = f"{prefix}{place}._u" in came or not any(
                    name.startswith(f"{prefix}original") for name in came
                )
                if vectors and not (its_own and all(map(_is_unit, vectors))):
                    _work_out(chain, vectors[0])


def _is_unit(vector: Tensor) -> bool:
    """Return whether a vector has the length 1, but for rounding."""
    return abs(float(vector.norm()) - 1.0) < 8 * torch.finfo(vector.dtype).eps


def _work_out(chain: nn.Module, vector: Tensor) -> None:
    """Let a spectral norm iterate, as in training, until its vector stays."""
    mode = chain.training
    chain.train()
    for _ in range(MAX_ITERATIONS):
        before = vector.clone()
        chain()
        if float((vector - before).norm()) < 8 * torch.finfo(vector.dtype).eps:
            break
    chain.train(mode)


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

    A spectral norm's vectors that are not unit vectors, as a mean is none, are worked out anew.

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
    entries = module_state(module)
    with torch.no_grad():
        for name, value in state.items():
            if name not in entries:
                raise ValueError(
                    f"State entry '{name}' is not in {type(module).__name__}. Send only names that it has."
                )
            if entries[name].shape != value.shape:
                raise ValueError(
                    f"State entry '{name}' has shape {tuple(value.shape)}, but {type(module).__name__} holds "
                    f"{tuple(entries[name].shape)}. Both sides must build the same model."
                )
            entries[name].copy_(value)
    if keeps_vectors(state):
        settle(module, entries)


def state_digest(state: State) -> str:
    """Return a hash of named tensors: of names, shapes, dtypes and bits."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        for piece in flat.split(2**20) if flat.numel() else ():
            # numpy asks to write: a lazy clone would be no more
            digest.update(piece.clone().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def optimizers_in(value: Any) -> list[Optimizer]:
    """The optimizers in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(value, Optimizer):
        return [value]
    if isinstance(value, Mapping):
        return optimizers_in(value.get("optimizer"))
    if isinstance(value, list | tuple):
        return [optimizer for item in value for optimizer in optimizers_in(item)]
    return []

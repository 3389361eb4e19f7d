"""Arithmetic on model states: dictionaries from `state_dict` names to tensors.

A *state* is what clients and the server exchange. The functions here never use the code of a module. All they need to
know about one is the kind of each entry (`entry_kinds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
EntryKind = Literal["trainable", "float_buffer", "int_buffer", "frozen"]


def module_state(module: nn.Module, names: Iterable[str] | None = None) -> State:
    """Return the tensors of `module.state_dict()`, detached and sharing memory with the module.

    Args:
        module: Any module. Entries that are not tensors (`_extra_state`) are left out.
        names: Entries to keep, returned in the module's order. `None` keeps all.

    Example:
        >>> from torch import nn
        >>> from fedlightning.algorithm import module_state
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
        >>> from fedlightning.algorithm import entry_kinds
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

    Args:
        module: The module to write to.
        state: New values of some or all of its entries.

    Raises:
        ValueError: If a name is not in the module or a shape differs. The message names the entry.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.algorithm import load_state
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


def select(state: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """Return the entries of `state` that are in `names`, in the state's order.

    Args:
        state: Any state.
        names: Entries to keep. Names that the state does not have are ignored.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import select
        >>> list(select({"a": torch.ones(1), "b": torch.ones(1)}, ["b", "c"]))
        ['b']
    """
    chosen = set(names)
    return {name: value for name, value in state.items() if name in chosen}


def clone(state: Mapping[str, Tensor], device: torch.device | str | None = None) -> State:
    """Return a copy of every tensor, detached.

    Args:
        state: Any state.
        device: Device of the copies. `None` keeps each tensor on its own.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import clone
        >>> state = {"w": torch.zeros(2)}
        >>> copy = clone(state)
        >>> _ = copy["w"].add_(1)
        >>> state["w"], copy["w"]
        (tensor([0., 0.]), tensor([1., 1.]))
    """
    return {name: value.detach().to(device=device or value.device, copy=True) for name, value in state.items()}


FEW = 8
"""Up to this many tensors that already are on the CPU are copied one by one, which is cheaper than packing them."""


def pack(state: Mapping[str, Tensor]) -> State:
    """Return copies of all tensors on the CPU, those of one dtype next to each other in one block of memory.

    Operations on all of them can then run as one operation (see `side_by_side`), and a GPU sends them in one transfer.
    Up to `FEW` tensors that already are on the CPU are copied one by one instead.

    Args:
        state: Any state.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import pack, side_by_side
        >>> packed = pack({f"w{i}": torch.ones(2) for i in range(9)})
        >>> side_by_side(list(packed.values())).shape
        torch.Size([18])
    """
    if len(state) <= FEW and all(value.device.type == "cpu" for value in state.values()):
        return {name: value.detach().clone() for name, value in state.items()}
    packed: State = {}
    for dtype in {value.dtype for value in state.values()}:
        part = {name: value.detach() for name, value in state.items() if value.dtype == dtype}
        flat = torch.cat([value.reshape(-1) for value in part.values()]).cpu()
        pieces = flat.split([value.numel() for value in part.values()])
        packed |= {name: piece.view(part[name].shape) for name, piece in zip(part, pieces, strict=True)}
    return {name: packed[name] for name in state}


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one tensor that shares their memory, or `None` if they are not adjacent in it.

    Args:
        tensors: At least one tensor. They are adjacent if each one is contiguous, starts where the one before it ends,
            and has the same dtype and storage.

    Returns:
        A view of shape `(numbers,)`, where `numbers` is the total number of elements.

    Example:
        >>> import torch
        >>> from fedlightning.tensors import side_by_side
        >>> side_by_side(torch.arange(5).split([2, 3]))
        tensor([0, 1, 2, 3, 4])
        >>> side_by_side([torch.ones(2), torch.ones(2)]) is None
        True
    """
    first = tensors[0]
    start = first.data_ptr()
    end, dtype, width = start, first.dtype, first.element_size()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype != dtype or not tensor.is_contiguous():
            return None
        end += tensor.numel() * width
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # adjacent by chance
        return None
    return first.as_strided(((end - start) // width,), (1,), first.storage_offset())


def zeros_like(state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> State:
    """Return zeros in the shape of each entry, in float32 or wider.

    Accumulators and control variates are kept in that precision even if the model is not.

    Args:
        state: Any state.
        names: Entries to keep. `None` keeps all.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import zeros_like
        >>> zeros_like({"w": torch.ones(2, dtype=torch.bfloat16)})
        {'w': tensor([0., 0.])}
    """
    chosen = set(state if names is None else names)
    return {
        name: torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
        for name, value in state.items()
        if name in chosen
    }


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> State:
    """Return `a - b` for every name of `b`.

    Args:
        a: A state with at least the names of `b`.
        b: The state to subtract.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import subtract
        >>> subtract({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
        {'w': tensor([2.])}
    """
    return {name: a[name] - value for name, value in b.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> State:
    """Return `a + alpha * b` for every name of `b`; entries only in `a` are passed through.

    Args:
        a: Any state. The result has its names.
        b: The state to add.
        alpha: Factor of `b`.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import add
        >>> add({"w": torch.tensor([1.0]), "n": torch.tensor(7)}, {"w": torch.tensor([2.0])}, alpha=0.5)
        {'w': tensor([2.]), 'n': tensor(7)}
    """
    return {name: torch.add(value, b[name], alpha=alpha) if name in b else value for name, value in a.items()}


def interpolate(a: Mapping[str, Tensor], b: Mapping[str, Tensor], weight: float) -> State:
    """Return `weight * a + (1 - weight) * b` for every name of `b`: exactly `b` at 0 and exactly `a` at 1.

    Integer entries cannot be mixed and are taken from `b`.

    Args:
        a: A state with at least the names of `b`.
        b: The other state. The result is on its devices and in its dtypes.
        weight: Share of `a`.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import interpolate
        >>> interpolate({"w": torch.tensor([4.0])}, {"w": torch.tensor([0.0])}, weight=0.25)
        {'w': tensor([1.])}
    """
    mixed: State = {}
    for name, value in b.items():
        if not value.is_floating_point() or weight == 0.0:
            mixed[name] = value
        elif weight == 1.0:
            mixed[name] = a[name]
        else:
            mixed[name] = (weight * a[name].to(value.device) + (1.0 - weight) * value).to(value.dtype)
    return mixed


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance of two states over the names of `b`, accumulated in float64.

    Args:
        a: A state with at least the names of `b`.
        b: The other state.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import distance
        >>> distance({"v": torch.tensor([3.0]), "w": torch.tensor([4.0])}, {"v": torch.zeros(1), "w": torch.zeros(1)})
        5.0
    """
    return sum(float((a[name].double() - value.double()).square().sum()) for name, value in b.items()) ** 0.5


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return True if both states hold the same names with the same values, bit for bit.

    Args:
        a: Any state.
        b: The other state. The order of names does not matter.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import equal
        >>> equal({"w": torch.ones(2)}, {"w": torch.ones(2)}), equal({"w": torch.ones(2)}, {})
        (True, False)
    """
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def first_nonfinite(state: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity, or `None`.

    Args:
        state: Any state. Only floating-point entries are checked.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import first_nonfinite
        >>> first_nonfinite({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
        'b'
    """
    floats = [value for value in state.values() if value.is_floating_point()]
    whole = side_by_side(floats) if len(floats) > 1 else None
    if whole is not None and math.isfinite(whole.sum()):
        return None
    for name, value in state.items():
        if not value.is_floating_point() or math.isfinite(
            value.sum()
        ):  # a NaN or infinity would make the sum non-finite
            continue
        if not bool(torch.isfinite(value).all()):  # a sum of finite values can overflow
            return name
    return None


NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes narrower than float64, the dtype of the sums."""


class WeightedMean:
    r"""Streaming weighted mean of states: :math:`\sum_i n_i w_i / \sum_i n_i` per name.

    Terms are added in float64 in the order of the calls, and the sum is divided once. The mean of a single state and
    the mean of identical states are therefore exact. A name that only some states hold is averaged over those. Integer
    entries are never averaged: the value of the first state is taken. Memory: one accumulator for any number of states.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import WeightedMean
        >>> mean = WeightedMean()
        >>> mean.add({"w": torch.tensor([0.0])}, weight=30)
        >>> mean.add({"w": torch.tensor([4.0])}, weight=10)
        >>> mean.result()
        {'w': tensor([1.])}
    """

    def __init__(self) -> None:
        self._sums: State = {}
        self._totals: dict[str, float] = {}
        self._like: State = {}
        self._identical: dict[str, bool] = {}
        self._whole: Tensor | None = None  # all sums as one tensor, if they are adjacent in memory
        self._shapes: dict[str, torch.Size] = {}  # of those sums

    def add(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Add a state to the mean.

        Args:
            state: Any state.
            weight: Its weight. A weight of zero adds nothing.

        Raises:
            ValueError: If the weight is negative or not finite, or the shape of an entry differs from earlier states.
        """
        if not 0.0 <= weight < float("inf"):
            raise ValueError(f"A weight of {weight} cannot be averaged. Weights must be finite and not negative.")
        if weight == 0.0:
            return
        done = self._added_at_once(state, weight)
        for name, value in state.items():
            if name in done:
                continue
            value = value.detach()
            if name not in self._like:
                self._like[name] = value
                self._totals[name] = weight
                self._identical[name] = True
                if value.is_floating_point():
                    self._sums[name] = value.to(torch.float64, copy=True).mul_(weight)
                elif value.is_complex():
                    self._sums[name] = value.to(torch.complex128, copy=True).mul_(weight)
                continue
            first = self._like[name]
            if first.shape != value.shape:
                raise ValueError(
                    f"Entry '{name}' has shape {tuple(value.shape)} in one update and {tuple(first.shape)} in another. "
                    "Clients of one model must send the same shapes."
                )
            self._totals[name] += weight
            if name in self._sums:
                if self._identical[name] and value.dtype in (torch.float64, torch.complex128):
                    self._identical[name] = torch.equal(first, value)
                self._sums[name].add_(value if value.device == first.device else value.to(first.device), alpha=weight)

    def _added_at_once(self, state: Mapping[str, Tensor], weight: float) -> Mapping[str, Tensor]:
        """Add the entries that are adjacent in memory, as their sums are, in one operation. Return those entries."""
        dtype = next((value.dtype for value in state.values() if value.dtype in NARROW), None)
        part = {name: value for name, value in state.items() if value.dtype == dtype}
        values = list(part.values())
        whole = side_by_side(values) if values else None
        if whole is None:
            return {}
        if not self._like:
            self._whole = whole.to(torch.float64, copy=True).mul_(weight)
            sums = self._whole.split([value.numel() for value in values])
            self._sums = {name: own.view(part[name].shape) for name, own in zip(part, sums, strict=True)}
            self._like, self._shapes = dict(part), {name: value.shape for name, value in part.items()}
            self._totals, self._identical = dict.fromkeys(part, weight), dict.fromkeys(part, True)
            return part
        if self._whole is None or self._whole.device != whole.device or dtype != next(iter(self._like.values())).dtype:
            return {}
        if list(self._shapes.items()) != [(name, value.shape) for name, value in part.items()]:
            return {}
        self._whole.add_(whole, alpha=weight)
        for name in part:
            self._totals[name] += weight
        return part

    def result(self) -> State:
        """Return the mean, each entry in its own dtype; an empty state if nothing was added."""
        mean: State = {}
        for name, first in self._like.items():
            if name not in self._sums or (first.dtype in (torch.float64, torch.complex128) and self._identical[name]):
                mean[name] = first.clone()  # n * w / n can round in float64: identical values stay as they are
            else:
                mean[name] = (self._sums[name] / self._totals[name]).to(first.dtype)
        return mean

"""Arithmetic over named tensors: what a model's state is on the wire and on the server.

A *state* is a plain ``dict`` from ``state_dict`` names to tensors. Nothing here knows a module's code; the only fact it
needs of one is the kind of each entry (:func:`entry_kinds`).
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
    """The tensors of ``module.state_dict()``, detached and sharing memory with the module.

    Args:
        module: any module; entries that are not tensors (``_extra_state``) are left out.
        names: keep only these, in the module's order.
    """
    wanted = None if names is None else set(names)
    return {
        name: value.detach()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and (wanted is None or name in wanted)
    }


def entry_kinds(module: nn.Module) -> dict[str, EntryKind]:
    """The kind of every state entry: ``trainable`` | ``frozen`` parameters, ``float_buffer`` | ``int_buffer``.

    Ask before any phase freezes anything: the kinds of a federation are fixed at its start. Complex buffers count as
    float buffers, booleans as integers. Tied parameters have the same kind under each of their names.
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
    """For every entry that is known by several names: all of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in group}


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the entries of ``module`` that it names; other entries stay.

    Raises:
        ValueError: if a name is not in the module or a shape differs; the sentence names the entry.
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
    """The entries of ``state`` under ``names``, in the state's order."""
    wanted = set(names)
    return {name: value for name, value in state.items() if name in wanted}


def clone(state: Mapping[str, Tensor], device: torch.device | str | None = None) -> State:
    """A copy of every tensor (on ``device``, or where each is)."""
    return {name: value.detach().to(device=device or value.device, copy=True) for name, value in state.items()}


FEW = 8
"""Tensors that are not worth being put side by side."""


def pack(state: Mapping[str, Tensor]) -> State:
    """A copy of every tensor on the CPU, those of one dtype side by side in one piece of memory.

    What is done to all of them can then be done at once (see :func:`side_by_side`), and leaves a GPU in one transfer. A
    few that are on the CPU already are copied one by one, which is cheaper.
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
    """The tensors as one, shape ``(numbers,)``, sharing their memory, if they lie in it one after the other."""
    first = tensors[0]
    start = first.data_ptr()
    end, dtype, width = start, first.dtype, first.element_size()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype != dtype or not tensor.is_contiguous():
            return None
        end += tensor.numel() * width
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.as_strided(((end - start) // width,), (1,), first.storage_offset())


def zeros_like(state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> State:
    """Zeros in the shape of each entry, in fp32 at least (accumulators and control variates are kept so)."""
    wanted = set(state if names is None else names)
    return {
        name: torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
        for name, value in state.items()
        if name in wanted
    }


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> State:
    """``a - b`` for every name of ``b``."""
    return {name: a[name] - value for name, value in b.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> State:
    """``a + alpha * b`` for every name of ``b``; entries only in ``a`` pass through."""
    return {name: torch.add(value, b[name], alpha=alpha) if name in b else value for name, value in a.items()}


def interpolate(a: Mapping[str, Tensor], b: Mapping[str, Tensor], weight: float) -> State:
    """``weight * a + (1 - weight) * b`` for every name of ``b``; exactly ``b`` at 0 and exactly ``a`` at 1.

    Integer entries cannot be mixed and are ``b``'s.
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
    """Euclidean distance over the names of ``b``, accumulated in float64."""
    return sum(float((a[name].double() - value.double()).square().sum()) for name, value in b.items()) ** 0.5


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if both hold the same names with the same values, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def first_nonfinite(state: Mapping[str, Tensor]) -> str | None:
    """The first name whose tensor holds a NaN or an infinity, or ``None``."""
    floats = [value for value in state.values() if value.is_floating_point()]
    whole = side_by_side(floats) if len(floats) > 1 else None
    if whole is not None and math.isfinite(whole.sum()):
        return None
    for name, value in state.items():
        if not value.is_floating_point() or math.isfinite(value.sum()):  # one NaN or infinity makes the sum one too
            continue
        if not bool(torch.isfinite(value).all()):  # a sum of finite values can overflow
            return name
    return None


NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""Types whose sums are wider than they are."""


class WeightedMean:
    r"""Streaming weighted mean of states: :math:`\sum_i n_i w_i / \sum_i n_i` per name.

    Each term is accumulated in float64 in the order of the calls and divided once, so the mean is exact for one
    state and for identical states. A name that only some states hold is averaged over those. Integer entries are
    never averaged: the first state's value is taken. Memory: one accumulator, whatever the number of states.
    """

    def __init__(self) -> None:
        self._sums: State = {}
        self._totals: dict[str, float] = {}
        self._like: State = {}
        self._identical: dict[str, bool] = {}
        self._whole: Tensor | None = None  # the sums as one, where they lie side by side
        self._shapes: dict[str, torch.Size] = {}  # of those

    def add(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Fold in ``state``. A weight of zero adds nothing.

        Raises:
            ValueError: if the weight is negative or not finite, or an entry's shape differs from the earlier ones.
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
        """The entries that lay side by side in memory as their sums do, and were added in one sweep."""
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
        """The mean of what was folded in, in each entry's own dtype; empty if nothing was."""
        mean: State = {}
        for name, first in self._like.items():
            if name not in self._sums or (first.dtype in (torch.float64, torch.complex128) and self._identical[name]):
                mean[name] = first.clone()  # in float64 n * w / n can round: identical values are passed on as they are
            else:
                mean[name] = (self._sums[name] / self._totals[name]).to(first.dtype)
        return mean

"""The models of many clients as one: every parameter and buffer with a leading client axis, but a frozen network once.

Dropout on a stack: each client's masks are drawn from its own addressed generator, as when it trains alone.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection

from fedlightning.client.kept import PARTS_OF_MODULES
from fedlightning.compat.lazy_clones import lazy_clone
from fedlightning.fast.module_copier import ATOMIC
from fedlightning.tensors import State, dense, is_same, state_digest


class _Noise(torch.autograd.Function):
    """Scaled dropout noise: without a gradient, and with one mask for each client under :func:`torch.func.vmap`."""

    @staticmethod
    def forward(row: Tensor, draw: Callable[..., Tensor], shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
        return draw(shape, p, dtype, row.device)[0]  # a stack of one client

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing, since there is no gradient."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        row: Tensor,
        draw: Callable[..., Tensor],
        shape: torch.Size,
        p: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, int]:
        return draw(shape, p, dtype, row.device), 0


class ClientDraws(TorchFunctionMode):
    """Context in which dropout draws from one generator for each client of the step.

    On the CPU the numbers are those that `torch.nn.functional.dropout` draws from the same generator. Other random
    functions are left to `vmap`, which refuses them.

    Attributes:
        generators: The clients' generators.
        row: A tensor of the map, through which dropout learns that it is mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generators: Sequence[torch.Generator] = ()
        self.row: Tensor | None = None

    def noise(self, shape: torch.Size, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return masks `(clients, *shape)`: 0 with probability `p`, else `1 / (1 - p)`."""
        drawn = torch.empty((len(self.generators), *shape), dtype=dtype)
        for mask, generator in zip(drawn, self.generators, strict=True):
            mask.bernoulli_(1 - p, generator=generator)
        return drawn.div_(1 - p).to(device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.dropout or func is F.dropout2d:
            return self._dropout(func is F.dropout2d, *args, **(kwargs or {}))
        if func is torch.dropout:
            return self._dropout(False, args[0], *args[1:], **{_NAMES.get(k, k): v for k, v in (kwargs or {}).items()})
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0 or input.numel() == 0:
            return input
        if channels and input.dim() != 4:
            raise RuntimeError("dropout2d of a stack takes inputs (N, C, H, W)")
        shape = torch.Size((*input.shape[:2], 1, 1)) if channels else input.shape
        if p == 1:
            noise = input.new_zeros(())
        else:
            noise = cast(Tensor, _Noise.apply(self.row, self.noise, shape, p, input.dtype))
        return input.mul_(noise) if inplace else input * noise


_NAMES = {"train": "training"}


Rows = slice | list[int]
"""Clients of a stack: a slice where they are adjacent (views are taken), else their numbers (copies)."""


def named_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return parameters and buffers of a module, each once. A tied parameter goes by the last of its names."""
    last = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    return {last[id(p)]: p for p in module.parameters()}, dict(module.named_buffers())


class Stack:
    """Parameters and buffers of several clients' modules of one architecture.

    Args:
        module: One of the modules.
        size: Number of clients.
        device: Device of the stack.
        shared: Parameters that are the same for all clients, by name; one that the module trains is not shared.

    Attributes:
        parameters: Names of the parameters.
        buffers: Names of the buffers.
        shared: What is in memory once: lazy clones of what was given.
        tensors: By name, the other ones, stacked: `(size, ...)`.
    """

    def __init__(self, module: nn.Module, size: int, device: torch.device, shared: State | None = None) -> None:
        parameters, buffers = named_tensors(module)
        self.size, self.device = size, device
        self.parameters = tuple(parameters)
        self.buffers = tuple(buffers)
        trained = {name for name, value in parameters.items() if value.requires_grad}  # a callback may have thawed it
        self._before = {name: value for name, value in (shared or {}).items() if name in parameters.keys() - trained}
        self.shared = {name: lazy_clone(value).to(device) for name, value in self._before.items()}
        self.tensors = {
            name: torch.empty((size, *value.shape), dtype=value.dtype, device=device)
            for name, value in (parameters | buffers).items()
            if name not in self.shared
        }

    def find_written(self) -> str | None:
        """Return the first shared parameter that is not any more what was given."""
        return next((name for name, value in self.shared.items() if not is_same(value, self._before[name])), None)

    def take(self, name: str, rows: Rows) -> Tensor:
        """Return rows of an entry; one that is shared as it is."""
        return self.shared[name] if name in self.shared else take(self.tensors[name], rows)

    @torch.no_grad()
    def fill(self, states: Sequence[State]) -> None:
        """Copy each client's entries into its row. An entry that is the same object for all is read once."""
        for name, stacked in self.tensors.items():
            first = states[0][name]
            if all(state[name] is first for state in states):
                stacked.copy_(first)
            else:
                torch.stack([state[name].to(stacked.device) for state in states], out=stacked)

    def row(self, number: int) -> State:
        """Return a client's entries, which share memory with the stack."""
        names = (*self.parameters, *self.buffers)
        return {name: self._before[name] if name in self.shared else self.tensors[name][number] for name in names}

    def to_cpu(self) -> None:
        """Move the stack to the CPU."""
        self.tensors = {name: stacked.detach().cpu() for name, stacked in self.tensors.items()}

    @torch.no_grad()
    def pull(self, row: int, module: nn.Module) -> None:
        """Copy the tensors of a module into a row."""
        for name, value in self._stacked_in(module):
            self.tensors[name][row].copy_(value)

    @torch.no_grad()
    def push(self, row: int, module: nn.Module) -> None:
        """Copy a row into a module."""
        for name, value in self._stacked_in(module):
            value.copy_(self.tensors[name][row])

    def _stacked_in(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for part in named_tensors(module) for name, value in part.items() if name in self.tensors)


def side_by_side(rows: Sequence[int]) -> Rows:
    """Return ascending row numbers as a slice if they have no gap."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else list(rows)


def take(tensor: Tensor, rows: Rows) -> Tensor:
    """Return rows of a stacked tensor."""
    return tensor[rows]


def put(tensor: Tensor, rows: Rows, values: Tensor) -> None:
    """Write rows back that :func:`take` returned; nothing to do where that was a view."""
    if not isinstance(rows, slice):
        tensor[rows] = values


def column(values: Sequence[float], like: Tensor) -> float | Tensor:
    """Return one number for each row, shaped to multiply `like`; a plain number where all are equal."""
    if all(value == values[0] for value in values):
        return values[0]
    wide = torch.tensor(values, dtype=torch.float64).to(like.device, like.dtype)
    return wide.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class _Slot:
    index: int


def split_tree(tree: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of a batch, and the batch with a placeholder in place of each."""
    tensors: list[Tensor] = []

    def slot_of(tensor: Tensor) -> _Slot:
        tensors.append(tensor)
        return _Slot(len(tensors) - 1)

    return tensors, apply_to_collection(tree, Tensor, slot_of)


def join_tree(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the tree that :func:`split_tree` took apart, with these tensors."""
    return apply_to_collection(skeleton, _Slot, lambda slot: tensors[slot.index])


class NotATreeError(ValueError):
    """A batch holds an object that may hide tensors: its text need not tell what they are.

    Args:
        kind: Class of the object.
    """

    def __init__(self, kind: type) -> None:
        super().__init__(f"a batch holds a {kind.__name__}, which is not made of dicts, lists and tuples of tensors")


def skeleton_key(skeleton: Any) -> Hashable:
    """Return a key that is equal for skeletons of :func:`split_tree` only if all they hold is equal.

    Example:
        >>> skeleton_key({"label": [1, "a"]}) == skeleton_key({"label": [1, "b"]})
        False
    """
    kind = type(skeleton)
    if kind in (_Slot, str, bytes, int, float, bool, type(None)):
        return kind, skeleton
    if isinstance(skeleton, Mapping):
        return kind, tuple((key, skeleton_key(value)) for key, value in skeleton.items())
    if isinstance(skeleton, list | tuple):
        return kind, tuple(skeleton_key(value) for value in skeleton)
    if is_dataclass(skeleton):
        return kind, tuple(skeleton_key(getattr(skeleton, entry.name)) for entry in fields(skeleton))
    raise NotATreeError(kind)


BARE = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: its tensors, parts and hooks."""
PLAIN = frozenset((bool, int, float, str, type(None)))
NOTES = frozenset(("_current_fx_name", "_metric_attributes"))
"""Attributes in which Lightning notes the running hook of a module, and the addresses of its metrics."""


def architecture_key(module: nn.Module) -> Hashable:
    """Return a key: modules with equal keys can train in one stack, where the code of one of them runs for all.

    They have the same parts, tensors, parameters that train, and attributes that a step may read.
    """
    tensors = [
        (name, value.shape, value.dtype, value.requires_grad)
        for part in named_tensors(module)
        for name, value in part.items()
    ]
    contents = Contents(module)
    parts = [
        (path, type(part), attributes_key(part, contents))
        for path, part in module.named_modules()
        if not isinstance(part, Metric | MetricCollection)
    ]
    return tuple(tensors), tuple(parts)


def attributes_key(module: nn.Module, contents: Contents) -> Hashable:
    """Return a key of a part's attributes and hooks, equal only where their contents are.

    Args:
        module: The part.
        contents: What objects of the whole module hold.
    """
    return tuple(
        (name, len(value))
        if name in PARTS_OF_MODULES
        else (name, contents.key(tuple(value.values()) if name in BARE else value))
        for name, value in vars(module).items()
        if name not in NOTES and (name not in BARE or (isinstance(value, dict) and value))
    )


def find_held(module: nn.Module) -> str | None:
    """Return the first attribute that holds a parameter or buffer once more, where a stack does not take its place."""
    entries = {id(value) for part in named_tensors(module) for value in part.values()}
    paths = Contents(module).paths
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            reader = _Reader(_Digest(), paths)
            with suppress(Exception):  # what was met before counts
                reader.dump(None if name in BARE else value)
            if not entries.isdisjoint(map(id, reader.tensors)):
                return ".".join(filter(None, ("self", path, name)))
    return None


class Contents:
    """What the attributes of a module hold.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(part): path for path, part in module.named_modules()}
        self._keys: dict[int, tuple[Hashable, Any]] = {}  # with the object, whose address is then not given to another

    def key(self, value: Any) -> Hashable:
        """Return a key that is equal only for equal contents; what cannot be read equals itself only."""
        kind: Any = type(value)
        if kind in PLAIN:
            return kind, repr(value)  # -0.0 is not 0.0, and NaN is NaN
        if id(value) not in self._keys:
            digest = _Digest()
            key: Hashable = id(value)
            with suppress(Exception):
                _Reader(digest, self.paths).dump(value)
                key = digest.hash.digest()
            self._keys[id(value)] = key, value
        return kind, self._keys[id(value)][0]


class _Digest:
    """A file of which the hash alone is kept: an attribute may be large, and there is a key for each client."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> None:
        self.hash.update(data)


class _Reader(pickle.Pickler):
    """Writes what an object holds: tensors by their values, parts of the module by their paths, what has no copies as it is.

    Args:
        file: Where to.
        paths: Where the parts of the module are.

    Attributes:
        tensors: Tensors that it has met.
    """

    def __init__(self, file: _Digest, paths: Mapping[int, str]) -> None:
        super().__init__(file, protocol=4)
        self._paths = paths
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            self.tensors.append(obj)
            return state_digest({"": dense(obj.detach())}), obj.requires_grad
        if isinstance(obj, ATOMIC) and not isinstance(obj, torch.device):
            return id(obj)
        return self._paths.get(id(obj)) if isinstance(obj, nn.Module) else None

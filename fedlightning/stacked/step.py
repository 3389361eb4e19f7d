"""One step of many clients: the module's own `training_step` under :func:`torch.func.vmap`.

The gradient comes from ordinary autograd on the stacked parameters. No client's loss depends on another's parameters,
so the gradient of all losses at once holds every client's own gradient in its row. A parameter that the loss does not
reach has none, as in a plain backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.compat.attached import attached
from fedlightning.fast.log_sheet import LogCall
from fedlightning.stacked.kernels import StackKernels
from fedlightning.stacked.logs import StepLog
from fedlightning.stacked.map import over_clients
from fedlightning.stacked.random import ClientDraws
from fedlightning.stacked.stack import join_tree, named_tensors, split_tree


class NoLossError(Exception):
    """`training_step` returned no loss: the batch is skipped."""


class Watch:
    """Notes whether a step reads its position. Only if it does not, clients at other positions may join it."""

    looked = False


class NotedIndex(int):
    """A batch index that tells a :class:`Watch` when it is used."""

    watch: Watch


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def look(self: NotedIndex, *args: Any) -> Any:
        self.watch.looked = True
        return plain(self, *args)

    return look


for _name in (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__index__", "__int__"),
    *("__float__", "__str__", "__repr__", "__format__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__"),
    *("__rmul__", "__mod__", "__rmod__", "__floordiv__", "__truediv__", "__divmod__", "__pow__", "__and__", "__neg__"),
):
    setattr(NotedIndex, _name, _noting(_name))


@dataclass(frozen=True)
class Place:
    """Position of the clients of a step: batch in the epoch, epoch, optimizer step of the visit, all from 0."""

    batch: int = 0
    epoch: int = 0
    step: int = 0


class StepClock:
    """Stand-in for `self.trainer` in a stacked `training_step`: its epoch and its step."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.place = Place()

    @property
    def current_epoch(self) -> int:
        """Epoch of the visit."""
        self._watch.looked = True
        return self.place.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps of the visit."""
        self._watch.looked = True
        return self.place.step

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name} is not there when many clients train in one stack")


class Slots:
    """The places of named tensors in a module, which `torch.func.functional_call` looks up anew at every call.

    They are entries of the dicts in which :class:`torch.nn.Module` keeps parameters and buffers. An assignment by name
    could replace a parameter only by another parameter.

    Args:
        module: The module.
        names: Names of parameters and buffers. A tensor is replaced under all of its names.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        named: dict[str, Tensor] = {}
        for prefix, part in module.named_modules(remove_duplicate=False):
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((held, name))
                        named[f"{prefix}.{name}" if prefix else name] = tensor
        self._places = [places[id(named[name])] for name in names]

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within the block, the module's tensors are these."""
        before = [[held[name] for held, name in places] for places in self._places]
        for places, tensor in zip(self._places, tensors, strict=True):
            for held, name in places:
                held[name] = tensor
        try:
            yield
        finally:
            for places, values in zip(self._places, before, strict=True):
                for (held, name), value in zip(places, values, strict=True):
                    held[name] = value

    def now(self, index: int) -> Tensor:
        """Return the tensor that is in the place `index` at this moment."""
        held, name = self._places[index][0]
        found: Tensor = held[name]
        return found


@dataclass
class StepResult:
    """Result of a stacked step: losses `(n,)`, and by name the logged values `(n,)`."""

    losses: Tensor
    logged: dict[str, Tensor] = field(default_factory=dict)


class StackedStep:
    """`module.training_step` for many clients at once.

    Args:
        module: Module of any client. Its code runs; its own tensors are not touched.
        context: Makes the context in which the step runs (Lightning's autocast).
        takes_index: Whether `training_step` takes the batch's index.
        draws: Gives every client its own dropout. `None`: the step draws no random numbers.

    Attributes:
        names: Names of the tensors that a call takes: parameters, then buffers.
        draws: Whether a call needs the clients' generators.
        watch: Notes whether the step reads its position.
    """

    def __init__(
        self,
        module: LightningModule,
        context: Callable[[], Any],
        takes_index: bool = True,
        draws: ClientDraws | None = None,
    ) -> None:
        parameters, buffers = named_tensors(module)
        self.names = (*parameters, *buffers)
        self._first_buffer = len(parameters)
        self._module, self._context, self._takes_index, self._draws = module, context, takes_index, draws
        self.draws = draws is not None
        self.watch = Watch()
        self._clock = StepClock(self.watch)
        self._slots = Slots(module, self.names)
        self._log = StepLog(module)
        self._kernels = StackKernels()
        self._skeleton: Any = None
        self._logged: tuple[str, ...] = ()
        self._index = NotedIndex()

    def _one(self, tensors: list[Tensor]) -> list[Tensor]:
        """Take one client's step: from its tensors and batch to loss, logged values, and buffers after the step."""
        own, leaves = tensors[: len(self.names)], tensors[len(self.names) :]
        if self._draws is not None:
            self._draws.row = leaves.pop()
        batch = leaves if self._skeleton is None else join_tree(self._skeleton, leaves)
        with self._slots.filled(own), self._log.recording() as logged:
            output = self._module.training_step(batch, *((self._index,) if self._takes_index else ()))
            moved = [self._slots.now(place) for place in range(self._first_buffer, len(self.names))]
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise NoLossError
        self._logged = tuple(logged)
        return [loss.reshape(()), *logged.values(), *moved]

    def _together(self, tensors: list[Tensor]) -> list[Tensor]:
        with self._kernels:
            return self._one(tensors)

    @property
    def log_calls(self) -> dict[str, LogCall]:
        """By name, how it was logged last."""
        return self._log.calls

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block, the module's trainer is a clock of the stack."""
        with attached(self._module, self._clock):
            yield

    def __call__(
        self, tensors: Sequence[Tensor], batch: Any, place: Place, generators: Sequence[torch.Generator] = ()
    ) -> StepResult:
        """Return losses of a batch, with their graph. Buffers move in place."""
        plain = type(batch) is list and all(type(leaf) is Tensor for leaf in batch)
        leaves, self._skeleton = (batch, None) if plain else split_tree(batch)
        self._index = NotedIndex(place.batch)
        self._index.watch, self._clock.place = self.watch, place
        given = [*tensors, *leaves]
        with self._context(), nullcontext() if self._draws is None else self._draws:
            if self._draws is not None:
                self._draws.generators = generators
                given.append(torch.arange(len(tensors[0]), device=tensors[0].device))
            if len(tensors[0]) == 1:  # no map, at half the cost: a ragged last batch often has no like
                found = [value.unsqueeze(0) for value in self._one([value.squeeze(0) for value in given])]
            else:
                found = over_clients(self._together, given)
        losses, logged = found[0], found[1 : 1 + len(self._logged)]
        with torch.no_grad():
            for own, new in zip(tensors[self._first_buffer :], found[1 + len(logged) :], strict=True):
                if new.data_ptr() != own.data_ptr():
                    own.copy_(new)
        return StepResult(losses, {name: value.detach() for name, value in zip(self._logged, logged, strict=True)})


def gradients(losses: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return every client's gradient of its own loss; `None` for a parameter that no loss reaches."""
    if not losses.requires_grad:
        return [None] * len(parameters)
    ones = torch.ones_like(losses)
    return cast("list[Tensor | None]", list(torch.autograd.grad(losses, list(parameters), ones, allow_unused=True)))


@torch.no_grad()
def clip(found: Iterable[Tensor | None], value: float, algorithm: str) -> None:
    """Clip every client's gradient in place, as Lightning does for one."""
    there = [gradient for gradient in found if gradient is not None]
    if algorithm == "value":
        for gradient in there:
            gradient.clamp_(-value, value)
        return
    if there:
        norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in there])
        factor = (value / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in there:
            gradient.mul_(factor.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)))

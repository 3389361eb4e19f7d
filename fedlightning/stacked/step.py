"""One step of many clients: the module's own `training_step` under :func:`torch.func.vmap`.

The gradient comes from ordinary autograd on the stacked parameters. No client's loss depends on another's parameters,
so the gradient of all losses at once holds every client's own gradient in its row. A parameter that the loss does not
reach has none, as in a plain backward pass.

Linear layers and losses of a whole stack, by the kernels that are fast for it.

Under :func:`torch.func.vmap` a loss such as cross entropy is decomposed into many small operations, and a linear layer
becomes a batched product in an arbitrary layout. Within :class:`StackKernels` these functions step out of the map, work
on the stacked tensors `(clients, batch, ...)`, and step back in. Values and gradients are those of the plain functions
up to the rounding of sums in another order. Cases without a rule are left to `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedlightning.compat.lightning_runs import attached
from fedlightning.fast.log_sheet import LogCall
from fedlightning.stacked.logs import StepLog
from fedlightning.stacked.map import on_stack, over_clients
from fedlightning.stacked.stack import ClientDraws, join_tree, named_tensors, split_tree

REGISTER = 16
"""Single-precision numbers in a CPU's widest register. Kernels fill registers along the last axis of their result."""


def padding(length: int) -> float:
    """Return the factor by which an axis grows when it is filled up to whole registers: 1 is best."""
    return -(-length // REGISTER) * REGISTER / max(length, 1)


class StackLinear(torch.autograd.Function):
    """`x @ weight^T + bias` for a stack.

    On a CPU the result lies in memory as `(clients, out, m)` where that fills registers better. The gradient of the
    weight is taken in the weight's own layout, which for few outputs is four times as fast as autograd's transposed
    one.

    Shapes:
        x: `(clients, m, in)`.
        weight: `(clients, out, in)`.
        bias: `(clients, out)`, or `None`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cpu" and padding(weight.shape[1]) > padding(x.shape[1]):
            factors, axis = (weight, x.transpose(1, 2)), 2
        else:
            factors, axis = (x, weight.transpose(1, 2)), 1
        out = torch.bmm(*factors) if bias is None else torch.baddbmm(bias.unsqueeze(axis), *factors)
        return out.transpose(1, 2) if axis == 2 else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if of_x else None,
            torch.bmm(grad.transpose(1, 2), x) if of_weight else None,
            grad.sum(1) if of_bias else None,
        )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Apply :func:`torch.nn.functional.linear`; not under autocast, whose casts a backward would have to repeat."""
    alike = input.dtype == weight.dtype and (bias is None or bias.dtype == input.dtype)
    if input.dim() < 2 or not alike or torch.is_autocast_enabled(input.device.type):
        return None

    def act(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = StackLinear.apply(x.flatten(1, -2), weight, bias)
        return out.unflatten(1, x.shape[1:-1]) if x.dim() > 3 else out

    return on_stack(act, (input, weight) if bias is None else (input, weight, bias))


def class_loss(
    function: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    **options: Any,
) -> Tensor | None:
    """Apply a loss for class numbers: cross entropy or negative log-likelihood.

    `function` gives every sample's loss, natively. The mean of a client divides by the weights of its samples that
    count.
    """
    plain = reduction in ("none", "mean", "sum") and not target.is_floating_point()
    if input.dim() < 2 or not plain or torch.is_autocast_enabled(input.device.type):
        return None

    def act(x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        options["weight"] = weight
        if x.dim() == 3 and narrow(x, 2):
            losses = function(x.transpose(1, 2), target, ignore_index=ignore_index, reduction="none", **options)
        else:
            each = function(
                x.flatten(0, 1), target.flatten(0, 1), ignore_index=ignore_index, reduction="none", **options
            )
            losses = each.view(target.shape)
        if reduction == "none":
            return losses
        total = losses.flatten(1).sum(1)
        if reduction == "sum":
            return total
        counts = (target != ignore_index).flatten(1)
        if weight is None:
            return total / counts.sum(1)
        weights = weight[target.flatten(1).where(counts, 0)]
        return total / (weights * counts).sum(1)

    return on_stack(act, (input, target), () if weight is None else (weight,))


def narrow(x: Tensor, axis: int) -> bool:
    """Return True if rows along the last axis are so short that one sweep over all rows is faster than one for each."""
    return axis in (x.dim() - 1, -1) and x.device.type == "cpu" and x.shape[-1] < REGISTER


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.cross_entropy`; probabilities as targets are left to `vmap`."""
    if size_average is not None or reduce is not None:
        return None
    return class_loss(F.cross_entropy, input, target, weight, ignore_index, reduction, label_smoothing=label_smoothing)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.nll_loss`."""
    if size_average is not None or reduce is not None:
        return None
    return class_loss(F.nll_loss, input, target, weight, ignore_index, reduction)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.binary_cross_entropy_with_logits` without weights."""
    if any(option is not None for option in (weight, size_average, reduce, pos_weight)):
        return None
    if reduction not in ("none", "mean", "sum") or torch.is_autocast_enabled(input.device.type):
        return None

    def act(x: Tensor, target: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(x, target, reduction="none")
        if reduction == "none":
            return losses
        return losses.flatten(1).mean(1) if reduction == "mean" else losses.flatten(1).sum(1)

    return on_stack(act, (input, target))


def log_softmax(input: Tensor, dim: int | None = None, *_: Any, **options: Any) -> Tensor | None:
    """Apply :func:`torch.nn.functional.log_softmax` for few classes: all rows of a client in one sweep."""
    if dim is None or input.dim() != 2 or not narrow(input, dim) or options.get("dtype") is not None:
        return None
    return torch.log_softmax(input.t(), 0).t()


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.embedding` with padding.

    Under torch's own map, the padding row would get no gradient for the first client only.
    """
    if padding_idx is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    embedded = F.embedding(input, weight)
    return embedded.where((input != padding_idx % weight.shape[0]).unsqueeze(-1), embedded.detach())


RULES: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.linear: linear,
    F.embedding: embedding,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.binary_cross_entropy_with_logits: binary_cross_entropy_with_logits,
    F.log_softmax: log_softmax,
}
"""By function of torch, its rule: returns the result on the whole stack, or `None` to leave the case to `vmap`."""


class StackKernels(TorchFunctionMode):
    """Context in which the functions of :data:`RULES` work on the whole stack of a `vmap` at once."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        result = None if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


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
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((tensors, name))
                        named[f"{prefix}.{name}" if prefix else name] = tensor
        self._places = [places[id(named[name])] for name in names]

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within the block, the module's tensors are these."""
        before = [[slots[name] for slots, name in places] for places in self._places]
        for places, tensor in zip(self._places, tensors, strict=True):
            for slots, name in places:
                slots[name] = tensor
        try:
            yield
        finally:
            for places, values in zip(self._places, before, strict=True):
                for (slots, name), value in zip(places, values, strict=True):
                    slots[name] = value

    def now(self, index: int) -> Tensor:
        """Return the tensor that is in the place `index` at this moment."""
        slots, name = self._places[index][0]
        tensor: Tensor = slots[name]
        return tensor


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
        shared: Names of parameters that a call takes once for all clients.

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
        shared: Collection[str] = (),
    ) -> None:
        parameters, buffers = named_tensors(module)
        self.names = (*parameters, *buffers)
        self._mapped = [name not in shared for name in self.names]
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
        entries, batch_tensors = tensors[: len(self.names)], tensors[len(self.names) :]
        if self._draws is not None:
            self._draws.row = batch_tensors.pop()
        batch = batch_tensors if self._skeleton is None else join_tree(self._skeleton, batch_tensors)
        with self._slots.filled(entries), self._log.recording() as logged:
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
        batch_tensors, self._skeleton = (batch, None) if plain else split_tree(batch)
        self._index = NotedIndex(place.batch)
        self._index.watch, self._clock.place = self.watch, place
        arguments = [*tensors, *batch_tensors]
        size = len(tensors[self._mapped.index(True)])
        mapped = [*self._mapped, *(True for _ in batch_tensors)]
        with self._context(), nullcontext() if self._draws is None else self._draws:
            if self._draws is not None:
                self._draws.generators = generators
                arguments.append(torch.arange(size, device=tensors[0].device))
                mapped.append(True)
            if size == 1:  # no map, at half the cost: a ragged last batch often has no like
                pairs = zip(arguments, mapped, strict=True)
                alone = [value.squeeze(0) if along else value for value, along in pairs]
                values = [value.unsqueeze(0) for value in self._one(alone)]
            else:
                values = over_clients(self._together, arguments, mapped)
        losses, logged = values[0], values[1 : 1 + len(self._logged)]
        with torch.no_grad():
            for buffer, new in zip(tensors[self._first_buffer :], values[1 + len(logged) :], strict=True):
                if new.data_ptr() != buffer.data_ptr():
                    buffer.copy_(new)
        return StepResult(losses, {name: value.detach() for name, value in zip(self._logged, logged, strict=True)})


def gradients(losses: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return every client's gradient of its own loss; `None` for a parameter that no loss reaches."""
    if not losses.requires_grad:
        return [None] * len(parameters)
    ones = torch.ones_like(losses)
    return cast("list[Tensor | None]", list(torch.autograd.grad(losses, list(parameters), ones, allow_unused=True)))


@torch.no_grad()
def clip(grads: Iterable[Tensor | None], value: float, algorithm: str) -> None:
    """Clip every client's gradient in place, as Lightning does for one."""
    gradients = [gradient for gradient in grads if gradient is not None]
    if algorithm == "value":
        for gradient in gradients:
            gradient.clamp_(-value, value)
        return
    if gradients:
        norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
        factor = (value / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)))

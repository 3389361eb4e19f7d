"""One evaluation step of many clients, and the calls of `self.log` and of metrics in it.

`validation_step` runs under :func:`torch.func.vmap`. Its calls of `self.log` and of torchmetrics objects are noted with
their stacked arguments. Afterwards each client's own metrics are updated with that client's rows.

Limits of a stacked evaluation: what a module may log and read while many clients are scored at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.func import vmap
from torchmetrics import Metric, MetricCollection

from fedlightning.client.evaluator import EvaluationNames, loss_of
from fedlightning.compat.lightning_runs import attached, class_takes_index
from fedlightning.errors import ControlFlow
from fedlightning.fast.log_sheet import LogCall, LogRule, log_call, scalar
from fedlightning.stacked.stack import join_tree, split_tree
from fedlightning.stacked.step import Slots


class NotStacked(ControlFlow):
    """A module does something that one stack cannot do for many clients; the message says what."""


class NoTrainer:
    """Stand-in for `self.trainer` in a stacked evaluation: reading it ends the attempt."""

    def __getattr__(self, name: str) -> Any:
        raise NotStacked(f"self.trainer.{name} is used")


@contextmanager
def evaluating(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Within the block, the module is in eval mode, has no trainer, and what it logs goes to a function."""
    modes = [(vars(child), child.training) for child in module.modules()]
    module.eval()
    vars(module)["log"] = log
    try:
        with attached(module, NoTrainer()):
            yield
    finally:
        vars(module).pop("log", None)
        for own, mode in modes:  # not by __setattr__, which is slow in a torchmetrics object
            own["training"] = mode


def plain_log(hook: str, name: str, *args: Any, **kwargs: Any) -> LogCall:
    """Return the reading of `self.log(name, value, ...)` in `hook`."""
    call = log_call(hook, name, *args, **kwargs)
    if not call.rule.reduction or call.enable_graph or not call.rule.on_epoch or "/dataloader_idx_" in name:
        raise NotStacked(f"self.log({name!r}) is not a plain value of the epoch")
    if call.batch_size is not None and type(call.batch_size) is not int:
        raise NotStacked(f"self.log({name!r}) gets batch_size={call.batch_size!r}")
    return call


@dataclass(frozen=True)
class Logged:
    """A call of `self.log`.

    Attributes:
        rule: Lightning's reading of it.
        batch_size: Weight in a mean over the epoch. `None`: the size of the batch.
        place: Index of the value among the step's outputs; `None` for a metric.
        metric: Path of the metric that was logged.
    """

    rule: LogRule
    batch_size: int | None
    place: int | None = None
    metric: str | None = None


@dataclass(frozen=True)
class MetricUpdate:
    """A call of a metric's `update`, or of the metric itself (`forward`).

    Attributes:
        metric: Path of the metric.
        forward: Whether the metric itself was called.
        skeleton: The arguments, with a placeholder in the place of each tensor.
        positional: Whether the arguments are positional tensors and nothing else.
        first: Index of the first tensor among the step's outputs.
        end: Index after the last one.
    """

    metric: str
    forward: bool
    skeleton: Any
    positional: bool
    first: int
    end: int


@dataclass
class Step:
    """Result of a stacked step.

    Attributes:
        outputs: Tensors `(n, ...)`.
        events: Calls that used them, in order.
        loss: Index of the loss among the outputs, if the step returned one.
        size: Samples in a client's batch.
    """

    outputs: Sequence[Tensor] = ()
    events: list[Logged | MetricUpdate] = field(default_factory=list)
    loss: int | None = None
    size: int = 1


class _MetricStandIn(nn.Module):
    """Replaces a metric and notes its updates. `note` is `None` for a metric that cannot be updated later."""

    def __init__(self, path: str, note: Callable[[str, bool, Any], None] | None) -> None:
        super().__init__()
        vars(self).update(path=path, note=note)

    def update(self, *args: Any, **kwargs: Any) -> None:
        if self.note is None:
            raise NotStacked(f"the collection of metrics {self.path!r} is used")
        self.note(self.path, False, (args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> object:
        if self.note is None:
            raise NotStacked(f"the collection of metrics {self.path!r} is used")
        self.note(self.path, True, (args, kwargs))
        return object()  # stands for the batch's own value, known only after the real update

    def __getattr__(self, name: str) -> Any:
        raise NotStacked(f"the attribute {name!r} of the metric {self.path!r} is used")


def metrics_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield the metrics inside a module, outermost ones only, as (path, parent, attribute, metric)."""
    for name, child in module.named_children():
        if isinstance(child, Metric | MetricCollection):
            yield f"{prefix}{name}", module, name, child
        else:
            yield from metrics_of(child, f"{prefix}{name}.")


class ScoringStep:
    """`validation_step` or `test_step` for many clients at once.

    Args:
        module: Its code runs, within :meth:`attached`. Its own tensors are not touched.
        evaluation: Names of validation, or of testing.
        precision: Lightning's precision plugin, for autocast.
        names: Names of the tensors that a call takes.
        shared: Whether these are the same for all clients.
    """

    def __init__(
        self,
        module: LightningModule,
        evaluation: EvaluationNames,
        precision: Precision,
        names: Sequence[str],
        shared: bool,
    ) -> None:
        self._module, self._context, self._shared = module, evaluation.context(precision), shared
        self._hook = evaluation.step
        self._indexed = class_takes_index(type(module), evaluation.step)
        self._slots = Slots(module, names)
        self._index, self._skeleton = 0, None
        self._outputs: list[Tensor] = []
        self._step = Step()
        self._map = vmap(self._one, in_dims=(None if shared else 0, 0), randomness="error")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block, the module is in eval mode, and its calls of `self.log` and of metrics are noted."""
        metrics = list(metrics_of(self._module))
        with evaluating(self._module, self._log):
            for path, parent, name, metric in metrics:
                setattr(parent, name, _MetricStandIn(path, self._feed if isinstance(metric, Metric) else None))
            try:
                yield
            finally:
                for _, parent, name, metric in metrics:
                    setattr(parent, name, metric)

    def __call__(self, tensors: Sequence[Tensor], batch: Any, clients: int, index: int) -> Step:
        """Run the step."""
        leaves, self._skeleton = split_tree(batch)
        self._index, own = index, tuple(tensors)
        with self._context():
            outputs = self._map(own, leaves) if clients > 1 else self._alone(own, leaves)
        self._step.outputs = [output.detach() for output in outputs]
        return self._step

    def _alone(self, tensors: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
        """Run the step of one client, which needs no map."""
        own = tensors if self._shared else tuple(tensor.squeeze(0) for tensor in tensors)
        return [value.unsqueeze(0) for value in self._one(own, [leaf.squeeze(0) for leaf in leaves])]

    def _one(self, tensors: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        self._step, self._outputs = Step(), []
        batch = join_tree(self._skeleton, leaves)
        self._step.size = extract_batch_size(batch)
        with self._slots.filled(tensors):
            output = getattr(self._module, self._hook)(batch, *((self._index,) if self._indexed else ()))
            if any(self._slots.now(place) is not own for place, own in enumerate(tensors)):
                raise NotStacked("a buffer is replaced")
        loss = loss_of(output)
        if loss is not None:
            self._step.loss = self._add(loss.reshape(()))
        if not self._outputs:
            raise NotStacked("nothing is logged or returned")
        return tuple(self._outputs)

    def _add(self, value: Tensor) -> int:
        self._outputs.append(value)
        return len(self._outputs) - 1

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        call = plain_log(self._hook, name, *args, **kwargs)
        if isinstance(value, _MetricStandIn):
            event = Logged(call.rule, call.batch_size, metric=value.path)
        else:
            event = Logged(call.rule, call.batch_size, self._add(scalar(name, value, NotStacked)))
        self._step.events.append(event)

    def _feed(self, path: str, forward: bool, arguments: Any) -> None:
        tensors, skeleton = split_tree(arguments)
        first = len(self._outputs)
        self._outputs += tensors
        args, kwargs = arguments
        positional = not kwargs and all(isinstance(argument, Tensor) for argument in args)
        self._step.events.append(MetricUpdate(path, forward, skeleton, positional, first, len(self._outputs)))

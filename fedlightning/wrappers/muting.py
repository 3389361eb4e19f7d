"""Run a module's step once more without side effects: no log entries, no metric updates, no moved buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@contextmanager
def muted(module: nn.Module) -> Iterator[None]:
    """Silence `self.log` and `self.log_dict` and protect the torchmetrics of `module` inside the block.

    Works with and without a Trainer, and nested. Metrics registered as submodules are replaced by scratch copies, which
    are made once per module and reset after every use. Not protected are metrics in plain Python lists and direct calls
    such as `self.logger.experiment.add_scalar`.

    Args:
        module: The module whose steps are run in the block.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import muted
        >>> module = Classifier(MLP(4, [3], 2), num_classes=2)
        >>> with muted(module):
        ...     module.validation_step((torch.zeros(5, 4), torch.zeros(5, dtype=torch.long)), 0)
        >>> module.val_metrics.update_called
        False
    """
    spares = _SCRATCH.get(module)
    if spares is None:
        spares = _SCRATCH[module] = {}
    undo: list[Callable[[], None]] = []
    try:
        for name, metric in _metrics(module):
            if any(spare.copy is metric for spare in spares.values()):
                continue  # muted already, by a block around this one
            parent, _, attribute = name.rpartition(".")
            _swap(module.get_submodule(parent), attribute, _spare(spares, name, metric), undo)
        for child in module.modules():
            if isinstance(child, LightningModule):
                for attribute in ("log", "log_dict"):
                    _shadow(child, attribute, undo)
        yield
    finally:
        for restore in reversed(undo):
            restore()
        for spare in spares.values():
            spare.copy.reset()  # type: ignore[operator]


@contextmanager
def frozen_buffers(module: nn.Module, only: Callable[[str], bool] | None = None) -> Iterator[None]:
    """Restore every buffer (BatchNorm statistics, counters) after the block, bit for bit.

    The block works on clones and the original tensors are put back, so a backward pass may still follow.

    Args:
        module: The module whose buffers are kept.
        only: A test on the dotted name of a buffer. `None` keeps all.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.wrappers import frozen_buffers
        >>> norm = nn.BatchNorm1d(2)
        >>> with frozen_buffers(norm):
        ...     _ = norm(torch.ones(3, 2))
        >>> norm.running_mean, norm.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """
    undo: list[Callable[[], None]] = []
    clones: dict[int, torch.Tensor] = {}
    try:
        for prefix, child in module.named_modules():
            for name, buffer in list(child.named_buffers(recurse=False, remove_duplicate=False)):
                if only is None or only(f"{prefix}.{name}" if prefix else name):
                    _swap(child, name, clones.setdefault(id(buffer), buffer.detach().clone()), undo)
        yield
    finally:
        for restore in reversed(undo):
            restore()


@contextmanager
def evaluating(module: ModuleT) -> Iterator[ModuleT]:
    """Within the block, a module and all its parts are in eval mode; afterwards each part is as it was.

    Example:
        >>> module = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with evaluating(module):
        ...     print(module[0].training)
        False
        >>> module[0].training, module[1].training
        (True, False)
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield module
    finally:
        for part, mode in modes.items():
            part.training = mode


@dataclass
class _Scratch:
    """A spare copy of one metric, made on first use. `original` shows when the module has got another metric."""

    original: weakref.ref[nn.Module]
    copy: nn.Module


_SCRATCH: weakref.WeakKeyDictionary[nn.Module, dict[str, _Scratch]] = weakref.WeakKeyDictionary()


def _metrics(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost metrics and metric collections under every name they are registered by."""
    metrics: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules(remove_duplicate=False):
        if name and isinstance(child, (Metric, MetricCollection)):
            if not any(name.startswith(f"{outer}.") for outer, _ in metrics):
                metrics.append((name, child))
    return metrics


def _spare(spares: dict[str, _Scratch], name: str, metric: nn.Module) -> nn.Module:
    """Return the scratch copy of `metric` on its device; a metric with two names has one scratch copy."""
    for spare in spares.values():
        if spare.original() is metric:
            break
    else:
        spare = spares[name] = _Scratch(weakref.ref(metric), deepcopy(metric))
        spare.copy.reset()  # type: ignore[operator]
    device = _device(metric)
    if device != _device(spare.copy):
        spare.copy.to(device)
    spare.copy.train(metric.training)
    return spare.copy


def _device(metric: nn.Module) -> torch.device | None:
    return next((child.device for child in metric.modules() if isinstance(child, Metric)), None)


def _swap(owner: nn.Module, name: str, replacement: Any, undo: list[Callable[[], None]]) -> None:
    """Register `replacement` under `name` and append the way back to `undo`."""
    original = getattr(owner, name)
    undo.append(lambda: setattr(owner, name, original))
    setattr(owner, name, replacement)


def _shadow(module: LightningModule, name: str, undo: list[Callable[[], None]]) -> None:
    """Hide a method behind `_nothing` on the instance; an attribute that was there comes back afterwards."""
    if name in vars(module):
        _swap(module, name, _nothing, undo)
    else:
        undo.append(lambda: delattr(module, name))
        setattr(module, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, instead of `self.log` inside `muted`."""

"""Run a module's step once more without leaving a trace: no log entries, no metric updates, no moved buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection


@dataclass
class _Scratch:
    """A spare copy of one metric, made on first use; ``original`` tells when the module got another metric."""

    original: weakref.ref[nn.Module]
    copy: nn.Module


_SCRATCH: weakref.WeakKeyDictionary[nn.Module, dict[str, _Scratch]] = weakref.WeakKeyDictionary()


@contextmanager
def muted(module: nn.Module) -> Iterator[None]:
    """Inside the block ``self.log`` and ``self.log_dict`` do nothing and torchmetrics in ``module`` do not change.

    Works with and without a Trainer, and nested. Metrics registered as submodules are swapped for scratch copies, which
    are made once per module and reset after every use. Not muted: metrics hidden in plain Python lists, and direct
    calls such as ``self.logger.experiment.add_scalar``.
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
    """Every buffer (BatchNorm statistics, counters) is after the block what it was before, bit for bit.

    The block works on clones and the original tensors are put back, so a backward pass may still come afterwards.

    Args:
        module: the module whose buffers are kept.
        only: a test on the dotted name of a buffer; ``None`` keeps all.
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


def _metrics(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost metrics and metric collections under every name they are registered by."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules(remove_duplicate=False):
        if name and isinstance(child, (Metric, MetricCollection)):
            if not any(name.startswith(f"{outer}.") for outer, _ in found):
                found.append((name, child))
    return found


def _spare(spares: dict[str, _Scratch], name: str, metric: nn.Module) -> nn.Module:
    """The scratch copy of ``metric`` on its device; a metric with two names has one scratch copy."""
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
    """Register ``replacement`` under ``name`` and note how to go back."""
    original = getattr(owner, name)
    undo.append(lambda: setattr(owner, name, original))
    setattr(owner, name, replacement)


def _shadow(module: LightningModule, name: str, undo: list[Callable[[], None]]) -> None:
    """Hide a method behind :func:`_nothing` on the instance; an attribute that stood there comes back afterwards."""
    if name in vars(module):
        _swap(module, name, _nothing, undo)
    else:
        undo.append(lambda: delattr(module, name))
        setattr(module, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What ``self.log`` is inside :func:`muted`."""

"""Modules of one architecture in one stack, for their evaluation: what they must have in common, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fedlightning.stacked.scoring.log_limits import NotStacked
from fedlightning.stacked.stack import side_by_side, take

PLAIN = frozenset((bool, int, float, str, type(None)))
CONTAINERS = frozenset((list, dict, set))
RUNNING = "_current_fx_name"
"""Attribute in which Lightning notes the running hook of a module. It comes and goes."""
METHODS = frozenset(("log", "log_dict", "validation_step", "test_step"))
"""A module with one of these set on the instance is scored alone."""


class Signature:
    """The tensors of a module and all that it must have in common with others to be scored in one stack.

    Args:
        module: The module.

    Attributes:
        module: The module.
        tensors: Its parameters and buffers, each once, without those of its metrics.
        key: Modules with equal keys can be scored together; `None`: this one must be scored alone. Modules of a
            federation
            are built from one template, so the key holds what a callback may have changed: tensors, plain values,
                lengths
            of lists, replaced parts, methods set on the instance, forward hooks.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.tensors: dict[str, Tensor] = {}
        self._traits: list[Any] = []
        self._alone = not METHODS.isdisjoint(vars(module))
        self._seen: set[int] = set()
        self._walk(module, "")
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()]
        self.key = None if self._alone else (*self._traits, *shapes)

    def _walk(self, module: nn.Module, prefix: str) -> None:
        """Add a module and all inside it.

        It reads the dicts in which torch keeps the content of a module. Public ways to them take as long as the
        module's step, and there is none to its hooks.
        """
        own = vars(module)
        self._traits += (prefix, type(module))
        if isinstance(module, Metric | MetricCollection):
            return
        for name, value in own.items():
            if type(value) in PLAIN and name != RUNNING:
                self._traits += (name, value)
            elif isinstance(value, Tensor):
                self._alone = True  # it is no parameter and no buffer, so it cannot be stacked
            elif type(value) in CONTAINERS:
                self._traits += (name, len(value))
        self._alone = self._alone or bool(own["_forward_hooks"]) or bool(own["_forward_pre_hooks"])
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    self.tensors[prefix + name] = tensor
        for name, child in own["_modules"].items():
            if child is not None:
                self._walk(child, f"{prefix}{name}.")


class Models:
    """The tensors of modules that are scored together.

    Args:
        signatures: Modules with equal keys. One object again and again is a model that all clients share.
        device: Device of the stack.

    Attributes:
        template: Module whose code runs.
        names: Names of the tensors.
        shared: Whether all clients have the same tensors.
    """

    def __init__(self, signatures: Sequence[Signature], device: torch.device) -> None:
        self.template, self.names = signatures[0].module, tuple(signatures[0].tensors)
        self.shared = all(signature is signatures[0] for signature in signatures)
        self._signature, self._device, self._size = signatures[0], device, len(signatures)
        columns = zip(*(signature.tensors.values() for signature in signatures), strict=True)
        with torch.no_grad():
            if self.shared:
                self._tensors = [tensor.detach().to(device) for tensor in signatures[0].tensors.values()]
            else:
                self._tensors = [torch.stack(column).to(device) for column in columns]
        self._versions = [tensor._version for tensor in self._tensors]

    def tensors(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the tensors of the clients at `rows`, ascending; or those of the one model."""
        if self.shared or len(rows) == self._size:
            return self._tensors
        chosen = side_by_side(rows)
        return [take(tensor, chosen) for tensor in self._tensors]

    def check(self) -> None:
        """Refuse steps that have left something in the module, because the next batch might depend on it."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            raise NotStacked("a buffer is changed")
        if Signature(self.template).key != self._signature.key:
            raise NotStacked("an attribute of the module is changed")

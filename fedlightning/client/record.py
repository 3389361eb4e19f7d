"""The state of a client between visits.

:class:`VisitWork` is what a visit adds up of what its fits report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from fedlightning.tensors import State, is_same


class FitResult(Protocol):
    """Result of a fit."""

    @property
    def contributed(self) -> bool:
        """Whether any optimizer stepped, or trainable entries moved."""

    @property
    def unseen(self) -> str:
        """How entries moved past the hooks of optimizers, as the end of a sentence; empty: they did not."""

    @property
    def steps(self) -> int:
        """Steps taken by the first optimizer."""

    @property
    def attempts(self) -> int:
        """Optimizer steps attempted; the gradient scaler may have skipped some."""

    @property
    def lr_sums(self) -> Mapping[str, float]:
        """By parameter name, the sum of its learning rate over the steps taken."""

    @property
    def gradient_weights(self) -> Mapping[str, float]:
        """By parameter name, the sum of the weights of its gradients in SGD's movement; none under another optimizer."""


@dataclass
class VisitWork:
    """What a client has done in a visit.

    Attributes:
        contributed: Whether an optimizer has stepped in the visit's federated fits, or trainable entries have moved: whether
            the client counts. `None`: there was no such fit.
        steps: Steps of the first optimizer in these fits.
        skipped: Steps of these fits that the gradient scaler skipped.
        own_steps: Optimizer steps of the other fits.
        selections: Passes over validation data that callbacks asked for.
        lr_sums: By parameter name, the sum of its learning rate over these steps.
        gradient_weights: By parameter name, the sum of the weights with which SGD has added up the gradients of these
            steps: the distance it would have moved had every gradient been 1. With momentum this is more than
            :attr:`lr_sums`. A parameter that another optimizer moves has none: its movement is not a sum of gradients.
    """

    contributed: bool | None = None
    steps: int = 0
    skipped: int = 0
    own_steps: int = 0
    selections: int = 0
    lr_sums: dict[str, float] = field(default_factory=dict)
    gradient_weights: dict[str, float] = field(default_factory=dict)

    @property
    def lr_sum(self) -> float:
        """Largest of :attr:`lr_sums`."""
        return max(self.lr_sums.values(), default=0.0)

    def add(self, fitted: FitResult, federated: bool) -> None:
        """Add a fit."""
        if not federated:
            self.own_steps += fitted.steps
            return
        self.contributed = bool(self.contributed) or fitted.contributed
        self.steps += fitted.steps
        self.skipped += fitted.attempts - fitted.steps
        for sums, new in ((self.lr_sums, fitted.lr_sums), (self.gradient_weights, fitted.gradient_weights)):
            for name, value in new.items():
                sums[name] = sums.get(name, 0.0) + value


def copy_tree(tree: Any) -> Any:
    """Copy the dicts and lists of a tree, but not its tensors: these are replaced, never edited in place."""
    if isinstance(tree, dict):
        return {key: copy_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copy_tree(value) for value in tree]
    return tree


def fold(tree: Any, base: State) -> Any:
    """Return a tree with empty tensors where entries of models in it are those of `base`, by name and bits.

    A personal model, or a selected one, is kept without the frozen network that every module is built with; :func:`unfold`
    puts it in again.

    Example:
        >>> import torch
        >>> base = {"frozen": torch.ones(3)}
        >>> kept = fold({"v": {"frozen": torch.ones(3), "head": torch.zeros(2)}}, base)
        >>> kept["v"]["frozen"].numel(), unfold(kept, base)["v"]["frozen"].tolist()
        (0, [1.0, 1.0, 1.0])
    """
    if isinstance(tree, list):
        return [fold(value, base) for value in tree]
    if not isinstance(tree, dict):
        return tree
    return {key: value.new_empty(0) if _is_of(base, key, value) else fold(value, base) for key, value in tree.items()}


def _is_of(base: State, key: Any, value: Any) -> bool:
    entry = base.get(key) if isinstance(value, Tensor) else None
    return entry is not None and value.numel() > 0 and is_same(value, entry)


def unfold(tree: Any, base: State) -> Any:
    """Return a tree with the entries of `base` in place of empty tensors of their names; see :func:`fold`."""
    if isinstance(tree, list):
        return [unfold(value, base) for value in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: base[key] if isinstance(value, Tensor) and not value.numel() and key in base else unfold(value, base)
        for key, value in tree.items()
    }


@dataclass
class ClientRecord:
    """All that a client keeps from visit to visit: plain values and tensors, so it can be saved, sent and restored.

    Attributes:
        personal: Model entries that do not travel, as the last visit left them.
        state: By callback key, the values that this callback keeps.
        checkpoints: By callback key, selected models and their scores.
        lightning: By phase, what Lightning keeps (gradient scaler, callback states, optimizers under `keep`).
        num_samples: Training samples of the last fit, for a later job that only collects its result.
        contributed: Whether the client counted by the last fit, as in an update.
        steps: Optimizer steps of the last fit.
        lr_sum: Sum of the learning rate of the last fit.
        visits: Number of visits in which the client has trained.
        last_round: Round of the last of them; -1 before the first.
    """

    personal: State = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    lightning: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_samples: int = 0
    contributed: bool = False
    steps: int = 0
    lr_sum: float = 0.0
    visits: int = 0
    last_round: int = -1

    def copy(self) -> ClientRecord:
        """Return a copy that can be changed without changing this record. Tensors are shared."""
        return ClientRecord(**{name: copy_tree(value) for name, value in vars(self).items()})

    def folded(self, base: State) -> ClientRecord:
        """Return the record without the entries of a frozen network in what callbacks and Lightning keep."""
        return replace(self, **{name: fold(getattr(self, name), base) for name in _FOLDED}) if base else self

    def unfolded(self, base: State) -> ClientRecord:
        """Return a copy, as :meth:`copy` makes it, with the entries that :meth:`folded` took away."""
        copied = self.copy()
        return replace(copied, **{name: unfold(getattr(copied, name), base) for name in _FOLDED}) if base else copied


_FOLDED = ("state", "checkpoints", "lightning")

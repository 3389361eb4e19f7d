"""What a client keeps from visit to visit: :class:`ClientRecord`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedlightning.tensors import State


def copy_tree(tree: Any) -> Any:
    """Copy the dicts and lists of a tree, not its tensors: state tensors are replaced, never edited in place."""
    if isinstance(tree, dict):
        return {key: copy_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copy_tree(value) for value in tree]
    return tree


@dataclass
class ClientRecord:
    """All that a client keeps from visit to visit. Plain values and tensors: it can be saved, sent and restored.

    Attributes:
        personal: model entries that do not travel, as the last visit left them.
        state: per callback key, what that callback keeps.
        checkpoints: per callback key, selected models and their scores.
        lightning: per phase, what Lightning keeps (gradient scaler, callback states, optimizers under `keep`).
        num_samples, steps, lr_sum: of the last fit, for a later job that only collects its result.
        visits: how often the client has trained; last_round: when.
    """

    personal: State = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    lightning: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_samples: int = 0
    steps: int = 0
    lr_sum: float = 0.0
    visits: int = 0
    last_round: int = -1

    def copy(self) -> ClientRecord:
        """A record that can be changed without changing this one (tensors are shared)."""
        return ClientRecord(**{name: copy_tree(value) for name, value in vars(self).items()})

"""The state of a client between visits: :class:`ClientRecord`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedlightning.tensors import State


def copy_tree(tree: Any) -> Any:
    """Copy the dicts and lists of a tree, but not its tensors: these are replaced, never edited in place."""
    if isinstance(tree, dict):
        return {key: copy_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copy_tree(value) for value in tree]
    return tree


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

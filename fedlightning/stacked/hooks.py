"""Work of a callback inside a fit, on a stack of clients: the counterpart of its Lightning hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedlightning.stacked.optimizers import Settings
from fedlightning.stacked.stack import join_tree, split_tree
from fedlightning.stacked.step import Place


@dataclass
class Turn:
    """A step that some clients of a stack take together.

    Attributes:
        numbers: Their rows, ascending.
        batch: Their batches, stacked.
        place: Position of these batches in the clients' work.
        settings: The optimizer's settings per parameter group, for all of them or for each.
        parameters: By name, stacked values.
        gradients: By name, stacked gradients before any correction. A parameter that no loss reaches has none.
    """

    numbers: Sequence[int]
    batch: Any
    place: Place
    settings: Sequence[Settings]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def _places(self, chosen: Sequence[int]) -> list[int]:
        return [list(self.numbers).index(number) for number in chosen]

    def batch_of(self, chosen: Sequence[int]) -> Any:
        """Return the batches of some of these clients."""
        if len(chosen) == len(self.numbers):
            return self.batch
        tensors, skeleton = split_tree(self.batch)
        return join_tree(skeleton, [tensor[self._places(chosen)] for tensor in tensors])

    def settings_of(self, group: int, chosen: Sequence[int]) -> Settings:
        """Return the settings of a parameter group for some of these clients."""
        settings = self.settings[group]
        if isinstance(settings, Mapping) or len(chosen) == len(self.numbers):
            return settings
        return [settings[place] for place in self._places(chosen)]

    def rates(self, group: int, chosen: Sequence[int]) -> list[float]:
        """Return the learning rates of a parameter group for some of these clients."""
        settings = self.settings_of(group, chosen)
        return [float(one["lr"]) for one in ([settings] * len(chosen) if isinstance(settings, Mapping) else settings)]


class StackHooks:
    """Base class that does nothing. One object serves one phase of one stack."""

    def before_step(self, turn: Turn) -> None:
        """Act when the clients' gradients are there and no parameter has moved yet."""

    def after_step(self, turn: Turn) -> None:
        """Act after the clients' optimizers have stepped."""

    def finish(self) -> None:
        """Act when the phase is over; the visits continue one by one."""

"""Read features inside a module that somebody else wrote."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedlightning.ranges import checked
from fedlightning.wrappers.heads import find_submodule
from fedlightning.wrappers.mixing import user_class


class FeatureTap:
    """A hook that keeps the input (or output) of a named submodule in the current step, with its autograd graph.

    Used by MOON, FedProto and PerFCL: the input of the head is the representation. A tap holds tensors of one step
    only; copies and pickles of a tapped module do not carry them.

    Args:
        module: Any module.
        name: Dotted path of the submodule.
        at: `"input"` (first positional argument of the submodule) or `"output"`.
        several: Accept several calls in one step: :attr:`features` are those of all calls, one below the other.

    Raises:
        ValueError: If there is no such submodule (the message lists the names) or `at` is unknown.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import FeatureTap
        >>> net = MLP(4, [3], 2)
        >>> with FeatureTap(net, "fc2") as tap:
        ...     logits = net(torch.zeros(5, 4))
        ...     features = tap.take()
        >>> features.shape
        torch.Size([5, 3])
    """

    @checked
    def __init__(
        self, module: nn.Module, name: str, at: Literal["input", "output"] = "input", several: bool = False
    ) -> None:
        self._target: nn.Module | None = find_submodule(module, name)
        self._where = f"`{name}` of {user_class(module).__name__}"
        self._at, self._several = at, several
        self._handle: RemovableHandle | None = None
        self._caught: list[tuple[Any, ...]] = []

    def attach(self) -> FeatureTap:
        """Start to listen. A second call has no effect.

        Raises:
            RuntimeError: If the tap is a copy of another one, which has no submodule.
        """
        if self._target is None:
            raise RuntimeError(f"This tap on {self._where} is a copy of another; make a new FeatureTap.")
        if self._handle is None:
            register = self._target.register_forward_pre_hook if self._at == "input" else None
            self._handle = register(self._before) if register else self._target.register_forward_hook(self._after)
        return self

    def remove(self) -> None:
        """Stop to listen and forget the features."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._caught.clear()

    def clear(self) -> None:
        """Forget the features, before a new step."""
        self._caught.clear()

    @property
    def calls(self) -> int:
        """Number of calls of the submodule since the last `clear` or `take`."""
        return len(self._caught)

    @property
    def values(self) -> tuple[Any, ...]:
        """All positional inputs of the one call of this step (or its output, as a tuple of one).

        Raises:
            RuntimeError: If the submodule was not called, or called more than once.
        """
        if len(self._caught) != 1:
            times = f"called {len(self._caught)} times" if self._caught else "not called"
            listening = "" if self._handle is not None else " The tap is not attached: use it in a `with` block."
            raise RuntimeError(
                f"The features at {self._where} are unknown: it was {times} since the last step.{listening} Tap a "
                f"submodule that every step calls exactly once, and clear() the tap between steps."
            )
        return self._caught[0]

    @property
    def features(self) -> Tensor:
        """The features of this step, shape `(batch, ...)`.

        Raises:
            RuntimeError: If there was not exactly one call, or the submodule was not given (did not return) a tensor.
        """
        if self._several and len(self._caught) > 1:
            return torch.cat([self._tensor_in(values) for values in self._caught])
        return self._tensor_in(self.values)

    def _tensor_in(self, values: tuple[Any, ...]) -> Tensor:
        if not values or not isinstance(values[0], Tensor):
            kind = type(values[0]).__name__ if values else "no positional argument"
            raise RuntimeError(f"The {self._at} of {self._where} is {kind}, not a tensor; tap another submodule.")
        return values[0]

    def take(self) -> Tensor:
        """Return `features` and clear the tap for the next step."""
        features = self.features
        self.clear()
        return features

    def __enter__(self) -> FeatureTap:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_target": None, "_handle": None, "_caught": []}

    def _before(self, target: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._target is not None:
            self._caught.append(inputs)

    def _after(self, target: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._target is not None:
            self._caught.append((output,))

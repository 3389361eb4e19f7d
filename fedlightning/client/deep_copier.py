"""Copies of a template by `copy.deepcopy`, and what every maker of copies offers: :class:`ModuleCopier`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from fedlightning.errors import ConfigurationError


class ModuleCopier(Protocol):
    """Makes deep copies of one module."""

    module: nn.Module

    @property
    def is_complete(self) -> bool:
        """Whether :meth:`copy` can replace every tensor of the module by name."""

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether :meth:`copy` can replace the module's own entries by `state`."""

    def copy(self, state: Mapping[str, Tensor] | None = None) -> Any:
        """Return a new deep copy; with `state` instead of its own entries where :meth:`holds` says so."""


class DeepCopier:
    """Copies by `copy.deepcopy`.

    Args:
        module: The module.
    """

    is_complete = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Return False: copies are of the whole module."""
        return False

    def copy(self, state: Mapping[str, Tensor] | None = None) -> Any:
        """Return a new deep copy."""
        return deep_copy(self.module)


def deep_copy(module: nn.Module) -> Any:
    """Return `copy.deepcopy(module)`.

    Raises:
        ConfigurationError: Names the attribute that cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise _uncopyable(module, error) from error


def _uncopyable(module: nn.Module, error: Exception) -> Exception:
    """Return the refusal of a module with an attribute that cannot be copied; the error itself if it is none of them."""
    bare = vars(nn.Module())  # what every module has: its parts, which are looked at by themselves
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            try:
                None if name in bare else copy.deepcopy(value)
            except Exception as reason:
                kind = type(child).__name__
                return ConfigurationError(
                    f"{type(module).__name__} cannot be copied for each client: '{f'{path}.{name}'.lstrip('.')}' is a "
                    f"{type(value).__name__} ({' '.join(str(reason).split())}). Make it where it is first used, or give "
                    f"{kind} a __getstate__ that leaves it out and a __setstate__ that makes it anew."
                )
    return error

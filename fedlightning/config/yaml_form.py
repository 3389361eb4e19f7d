"""The YAML loader of jsonargparse, with limits: what no configuration holds is refused as it is read."""

from __future__ import annotations

from typing import Any

from jsonargparse import get_loader, set_loader
from yaml import YAMLError

from fedlightning.config.short_forms import expand_file
from fedlightning.config.value_checks import refuse_expansion, refuse_form, refuse_two_values


def guard_yaml() -> None:
    """Let jsonargparse's YAML loader refuse what no configuration holds."""
    load = get_loader("yaml")
    if getattr(load, "guarded", False):
        return

    def loading(text: str) -> Any:
        refuse_form(text)
        try:
            found = load(text)
        except (ValueError, OverflowError, RecursionError) as error:
            raise YAMLError(f"it has a value that cannot be read: {error}") from None
        refuse_expansion(found)
        refuse_two_values(found)
        return expand_file(found)

    loading.guarded = True  # type: ignore[attr-defined]
    set_loader("yaml", loading, exceptions=(YAMLError,))

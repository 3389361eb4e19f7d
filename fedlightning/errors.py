"""What the user is told when something cannot work, or should not pass unseen."""

from __future__ import annotations

import warnings


class ConfigurationError(ValueError):
    """A configuration that cannot work. The message names the thing, the value, the rule and the way out."""


def warn(text: str) -> None:
    """Warn the user of something that does not stop the run."""
    warnings.warn(text, UserWarning, stacklevel=3)

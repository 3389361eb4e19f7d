"""What the user is told when something cannot work, or should not pass unseen."""

from __future__ import annotations

import warnings


class ConfigurationError(ValueError):
    """A configuration that cannot work. The message names the thing, the value, the rule and the way out."""


class ControlFlow(BaseException):
    """Raised by FedLightning for its own use, through code of users.

    It is no `Exception`, so that neither `hasattr` nor a user's `except` can swallow it and continue with something else.
    """


def warn(text: str) -> None:
    """Warn the user of something that does not stop the run."""
    warnings.warn(text, UserWarning, stacklevel=3)

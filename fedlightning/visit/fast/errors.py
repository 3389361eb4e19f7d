"""The exception by which the fast loop hands a visit over to Lightning's Trainer."""

from __future__ import annotations

from fedlightning.errors import ControlFlow


class NotInFastLoop(ControlFlow):
    """The fast loop met something that it cannot repeat; the message says what."""

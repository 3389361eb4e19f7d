"""The exception by which the fast loop hands a visit over to Lightning's Trainer."""

from __future__ import annotations


class NotInFastLoop(BaseException):
    """The fast loop met something that it cannot repeat; the message says what.

    It is no `Exception`, so that neither `hasattr` nor a user's `except` can swallow it and continue with something else.
    """

"""The exception by which the fast loop hands a visit over to Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from fedlightning.errors import Restart


class NotInFastLoop(Restart):
    """The fast loop met something that it cannot repeat; the message says what."""

    def apply(self, runner: Any) -> None:
        """Leave the fast loop for the rest of the run."""
        runner.loop.give_up(str(self))

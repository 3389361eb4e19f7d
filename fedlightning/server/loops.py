"""When clients are visited: a loop says what a round is. Those that nobody waits in stand in `fedlightning.virtual_time`."""

from fedlightning.server.loop import Loop
from fedlightning.server.synchronous import Synchronous

__all__ = ["Loop", "Synchronous"]

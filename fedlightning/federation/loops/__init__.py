"""When clients are visited: a loop says what a round is. Those that nobody waits in stand in `fedlightning.virtual_time`."""

from fedlightning.federation.loops.base import Loop
from fedlightning.federation.loops.synchronous import Synchronous

__all__ = ["Loop", "Synchronous"]

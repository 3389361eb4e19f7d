"""What becomes of clients that fail: the trainer's argument `failures`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Annotated, Literal

from fedlightning.options.base import describe_changed
from fedlightning.ranges import Count, PositiveFloat, Range, check_on_creation, needs

Share = Annotated[float, Range("(0, 1]", "A float is a share of a round's clients, an int a number of them.")]


@check_on_creation
@needs("retries", "on_error", why="only 'retry' tries a client again. Use it, or leave retries out.", value="retry")
@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of a client that fails (raises, has a NaN, loses its worker process, takes too long).

    Args:
        on_error: "skip": it is left out of the round, with a warning; "retry": it is tried again first, with the same random
            numbers; "stop": it ends the run.
        retries: Number of further tries under "retry".
        min_clients: Number (int) or share (float in (0, 1]) of a round's clients that must contribute; with fewer the run
            stops, and its state of the round before is intact.
        timeout: Seconds that a client may take for a visit, or for being scored; default: any time. With
            engine="processes" its worker is ended and the client has failed; the other engines cannot end a client alone
            and stop the run.
        update_limit: Multiple of the usual norm of updates beyond which one is refused, and its client has failed; in round 1
            of the norm of the model that was sent. `None`: nothing is refused for its size.

    Example:
        >>> FailurePolicy.from_short("retry").tries
        2
    """

    on_error: Literal["skip", "retry", "stop"] = "skip"
    retries: Count = 1
    min_clients: Count | Share = 1
    timeout: PositiveFloat | None = None
    update_limit: Annotated[float, Range("(1, inf)", "It says by how much a norm may exceed the usual one.")] | None = (
        1000.0
    )

    __repr__ = describe_changed

    @classmethod
    def from_short(cls, failures: FailurePolicy | str) -> FailurePolicy:
        """Return the policy, given as such or by its `on_error`."""
        return failures if isinstance(failures, cls) else cls(on_error=failures)  # type: ignore[arg-type]

    @property
    def tries(self) -> int:
        """Number of times that a client's work is tried."""
        return 1 + self.retries if self.on_error == "retry" else 1

    def needed(self, visited: int) -> int:
        """Return the number of clients that must contribute where so many are visited: never more than these.

        Example:
            >>> FailurePolicy(min_clients=0.5).needed(5), FailurePolicy(min_clients=3).needed(2)
            (3, 2)
        """
        if isinstance(self.min_clients, int):
            return min(self.min_clients, visited)
        return ceil(Fraction(str(self.min_clients)) * visited)  # of the decimal number: 0.7 of 10 is 7

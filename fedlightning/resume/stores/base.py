"""What any logger holds, as far as Lightning's interface tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.loggers import Logger

from fedlightning.resume.stores.arguments import given_version
from fedlightning.storage.files import Mark


class Store:
    """What a logger holds, as far as Lightning's interface tells: which store it is, by `logger.version`.

    Such a logger gets again what came after the saved state. It gets nothing of what came before if it still has the version
    that it had then, and all rounds if it has another: it is a new store.

    Args:
        logger: The logger.
        run: The run's folder.

    Attributes:
        until: Rounds that are in it, all of them up to here.
        there: Names that are in it, by step, where somebody had to look.
    """

    def __init__(self, logger: Logger, run: Path | None = None) -> None:
        self.logger, self.run = logger, run
        self.until = 0
        self.there: dict[int, set[str]] = {}
        self._used = False

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Give the logger those values of a round that it has not got."""
        if round <= self.until:
            return
        names = self.there.get(round, ())
        # a logger's prefix stands before a '-'
        new = {name: value for name, value in values.items() if not any(is_known_as(name, known) for known in names)}
        if new:
            self.logger.log_metrics(new, step=round)
            self._used = True

    def flush(self) -> None:
        """Let the logger write what it holds back."""
        if self._used:
            self.logger.save()

    def mark(self) -> Mark:
        """Return what the logger holds now, in plain values."""
        version = self.logger.version
        return {"logger": type(self.logger).__name__, "version": version if isinstance(version, int) else str(version)}

    def start(self) -> Mark:
        """Return the mark of a run that has not begun."""
        return self.mark()

    def is_of(self, mark: Mark, by_name: bool) -> bool:
        """Return whether a mark may be of this logger."""
        given = given_version(self.logger)
        return mark["logger"] == type(self.logger).__name__ and (given == mark["version"] if by_name else given is None)

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        """Go on where the logger stood at `mark`, before anything is logged."""
        if mark is not None:
            self.until = rounds


def is_known_as(name: str, known: str) -> bool:
    """Return True if a logger, which may have a prefix, knows `name` as `known`."""
    return known == name or known.endswith(f"-{name}")

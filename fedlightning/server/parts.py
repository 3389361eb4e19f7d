"""Parts that attach to a federation from outside, and their list.

The core trains and scores alone. Checks of what arrives, warnings, what is saved, printed and drawn are parts. They are made
and ordered in one place (`assemble.py`), and told of a round in the order of that list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fedlightning.contract.messages import Message, Update
from fedlightning.scores.rows import Row
from fedlightning.tensors import State

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation
    from fedlightning.server.server import Server

P = TypeVar("P")


class Part:
    """Something that attaches to a federation. Methods do nothing unless overridden; they stand in the order of time.

    A part may warn, refuse and write. It changes nothing of a run that succeeds: without it models and scores are the same.

    Attributes:
        key: Its name in a saved state; empty: it keeps nothing from round to round.
    """

    key: ClassVar[str] = ""

    def state(self) -> Any:
        """Return what it keeps from round to round, in plain values."""

    def load(self, state: Any) -> None:
        """Put back what :meth:`state` returned."""

    def check(self, federation: Federation) -> None:
        """Refuse before round 1, with ``ValueError`` and a sentence, what cannot work."""

    def on_begin(self, federation: Federation) -> None:
        """See a new run begin, after all checks."""

    def on_restored(self, federation: Federation) -> None:
        """See that a saved state has been loaded."""

    def around(self, federation: Federation) -> AbstractContextManager[Any]:
        """Return what is open while rounds are carried out: displays, locks."""
        return nullcontext()

    def on_round_start(self, federation: Federation) -> None:
        """See a round begin, before anybody is visited. One that failed may have ended before."""

    def check_update(self, server: Server, message: Message, update: Update) -> Update:
        """Return an update that has arrived and was decoded: itself, or one that says by its `error` why it is refused."""
        return update

    def check_score(self, server: Server, row: Row) -> str | None:
        """Return why a score cannot be one; `None` if it can."""

    def on_update(self, server: Server, update: Update, before: State) -> None:
        """See an update of a visit that trained, before it is folded in, with the model that it started from."""

    def on_visit_end(self, update: Update) -> None:
        """See an update without its entries, folded in or refused."""

    def on_round_trained(self, federation: Federation, updates: Sequence[Update]) -> None:
        """See the updates of a round, without their entries; the new models are made."""

    def on_round_scored(self, federation: Federation, rows: Sequence[Row], updates: Sequence[Update]) -> None:
        """See the scores of a round."""

    def on_round_failed(self, federation: Federation) -> None:
        """See that a round could not be finished, because of clients that failed."""

    def on_rounds_over(self, federation: Federation) -> None:
        """See that clients have been visited after the last round; what that has changed is not scored yet."""

    def on_round_end(self, federation: Federation) -> None:
        """See a round end, after the callbacks; or the visits after the last round."""

    def on_end(self, federation: Federation) -> None:
        """See the federation end, or pause."""

    def on_evaluate(self, federation: Federation, split: str) -> None:
        """See that a user asks for scores of what is there; refuse, with ``ValueError``, what would not be comparable."""

    def on_evaluated(self, federation: Federation, rows: Sequence[Row]) -> None:
        """See the scores that a user has asked for."""

    def score(
        self, federation: Federation, splits: Sequence[str], stages: Sequence[str], checkpoint: str
    ) -> Sequence[Row]:
        """Return scores of models and clients that the core does not know, to stand beside the federation's.

        Args:
            federation: The federation.
            splits: Splits to score on.
            stages: Stages of the latest models to score; none: none.
            checkpoint: `"latest"`, or which selected models are scored too: `"all"` or a name.
        """
        return ()

    def summary(self, federation: Federation) -> Mapping[str, Any]:
        """Return what it adds to `summary.json`."""
        return {}


class Parts:
    """The parts of a federation, told in their order.

    Args:
        parts: The parts.

    Example:
        >>> Parts().state(), len(Parts([Part()]))
        ({}, 1)
    """

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        self._parts = list(parts)
        self._by_event: dict[str, list[Part]] = {}

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of every part that takes part in it.

        Args:
            event: Name of the method.
            arguments: Its arguments.
        """
        for part in self._find_overriding(event):
            getattr(part, event)(*arguments)

    def _find_overriding(self, event: str) -> list[Part]:
        """Return the parts that override a method, looked up once."""
        if event not in self._by_event:
            nothing = getattr(Part, event)
            self._by_event[event] = [part for part in self._parts if getattr(type(part), event) is not nothing]
        return self._by_event[event]

    @contextmanager
    def around(self, federation: Federation) -> Iterator[None]:
        """Open what every part opens while rounds are carried out."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.around(federation))
            yield

    def check_update(self, server: Server, message: Message, update: Update) -> Update:
        """Return an update as all parts let it pass; the first refusal counts."""
        for part in self._find_overriding("check_update"):
            if update.error is None:
                update = part.check_update(server, message, update)
        return update

    def check_score(self, server: Server, row: Row) -> str | None:
        """Return the first reason why a score cannot be one; `None`: there is none."""
        reasons = (part.check_score(server, row) for part in self._parts)
        return next((reason for reason in reasons if reason is not None), None)

    def score(
        self, federation: Federation, splits: Sequence[str], stages: Sequence[str], checkpoint: str = "latest"
    ) -> list[Row]:
        """Return what the parts score beside the federation."""
        return [row for part in self._parts for row in part.score(federation, splits, stages, checkpoint)]

    def find(self, kind: type[P]) -> P:
        """Return the part of a class.

        Raises:
            LookupError: If there is none.
        """
        for part in self._parts:
            if isinstance(part, kind):
                return part
        raise LookupError(f"No {kind.__name__} is attached.")

    @property
    def keys(self) -> list[str]:
        """Names of what a saved state has of the parts."""
        return [part.key for part in self._parts if part.key]

    def state(self) -> dict[str, Any]:
        """Return what the parts keep from round to round, by their keys."""
        return {part.key: part.state() for part in self._parts if part.key}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned."""
        for part in self._parts:
            if part.key:
                part.load(state[part.key])

    def summary(self, federation: Federation) -> dict[str, Any]:
        """Return what the parts add to `summary.json`."""
        return {name: value for part in self._parts for name, value in part.summary(federation).items()}

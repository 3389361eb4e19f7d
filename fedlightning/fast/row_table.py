"""Many rows in little memory, the oldest of them in a file."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from fedlightning.scores.rows import KIND, Row, Rows

HELD = 50_000
"""Rows above which older ones are left to their file: a megabyte and a half."""
KEPT = 2
"""Newest parts of them that stay in memory in any case: the last round, and what was scored after it."""


@dataclass(frozen=True)
class Spilled:
    """Rows that lie in a file only.

    Attributes:
        start: First of them, counted from the first row of the table.
        end: The one after the last.
        last_round: Newest round among them.
        kinds: Places of their kinds.
        where: Bytes of the file: first, and the one after the last.
    """

    start: int
    end: int
    last_round: int
    kinds: frozenset[int]
    where: tuple[int, int]


class RowTable(Rows):
    """Rows in a twentieth of the memory: a thousand clients write thousands a round.

    Rows that are in a file anyway are left there where there are many, so that memory does not grow with the rounds; they are
    read when somebody asks for them.

    Args:
        rows: The first rows.

    Example:
        >>> table = RowTable([Row(1, "G", "global", "latest", "local", "val", "a", "loss", 0.5, 10)])
        >>> table.extend(table[:])
        >>> len(table), table[-1].value
        (2, 0.5)
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rounds, self._kinds, self._clients = array("i"), array("i"), array("i")
        self._values, self._sizes = array("d"), array("q")
        self._names: list[str] = []  # of clients
        self._places: dict[str, int] = {}
        self._known: list[tuple[str, ...]] = []  # kinds
        self._kind_places: dict[tuple[str, ...], int] = {}
        self._spilled: list[Spilled] = []
        self._read: Callable[[int, int], list[Row]] = lambda start, end: []
        self._last_read: tuple[Spilled | None, list[Row]] = (None, [])
        self._written: list[tuple[int, tuple[int, int]]] = []  # rows in memory, and their bytes in the file
        self.extend(rows)

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows."""
        rows = list(rows)
        if not rows:
            return
        kinds, clients = list(map(KIND, rows)), [row.client for row in rows]
        for kind in dict.fromkeys(kinds):
            if kind not in self._kind_places:
                self._kind_places[kind] = len(self._known)
                self._known.append(kind)
        for client in dict.fromkeys(clients):
            if client not in self._places:
                self._places[client] = len(self._names)
                self._names.append(client)
        self._kinds.extend(map(self._kind_places.__getitem__, kinds))
        self._clients.extend(map(self._places.__getitem__, clients))
        self._rounds.extend([row.round for row in rows])
        self._values.extend([row.value for row in rows])
        self._sizes.extend([row.num_samples for row in rows])

    @property
    def held(self) -> int:
        """Rows in memory."""
        return len(self._rounds)

    def written(self, count: int, place: tuple[int, int], read: Callable[[int, int], list[Row]]) -> None:
        """Note that the next `count` rows are in a file too, in the bytes `place`; leave old ones there if they are many."""
        self._written.append((count, place))
        old = self._written[:-KEPT]
        if self.held > HELD and old and sum(count for count, _ in self._written) == self.held:
            self.spill(old, read)
            self._written = self._written[-KEPT:]

    def spill(self, where: Sequence[tuple[int, tuple[int, int]]], read: Callable[[int, int], list[Row]]) -> None:
        """Leave the oldest rows that are in memory to a file."""
        self._read = read
        first = self._spilled[-1].end if self._spilled else 0
        total = 0
        for count, place in where:
            part = slice(total, total + count)
            newest, kinds = max(self._rounds[part], default=0), frozenset(self._kinds[part])
            self._spilled.append(Spilled(first + total, first + total + count, newest, kinds, place))
            total += count
        for column in (self._rounds, self._kinds, self._clients, self._values, self._sizes):
            del column[:total]

    def where(self, kind: Callable[..., bool], since: int = 0) -> list[Row]:
        """Return the rows of some kinds and rounds. Of what lies in a file, only parts that may hold such are read."""
        wanted = {place for place, known in enumerate(self._known) if kind(*known)}
        found: list[Row] = []
        for part in self._spilled:
            if part.last_round >= since and not wanted.isdisjoint(part.kinds):
                found += [row for row in self._part(part) if row.round >= since and kind(*KIND(row))]
        pairs = zip(self._rounds, self._kinds, strict=True)
        return found + [self._row(at) for at, (round, place) in enumerate(pairs) if round >= since and place in wanted]

    def _part(self, part: Spilled) -> list[Row]:
        rows = self._read(*part.where)
        if len(rows) != part.end - part.start:
            raise RuntimeError(
                f"The scores of the rounds up to {part.last_round} are not where they were written any more. Leave "
                "metrics.csv as it is while the run goes on."
            )
        return rows

    def _row(self, at: int) -> Row:
        model, stage, checkpoint, data, split, metric = self._known[self._kinds[at]]
        client = self._names[self._clients[at]]
        return Row(
            self._rounds[at], stage, model, checkpoint, data, split, client, metric, self._values[at], self._sizes[at]
        )

    def __len__(self) -> int:
        return self._first_held + len(self._rounds)

    @property
    def _first_held(self) -> int:
        return self._spilled[-1].end if self._spilled else 0

    def __iter__(self) -> Iterator[Row]:
        for part in self._spilled:
            yield from self._part(part)
        for at in range(len(self._rounds)):
            yield self._row(at)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            try:
                return [self[one] for one in range(*index.indices(len(self)))]
            finally:
                self._last_read = (None, [])
        index = range(len(self))[index]
        if index >= self._first_held:
            return self._row(index - self._first_held)
        part = self._spilled[bisect_right(self._spilled, index, key=lambda part: part.start) - 1]
        if self._last_read[0] is not part:
            self._last_read = (part, self._part(part))
        return self._last_read[1][index - part.start]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

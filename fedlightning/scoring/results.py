"""Scores of a run, as rows: one value of one metric of one client's data, at one stage of one round."""

from __future__ import annotations

import csv
import io
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, overload

import numpy as np

from fedlightning.scoring.metrics import higher_is_better


class DamagedMetricsError(ValueError):
    """A `metrics.csv` that is not the one that was written."""


@dataclass(frozen=True)
class Row:
    """One score.

    Attributes:
        round: counted from 1; 0 is the untrained model.
        stage: ``G`` | ``L1`` | ``L2``; model: ``global`` | ``personal`` | the key of another
            model of the server that the client has trained | ``unseen``: what a client that never trains gets
            (:data:`UNSEEN`).
        checkpoint: ``latest`` or a checkpoint callback's name (``best_global``, ``best_local``).
        data: ``local``: the client's own; ``pooled``: the union over clients; ``client:NAME``: another client's (the
            cross-client matrix: ``client``'s model on NAME's data).
        split: ``val`` | ``test`` | ``train`` (what the module logged in training).
        client: the client's id, or ``all`` for a global model on pooled data.
        num_samples: how many samples the value was computed on.
    """

    round: int
    stage: str
    model: str
    checkpoint: str
    data: str
    split: str
    client: str
    metric: str
    value: float
    num_samples: int

    @property
    def address(self) -> tuple[int | str, ...]:
        """Everything but the value (which may be NaN, and then is not equal to itself) and its number of samples."""
        return ADDRESS(self)

    @property
    def cells(self) -> tuple[int | str | float, ...]:
        """All values, in the order of the columns of `metrics.csv`."""
        return CELLS(self)


LARGEST = 2**62
"""Above every round and every number of samples."""
COLUMNS = [field.name for field in fields(Row)]
ADDRESS: Callable[[Row], tuple[Any, ...]] = attrgetter(*COLUMNS[:-2])
CELLS: Callable[[Row], tuple[Any, ...]] = attrgetter(*COLUMNS)
KIND: Callable[[Row], tuple[Any, ...]] = attrgetter("model", "stage", "checkpoint", "data", "split", "metric")
"""What the rows of all clients have in common."""
UNSEEN = "unseen"
"""Model of a row of a client that takes no part in training: at stage G the global model, at L1 what it would deploy."""
LATEST = "latest"
"""Checkpoint of a row: the model as it stands, not one that a callback selected."""


@dataclass(frozen=True)
class Gap(Row):
    """Scores that could not be computed, in the place of their rows. It is told to the user, and not written.

    Attributes:
        reason: The error in words.
    """

    reason: str = ""

    @property
    def sentence(self) -> str:
        """What is missing and why."""
        return not_scored(self.client, self.stage, self.data, self.split, self.reason)


def not_scored(client: str, stage: str, data: str, split: str, reason: str) -> str:
    """Say that a client could not be scored.

    Args:
        client: The client's id.
        stage: `"G"`, `"L1"` or `"L2"`.
        data: Data of the score, as in :class:`Row`.
        split: `"val"` or `"test"`.
        reason: The error in words.
    """
    return f"client '{client}' was not scored at stage {stage} on {data} {split} data: {reason}"


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


class RowTable(Sequence[Row]):
    """Rows in a twentieth of the memory: a thousand clients write thousands a round.

    Rows that are in a file anyway may be left there (:meth:`spill`) and are read when somebody asks for them.

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

    def spill(self, where: Sequence[tuple[int, tuple[int, int]]], read: Callable[[int, int], list[Row]]) -> None:
        """Leave the oldest rows that are in memory to a file.

        Args:
            where: For each part of them its number of rows and its bytes in the file.
            read: Function from such bytes to the rows.
        """
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
        """Return the rows of some kinds and rounds. Of what lies in a file, only parts that may hold such are read.

        Args:
            kind: Function from model, stage, checkpoint, data, split and metric to whether such rows are wanted.
            since: First round.
        """
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


def summarise(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows of ``summary.json``: per model, stage, checkpoint, data, split and metric the statistics over clients.

    ``mean`` is uniform over clients, ``weighted_mean`` by evaluated samples, ``std`` and ``variance`` those of the
    population, ``worst`` and ``tenth_percentile`` taken from the bad end (the top for a loss). A value that is not
    defined for a client (AUROC with one class) is ``null`` there and left out of the statistics.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(KIND(row), []).append(row)
    out = []
    for key, members in groups.items():
        found = np.array([row.value for row in members], dtype=float)
        defined = np.isfinite(found)
        values = found[defined]
        weights = np.array([row.num_samples for row in members], dtype=float)[defined]
        some = len(values) > 0
        good = higher_is_better(key[-1])
        out.append(
            dict(zip(("model", "stage", "checkpoint", "data", "split", "metric"), key, strict=True))
            | {
                "mean": float(values.mean()) if some else None,
                "weighted_mean": float((values * weights).sum() / weights.sum()) if some else None,
                "std": float(values.std()) if some else None,
                "variance": float(values.var()) if some else None,
                "median": float(np.median(values)) if some else None,
                "worst": float(values.min() if good else values.max()) if some else None,
                "tenth_percentile": float(np.percentile(values, 10 if good else 90)) if some else None,
                "per_client": {
                    row.client: row.value if finite else None
                    for row, finite in zip(members, defined.tolist(), strict=True)
                },
            }
        )
    return out


def write_rows(path: Path, rows: Iterable[Row], append: bool = True) -> None:
    """Append ``rows`` to the CSV at ``path`` (with a header when it is new), or replace it at once by a new one."""
    new = not append or not path.exists()
    written = path if append else path.with_name(path.name + ".tmp")
    with written.open("w" if new else "a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(map(CELLS, rows))
    if written != path:
        os.replace(written, path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV that :func:`write_rows` wrote; empty if there is none.

    A last line that was cut off when the process was killed is left out.

    Raises:
        DamagedMetricsError: If it is no such CSV; names the row.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    try:
        lines = csv.reader(io.StringIO(content[: content.rfind(b"\n") + 1].decode(), newline=""))
        header = next(lines, COLUMNS)
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise DamagedMetricsError(f"{path} has no column '{missing[0]}': it is no metrics.csv of a run.")
        places = [header.index(name) for name in COLUMNS]
        return [_row(path, number, line, places) for number, line in enumerate(lines, start=2) if line]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DamagedMetricsError(f"{path} is no text with comma-separated values ({error}).") from None


def _row(path: Path, number: int, line: list[str], places: list[int]) -> Row:
    try:
        number_of_round, *words, value, size = (line[place] for place in places)
        row = Row(int(number_of_round), *words, float(value), int(size))  # type: ignore[arg-type, call-arg]
    except (ValueError, IndexError):
        raise DamagedMetricsError(
            f"{path} is damaged: its row {number} is no score ({','.join(line)[:80]!r})."
        ) from None
    if not (0 <= row.round < LARGEST and 0 <= row.num_samples < LARGEST):
        raise DamagedMetricsError(f"{path} is damaged: its row {number} has an impossible round or number of samples.")
    return row


def read_part(path: Path, start: int, end: int) -> list[Row]:
    """Read some of the rows that were appended to a file in the order of :data:`COLUMNS`.

    Args:
        path: The file.
        start: First byte: the beginning of a row.
        end: The byte after the last.

    Returns:
        The rows; none if the file is gone.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        text = io.StringIO(file.read(end - start).decode(), newline="")
    return [Row(int(line[0]), *line[1:-2], float(line[-2]), int(line[-1])) for line in csv.reader(text)]  # type: ignore[call-arg, arg-type]

"""Scores of a run, as rows: one value of one metric of one client's data, at one stage of one round.

Rows as a CSV file: written, read as a whole, and in parts.
"""

from __future__ import annotations

import csv
import io
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from fedlightning.compat import sheets

LOCAL = "local"
"""Data of a row: the client's own."""


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


COLUMNS = [field.name for field in fields(Row)]
ADDRESS: Callable[[Row], tuple[Any, ...]] = attrgetter(*COLUMNS[:-2])
CELLS: Callable[[Row], tuple[Any, ...]] = attrgetter(*COLUMNS)
KIND: Callable[[Row], tuple[Any, ...]] = attrgetter("model", "stage", "checkpoint", "data", "split", "metric")
"""What the rows of all clients have in common."""
EVERYBODY = "all"
"""Client of a row of the global model on the union of all clients' data."""
OTHERS = "client:"
"""Beginning of the data of a row of the cross-client matrix; the other client's id follows."""
UNSEEN = "unseen"
"""Model of a row of a client that takes no part in training: at stage G the global model, at L1 what it would deploy."""
LATEST = "latest"
"""Checkpoint of a row: the model as it stands, not one that a callback selected."""


@dataclass(frozen=True)
class Gap(Row):
    """Scores that could not be computed, in place of their rows. It is told to the user, and not written.

    Attributes:
        reason: The error in words.
    """

    reason: str = ""

    @property
    def sentence(self) -> str:
        """What is missing and why."""
        return not_scored(self.client, self.stage, self.data, self.split, self.reason)


class Rows(Sequence[Row]):
    """Where a recorder keeps scores."""

    @abstractmethod
    def extend(self, rows: Iterable[Row], /) -> None:
        """Append rows."""

    @abstractmethod
    def where(self, kind: Callable[..., bool], since: int = 0) -> list[Row]:
        """Return the rows of some kinds (a function of the values of :data:`KIND`), from a round on."""

    def written(self, count: int, place: tuple[int, int], read: Callable[[int, int], list[Row]]) -> None:
        """Note that the next `count` rows are in a file too, in the bytes `place`, and how they are read from there."""


class RowList(list[Row], Rows):
    """Rows in memory."""

    def where(self, kind: Callable[..., bool], since: int = 0) -> list[Row]:
        return [row for row in self if row.round >= since and kind(*KIND(row))]


def of_clients(rows: Iterable[Row], clients: Collection[str]) -> list[Row]:
    """Return the scores of some of the clients that train, and all scores of the pooled data and of unseen clients."""
    kept_clients = {*clients, EVERYBODY}
    return [
        row
        for row in rows
        if row.model == UNSEEN
        or (
            row.client in kept_clients
            and (not row.data.startswith(OTHERS) or row.data.removeprefix(OTHERS) in kept_clients)
        )
    ]


def not_scored(client: str, stage: str, data: str, split: str, reason: str) -> str:
    """Say that a client could not be scored."""
    return f"client '{client}' was not scored at stage {stage} on {data} {split} data: {reason}"


LARGEST = 2**62
"""Above every round and every number of samples."""


class DamagedMetricsError(ValueError):
    """A `metrics.csv` that is not the one that was written."""


def write_rows(path: Path, rows: Iterable[Row], append: bool = True) -> None:
    """Append ``rows`` to the CSV at ``path`` (with a header when it is new), or replace it at once by a new one."""
    new = not append or not path.exists()
    written = path if append else path.with_name(path.name + ".tmp")
    with written.open("w" if new else "a", newline="") as file:
        writer = sheets.Writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(map(CELLS, rows))
    if written != path:
        os.replace(written, path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV that :func:`write_rows` wrote; empty if there is none.

    A last line that was cut off when the process was killed is left out.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    try:
        lines = sheets.read_lines(io.StringIO(content[: content.rfind(b"\n") + 1].decode(), newline=""))
        header = next(lines, COLUMNS)
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise DamagedMetricsError(f"{path} has no column '{missing[0]}': it is not a metrics.csv of a run.")
        places = [header.index(name) for name in COLUMNS]
        return [_row(path, number, line, places) for number, line in enumerate(lines, start=2) if line]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DamagedMetricsError(f"{path} is not text with comma-separated values ({error}).") from None


def _row(path: Path, number: int, line: list[str], places: list[int]) -> Row:
    try:
        number_of_round, *words, value, size = (line[place] for place in places)
        row = Row(int(number_of_round), *words, float(value), int(size))  # type: ignore[arg-type, call-arg]
    except (ValueError, IndexError):
        raise DamagedMetricsError(
            f"{path} is damaged: its row {number} is not a score ({','.join(line)[:80]!r})."
        ) from None
    if not (0 <= row.round < LARGEST and 0 <= row.num_samples < LARGEST):
        raise DamagedMetricsError(f"{path} is damaged: its row {number} has an impossible round or number of samples.")
    return row


def read_part(path: Path, start: int, end: int) -> list[Row]:
    """Read some of the rows that were appended to a file in the order of :data:`COLUMNS`."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        text = io.StringIO(file.read(end - start).decode(), newline="")
    return [Row(int(line[0]), *line[1:-2], float(line[-2]), int(line[-1])) for line in sheets.read_lines(text)]  # type: ignore[call-arg, arg-type]

"""Scores of a run, as rows: one value of one metric of one client's data, at one stage of one round."""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, overload

import numpy as np

from fedlightning.scoring.metrics import higher_is_better


@dataclass(frozen=True)
class Row:
    """One score.

    Attributes:
        round: counted from 1; 0 is the untrained model.
        stage: ``G`` | ``L1`` | ``L2``; model: ``global`` | ``personal`` | the key of another
            model of the server that the client has trained.
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
        return (
            self.round,
            self.stage,
            self.model,
            self.checkpoint,
            self.data,
            self.split,
            self.client,
            self.metric,
        )

    @property
    def cells(self) -> tuple[int | str | float, ...]:
        """All values, in the order of the columns of `metrics.csv`."""
        return (*self.address, self.value, self.num_samples)


COLUMNS = [field.name for field in fields(Row)]
LATEST = "latest"
"""Checkpoint of a row: the model as it stands, not one that a callback selected."""


@dataclass(frozen=True)
class Gap(Row):
    """Scores that could not be computed, in the place of their rows. It is told to the user, and not written.

    Attributes:
        reason: The error in words.
    """

    reason: str = ""


class RowTable(Sequence[Row]):
    """Rows in a twentieth of the memory: a thousand clients write nine thousand a round.

    Args:
        rows: The first rows.

    Example:
        >>> table = RowTable([Row(1, "G", "global", "latest", "local", "val", "a", "loss", 0.5, 10)])
        >>> table.extend(table[:])
        >>> len(table), table[-1].value
        (2, 0.5)
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rounds, self._values, self._sizes = array("q"), array("d"), array("q")
        self._words = array("l")  # seven for each row
        self._names: list[str] = []
        self._places: dict[str, int] = {}
        self.extend(rows)

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows."""
        places = self._places
        for row in rows:
            for name in row.address[1:]:
                if name not in places:
                    places[str(name)] = len(self._names)
                    self._names.append(str(name))
                self._words.append(places[str(name)])
            self._rounds.append(row.round)
            self._values.append(row.value)
            self._sizes.append(row.num_samples)

    def __len__(self) -> int:
        return len(self._rounds)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        words = [self._names[place] for place in self._words[7 * index : 7 * index + 7]]
        return Row(self._rounds[index], *words, self._values[index], self._sizes[index])  # type: ignore[call-arg, arg-type]

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
        groups.setdefault((row.model, row.stage, row.checkpoint, row.data, row.split, row.metric), []).append(row)
    out = []
    for key, members in groups.items():
        defined = [row for row in members if math.isfinite(row.value)]
        values = np.array([row.value for row in defined])
        weights = np.array([row.num_samples for row in defined], dtype=float)
        some = len(defined) > 0
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
                "per_client": {row.client: row.value if math.isfinite(row.value) else None for row in members},
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
        writer.writerows(row.cells for row in rows)
    if written != path:
        os.replace(written, path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV that :func:`write_rows` wrote; empty if there is none.

    A last line that was cut off when the process was killed is left out.
    """
    if not path.exists():
        return []
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    return [
        Row(
            round=int(line["round"]),
            value=float(line["value"]),
            num_samples=int(line["num_samples"]),
            **{name: line[name] for name in COLUMNS if name not in ("round", "value", "num_samples")},
        )
        for line in csv.DictReader(complete.splitlines())
    ]

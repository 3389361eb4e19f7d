"""Tables that methods leave in a run's folder beside its scores: `clusters.csv` and `ledger.csv`, read and checked.

They are files with fixed columns. Whichever algorithm wrote them, the study reads them the same way.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from fedlightning.compat import sheets
from fedlightning.run.folder import METRICS_MARK, MetricsFile
from fedlightning.storage.files import UnreadableError
from fedlightning.study.finished_runs import Run

CLUSTERS, LEDGER, SCORES = "clusters.csv", "ledger.csv", "metrics.csv"


@dataclass(frozen=True)
class Membership:
    """A row of `clusters.csv`: that a client belonged to a cluster at the end of a round.

    Attributes:
        round: Counted from 1.
        client: The client.
        cluster: Name of the cluster.
        share: How much of the client belongs to it, in [0, 1]; 1 where it belongs to one only.
    """

    round: int
    client: str
    cluster: str
    share: float


@dataclass(frozen=True)
class Entry:
    """A row of `ledger.csv`: what a client paid and got for one cluster in one round.

    Attributes:
        round: Counted from 1.
        cluster: Name of the cluster.
        client: The client.
        paid: Tokens paid.
        refunded: Tokens returned to those who paid.
        rewarded: Tokens earned.
        contribution: What the client contributed to the round; `None` if it did not answer.
        error: Largest standard error of the contributions of this cluster and round, 0 where they are exact; `None` if
            there is no contribution.
    """

    round: int
    cluster: str
    client: str
    paid: float
    refunded: float
    rewarded: float
    contribution: float | None
    error: float | None


R = TypeVar("R", Membership, Entry)


@dataclass(frozen=True)
class RunTables:
    """The tables of one run.

    Attributes:
        memberships: Rows of `clusters.csv`; empty if there is none, or it is damaged.
        entries: Rows of `ledger.csv`, likewise.
        faults: File -> sentence that says what is wrong with it.
    """

    memberships: tuple[Membership, ...]
    entries: tuple[Entry, ...]
    faults: dict[str, str]


def tables_of(run: Run) -> RunTables:
    """Read the tables of a run. A damaged one is empty, and has a fault."""
    faults = _fault_of_scores(run)
    memberships = _rows(run, CLUSTERS, _membership, faults)
    entries = _rows(run, LEDGER, _entry, faults)
    return RunTables(tuple(memberships), tuple(entries), faults)


def _fault_of_scores(run: Run) -> dict[str, str]:
    """Return a fault where `metrics.csv` is not what the run has written, by the mark in its summary."""
    if run.path is None:
        return {}
    file, mark = MetricsFile(run.path / SCORES), run.summary.get(METRICS_MARK)
    if isinstance(mark, dict) and type(mark.get("bytes")) is int and isinstance(mark.get("sha256"), str):
        what = file.fault(mark)
    else:  # a summary without one
        what = "holds no scores" if run.results and not run.rows else None
    if what is None:
        return {}
    way_out = "What is drawn over rounds lacks what is missing there; final scores are those of summary.json."
    return {
        SCORES: f"{file.path} {what}: it is not the file that the run has written. {way_out} Restore it from a copy."
    }


def _rows(run: Run, file: str, make: Callable[[dict[str, str], Run], R], faults: dict[str, str]) -> list[R]:
    if run.path is None or not (run.path / file).exists():
        return []
    path = run.path / file
    row_by_key: dict[tuple[int, str, str], R] = {}
    try:
        for number, line in _lines(path):
            try:
                row = make(line, run)
            except ValueError as error:
                raise UnreadableError(f"its row {number} is none of such a file: {error}") from None
            key = (row.round, row.client, row.cluster)
            if key in row_by_key:
                raise UnreadableError(
                    f"row {number} gives {row.cluster} of client {row.client} in round {row.round} again"
                )
            row_by_key[key] = row
    except (OSError, ValueError, csv.Error) as error:
        faults[file] = f"{path} is damaged: {error}. It is in no table or picture; restore it, or run the method again."
        return []
    return list(row_by_key.values())


def _lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a table with their numbers."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise UnreadableError("it is not text") from None
    if not text.endswith("\n"):  # these files are replaced at once, so a last row without an end was cut
        raise UnreadableError("its end is missing")
    wanted = [field.name for field in fields(Entry if path.name == LEDGER else Membership)]
    lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    missing = [name for name in wanted if name not in (lines.fieldnames or ())]
    if missing:
        raise UnreadableError(f"it has no column '{missing[0]}'")
    for number, line in enumerate(lines, start=2):
        if None in line or None in line.values():
            raise UnreadableError(f"its row {number} has not as many cells as there are columns")
        yield number, {name: sheets.plain(cell) for name, cell in line.items()}


def _membership(line: dict[str, str], run: Run) -> Membership:
    share = _number(line, "share")
    if not 0 < share <= 1 + 1e-6:
        raise ValueError(f"a share of {share:g}")
    return Membership(_round(line, run), _client(line, run), line["cluster"], min(share, 1.0))


def _entry(line: dict[str, str], run: Run) -> Entry:
    paid, refunded, rewarded = (_number(line, name) for name in ("paid", "refunded", "rewarded"))
    least = min(paid, refunded, rewarded)
    if least < 0:
        raise ValueError(f"an amount of {least:g} tokens")
    contribution, error = (None if line[name] == "" else _number(line, name) for name in ("contribution", "error"))
    return Entry(
        _round(line, run),
        line["cluster"],
        _client(line, run),
        paid,
        refunded,
        rewarded,
        contribution=contribution,
        error=error,
    )


def _number(line: dict[str, str], name: str) -> float:
    try:
        value = float(line[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} is {line[name]!r:.40}")
    return value


def _round(line: dict[str, str], run: Run) -> int:
    rounds = run.summary.get("rounds")
    try:
        number = int(line["round"])
    except ValueError:
        raise ValueError(f"round is {line['round']!r:.40}") from None
    if number < 1 or (isinstance(rounds, int) and number > rounds):
        raise ValueError(f"it is of round {number}, and summary.json of {rounds} rounds")
    return number


def _client(line: dict[str, str], run: Run) -> str:
    if run.clients and line["client"] not in run.clients:
        raise ValueError(f"the run has no client {line['client']!r:.40}")
    return line["client"]

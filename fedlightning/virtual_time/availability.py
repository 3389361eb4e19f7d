"""When a client can be reached."""

from __future__ import annotations

import csv
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedlightning.errors import ConfigurationError
from fedlightning.ranges import number_in
from fedlightning.virtual_time.settings import Described, number, uniform

DAY = 86400.0


class Availability(Described, ABC):
    """A model of when clients can be reached. It is asked when a client is to start a visit, not while it trains."""

    @abstractmethod
    def available(self, seed: int, client: str, time: float) -> bool:
        """Return whether a client can start a visit at a time.

        Args:
            seed: The clock's seed.
            client: The client's id.
            time: Virtual seconds since the run began.
        """

    @abstractmethod
    def next_available(self, seed: int, client: str, time: float) -> float:
        """Return the first time from `time` on at which a client can start a visit; infinity: never again."""

    def clients(self) -> set[str]:
        """Return the clients that are named."""
        return set()


class AlwaysAvailable(Availability):
    """Every client can be reached at any time."""

    def available(self, seed: int, client: str, time: float) -> bool:
        """Return True."""
        return True

    def next_available(self, seed: int, client: str, time: float) -> float:
        """Return the time itself."""
        return time


class BernoulliAvailability(Availability):
    """Time is cut into slots, and in each of them a client is there with a probability, independently of all else.

    Args:
        probability: Probability of a client in a slot.
        slot: Seconds of a slot.

    Raises:
        ConfigurationError: If the probability is not in [0.001, 1], or the slot is not positive.

    Example:
        >>> model = BernoulliAvailability(0.5, slot=60)
        >>> sum(model.available(0, str(client), 30.0) for client in range(1000))
        503
    """

    def __init__(self, probability: float = 0.5, slot: float = 3600.0) -> None:
        self.probability = number("BernoulliAvailability", "probability", probability, least=0.001, most=1)
        self.slot = number("BernoulliAvailability", "slot", slot, above=True)

    def available(self, seed: int, client: str, time: float) -> bool:
        """Return the draw of the client and the slot."""
        return self._in_slot(seed, client, slot_of(time, self.slot))

    def next_available(self, seed: int, client: str, time: float) -> float:
        """Return the time itself, or the start of the next slot in which the client is there."""
        place = slot_of(time, self.slot)
        if self._in_slot(seed, client, place):
            return time
        while not self._in_slot(seed, client, place):
            place += 1
        return place * self.slot

    def _in_slot(self, seed: int, client: str, place: int) -> bool:
        return uniform(seed, "available", client, place) < self.probability


class DayNightAvailability(Availability):
    """Every client is there for a part of each day: devices that train at night, on the charger.

    A client's window begins at `start`, shifted by an amount of its own between 0 and `spread`: its time zone and habits.

    Args:
        length: Seconds of the window.
        start: Seconds from the beginning of a period to the window of a client without a shift.
        spread: Largest shift in seconds, drawn uniformly by client. Default: a whole period.
        period: Seconds of a day.

    Raises:
        ConfigurationError: If the window lets nobody in, or is longer than a period.

    Example:
        >>> night = DayNightAvailability(length=6 * 3600, start=0, spread=0)
        >>> night.available(0, "a", 3600.0), night.available(0, "a", 7 * 3600.0), night.next_available(0, "a", 7 * 3600.0)
        (True, False, 86400.0)
    """

    def __init__(
        self, length: float = 8 * 3600.0, start: float = 0.0, spread: float | None = None, period: float = DAY
    ) -> None:
        where = "DayNightAvailability"
        self.period = number(where, "period", period, above=True)
        self.start = number(where, "start", start, most=self.period)
        self.spread = self.period if spread is None else number(where, "spread", spread, most=self.period)
        self.length = number(where, "length", length)
        if self.length == 0 or self.length > self.period:
            rule = "nobody would ever be let in" if self.length == 0 else f"a period has {self.period:g}"
            raise ConfigurationError(
                f"DayNightAvailability got length={length!r} seconds: {rule}. Give more than 0 and at most a period."
            )

    def available(self, seed: int, client: str, time: float) -> bool:
        """Return whether the time is in the client's window."""
        return time < self._begin(seed, client, time) + self.length

    def next_available(self, seed: int, client: str, time: float) -> float:
        """Return the time itself, or when the client's next window begins."""
        if self.available(seed, client, time):
            return time
        return self._window(self._number(seed, client, time) + 1, self._shift(seed, client))

    def _shift(self, seed: int, client: str) -> float:
        return self.start + (self.spread * uniform(seed, "time zone", client) if self.spread else 0.0)

    def _window(self, number: int, shift: float) -> float:
        return shift + number * self.period

    def _number(self, seed: int, client: str, time: float) -> int:
        """Return the number of the last window that has begun at a time."""
        shift = self._shift(seed, client)
        number = math.floor((time - shift) / self.period)
        if self._window(number + 1, shift) <= time:  # the division was rounded down
            return number + 1
        return number if self._window(number, shift) <= time else number - 1

    def _begin(self, seed: int, client: str, time: float) -> float:
        return self._window(self._number(seed, client, time), self._shift(seed, client))


class TraceAvailability(Availability):
    r"""Intervals from a file: each line of the CSV names a client and the seconds from and to which it is there.

    Args:
        path: CSV file with the columns `client`, `start` and `end` (seconds; `end` is not part of the interval).
        period: Seconds after which the trace begins anew; `None`: it happens once.
        others: Whether clients that the file does not name are always there. By default they never are.

    Raises:
        ConfigurationError: If the file cannot be read, has other columns, or lets nobody in.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "trace.csv"
        >>> _ = path.write_text("client,start,end\na,0,10\na,50,60\nb,20,30\n")
        >>> trace = TraceAvailability(path, period=100)
        >>> trace.available(0, "a", 5), trace.available(0, "b", 5), trace.available(0, "b", 125)
        (True, False, True)
        >>> trace.next_available(0, "a", 10)
        50.0
    """

    def __init__(self, path: str | Path, period: float | None = None, others: bool = False) -> None:
        self.path = str(path)
        self.period = None if period is None else number("TraceAvailability", "period", period, above=True)
        self.others = others
        self._intervals = self._read(Path(path))
        latest = max((ends[-1] for _, ends in self._intervals.values()), default=0.0)
        if self.period is not None and latest > self.period:
            raise ConfigurationError(
                f"TraceAvailability: {path} goes up to {latest:g} seconds, and period={period:g} would cut it off. Give a "
                "period that holds the whole trace."
            )

    def _read(self, path: Path) -> dict[str, tuple[list[float], list[float]]]:
        try:
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows, columns = list(reader), reader.fieldnames or []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"TraceAvailability cannot read {path}: {error}. Give a CSV file with the columns client, start and end."
            ) from None
        missing = [name for name in ("client", "start", "end") if name not in columns]
        if missing:
            raise ConfigurationError(
                f"TraceAvailability: {path} has the columns {list(columns)}; it needs client, start and end (seconds)."
            )
        intervals_by_client: dict[str, list[tuple[float, float]]] = {}
        for line, row in enumerate(rows, start=2):
            start, end = (_seconds(path, line, name, row[name]) for name in ("start", "end"))
            if end < start or start < 0 or not row["client"]:
                raise ConfigurationError(
                    f"TraceAvailability: line {line} of {path} says {dict(row)!r}. An interval has a client, and begins at 0 "
                    "or later and before it ends."
                )
            if end > start:
                intervals_by_client.setdefault(row["client"].strip(), []).append((start, end))
        if not intervals_by_client and not self.others:
            raise ConfigurationError(
                f"TraceAvailability: {path} has no interval, so nobody would ever be let in. Give each client one line for "
                "each time that it is there."
            )
        return {client: _merged(intervals) for client, intervals in intervals_by_client.items()}

    def available(self, seed: int, client: str, time: float) -> bool:
        """Return whether the time is in one of the client's intervals."""
        return self.next_available(seed, client, time) == time

    def next_available(self, seed: int, client: str, time: float) -> float:
        """Return the time itself, the start of the client's next interval, or infinity after its last one."""
        intervals = self._intervals.get(client)
        if intervals is None:
            return time if self.others else math.inf
        starts, ends = intervals
        if self.period is None:
            place = bisect_right(ends, time)
            return math.inf if place == len(ends) else max(time, starts[place])
        turn = slot_of(time, self.period)
        offset = turn * self.period
        place = bisect_right(ends, time, key=lambda end: offset + end)
        return max(time, offset + starts[place]) if place < len(ends) else (turn + 1) * self.period + starts[0]

    def clients(self) -> set[str]:
        """Return nobody: a trace may well name more clients than a federation has."""
        return set()


def slot_of(time: float, length: float) -> int:
    """Return the number of the slot that a time lies in: slot `k` begins at the float `k * length`."""
    number = math.floor(time / length)
    if (number + 1) * length <= time:  # the division was rounded down
        return number + 1
    return number if number * length <= time else number - 1


def _seconds(path: Path, line: int, name: str, value: Any) -> float:
    try:
        seconds = number_in(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigurationError(
            f"TraceAvailability: line {line} of {path} has {name}={value!r}, which is not a time in seconds."
        )
    return seconds


def _merged(intervals: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return starts and ends in order, with intervals that touch made one."""
    starts: list[float] = []
    ends: list[float] = []
    for start, end in sorted(intervals):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends

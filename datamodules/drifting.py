"""Clients whose training data change from round to round: windows of their samples in the order of time."""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from lightning import LightningDataModule

from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.views import Indices
from fedlightning.datamodules.wrapped import WrappedIndexedDataModule
from fedlightning.ranges import Instance, PositiveInt, checked

DATE = re.compile(r"\d{4}(-|$)")
ZONE = re.compile(r":\d\d\S*?(Z|[+-]\d\d:?\d\d)$")


class DriftingDataModule(WrappedIndexedDataModule):
    """The clients of another data module, each with new training samples of a later time every few rounds.

    A client's samples are put in the order of time and cut into windows. In rounds `0 .. every - 1` (counted from 0) it
    trains on window 0, in the next `every` rounds on window 1, and so on; the last window stays until the end. With
    `memory=1` a client trains on the present window only (a sliding window), with more on so many of the newest, with
    `None` on all so far (growing data). No sample is trained on before its window's first round.

    Which samples a client trains on is a function of the round alone: retries, resumed runs, engines and sites see the same.
    Sample counts, and with them the weights of a mean, class counts and unions of clients are those of the round. Data for
    validation and test stay fixed: those of the last window, or of all times. They are held out by the source, so nothing
    trains on them. Scores before the last window's first round are therefore of a time that clients have not seen yet, and
    a model that is chosen by validation is chosen for the last window.

    With one window the data are those of the source, bit for bit. Methods that go by a client's samples over several rounds
    (SampleDP, FedGKT, FedTYPE) and loops without common rounds are refused. What a source learns of its training rows
    itself, such as means for scaling, it learns of all windows: of tables `scale` has to be `"none"`, with `statistics` of
    another source where features need scaling.

    Args:
        source: A data module over indexed data, such as `TabularFederatedDataModule(...)`.
        by: Column of the source with the time of each sample: numbers, or dates as in 2024-05-31. `None`: the order of the
            samples in the source's data set, as of recordings.
        windows: Number of windows. Each client's training samples are cut at its own times, into parts of equal size but
            for equal times, which stay together.
        starts: In place of `windows`: the times at which all windows but the first begin, the same for all clients. Needs
            `by`.
        every: Rounds until the next window.
        memory: Windows that a client trains on, the present one included. `None`: all so far.
        scored: Whose validation and test samples score models: those of the `"last"` window, or `"all"`.

    Raises:
        ValueError: If neither or both of `windows` and `starts` are given; at `setup`, if a sample has no time, or a client
            would have no training sample in some round.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, DriftingDataModule, IIDPartitioner
        >>> data = DriftingDataModule(DigitsDataModule(IIDPartitioner(4)), windows=3, every=2, memory=None)
        >>> data.setup()
        >>> data.sizes_by_round("0")
        [96, 96, 192, 192, 288]
        >>> [data.at_round(round).num_samples("0") for round in (0, 1, 2, 100)]
        [96, 96, 192, 288]
    """

    no_public = "time of a client"
    no_statistics = (
        "whose statistics would be of later windows too. Give it scale: none, and statistics and lists of categories of "
        "another source."
    )

    @checked
    def __init__(
        self,
        source: Annotated[IndexedFederatedDataModule, Instance("It cuts indexed data.")],
        by: str | None = None,
        windows: PositiveInt | None = None,
        starts: Sequence[float | str] | None = None,
        every: PositiveInt = 1,
        memory: PositiveInt | None = 1,
        scored: Literal["last", "all"] = "last",
    ) -> None:
        name = type(self).__name__
        super().__init__(source)
        if (windows is None) == (starts is None) or (starts is not None and (by is None or not len(starts))):
            raise ValueError(
                f"{name} got windows={windows}, starts={starts} and by={by!r}; give a number of windows, or the times at "
                "which all but the first begin and the column that they are of."
            )
        self.by, self.starts = by, None if starts is None else list(starts)
        self.windows = int(windows) if windows is not None else 1 + len(self.starts or ())
        self.every, self.memory, self.scored = int(every), None if memory is None else int(memory), scored
        self._round: int | None = None
        self._window: list[np.ndarray] = []  # of each client's training samples

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        self.set_up_source()
        if self.source.coupled_records:
            raise ValueError(
                f"{type(self).__name__}: {self.source.coupled_records} Here these rows are of later windows, too."
            )
        clients, splits = self.source.client_ids, dict(self.source._splits)
        windows = self._windows(clients, splits)
        self._window = [window["train"] for window in windows]
        for place, client in enumerate(clients):
            count = len(self._window[place])
            if count and not min(self._sizes(place)):
                raise ValueError(
                    f"DriftingDataModule leaves client {client!r} without a training sample in some round: its {count} "
                    f"have {len(np.unique(self._window[place]))} of {self.windows} windows. Give fewer windows, a longer "
                    "memory, or clients with more samples."
                )
        for name in [name for name in splits if name != "train" and self.scored == "last"]:
            pairs = zip(splits[name].indices, windows, strict=True)
            last = [np.asarray(rows, dtype=np.int64)[window[name] == self.windows - 1] for rows, window in pairs]
            splits[name] = replace(splits[name], indices=last)
        return clients, splits

    def _windows(self, clients: Sequence[str], splits: Mapping[str, Split]) -> list[dict[str, np.ndarray]]:
        """Return the window of each client's samples, by split."""
        times: list[dict[str, np.ndarray]] = []
        if self.by is None:
            for place in range(len(clients)):  # a sample's time is its share of the client's samples before it
                orders = {name: np.argsort(np.argsort(split.indices[place])) for name, split in splits.items()}
                times.append({name: order / max(len(order), 1) for name, order in orders.items()})
            starts = np.arange(1, self.windows) / self.windows
            return [{name: np.searchsorted(starts, time[name], "right") for name in time} for time in times]
        cells = [
            (place, name, self.source.sample_values(client, name, self.by))
            for place, client in enumerate(clients)
            for name in splits
        ]
        flat = in_time(self.by, [*(self.starts or ()), *(cell for _, _, column in cells for cell in column)])
        common, flat = np.split(flat, [len(self.starts or ())])
        if (np.diff(common) <= 0).any():
            raise ValueError(f"DriftingDataModule got starts={self.starts}; give times that become later.")
        ends = np.cumsum([len(column) for _, _, column in cells])[:-1]
        times = [{} for _ in clients]
        for (place, name, _), values in zip(cells, np.split(flat, ends), strict=True):
            times[place][name] = values
        windows = []
        for time in times:
            train = np.sort(time["train"] if len(time["train"]) else np.concatenate(list(time.values())))
            ranks = len(train) * np.arange(1, self.windows) // self.windows
            starts = common if self.starts is not None or not len(train) else train[ranks]
            windows.append({name: np.searchsorted(starts, time[name], "right") for name in time})
        return windows

    @property
    def original(self) -> LightningDataModule:
        return self.source.original

    @property
    def datamodule(self) -> LightningDataModule:
        """What a client's module sees as `self.trainer.datamodule`, as it does without drift."""
        return getattr(self.source, "datamodule", self.source)

    @property
    def drifts(self) -> bool:
        return True

    def at_round(self, round: int) -> DriftingDataModule:
        drifted = copy.copy(self)
        drifted._round = int(round)
        return drifted

    def sizes_by_round(self, client: str) -> list[int]:
        sizes = self._sizes(self._places[str(client)])
        return [size for size in sizes[:-1] for _ in range(self.every)] + sizes[-1:]

    def _sizes(self, place: int) -> list[int]:
        """Return a client's training samples while each window is the present one."""
        return [int(self._present(place, now).sum()) for now in range(self.windows)]

    def _present(self, place: int, now: int) -> np.ndarray:
        """Return which of a client's training samples it trains on while window `now` is the present one."""
        window = self._window[place]
        return (window <= now) & (window > (-1 if self.memory is None else now - self.memory))

    def indices(self, client: str, split: str = "train") -> Indices:
        indices = super().indices(client, split)
        if split != "train" or self._round is None:
            return indices
        return indices[self._present(self._places[str(client)], min(self._round // self.every, self.windows - 1))]

    def by_window(self) -> IndexedFederatedDataModule:
        """Return the training samples with the windows as clients, to see how different these are."""
        pooled, train = copy.copy(self), self._splits["train"]
        places = [self._places[client] for client in self.client_ids]
        indices = np.concatenate([np.asarray(train.indices[place], dtype=np.int64) for place in places])
        window = np.concatenate([self._window[place] for place in places])
        parts = [indices[window == number] for number in range(self.windows)]
        pooled._client_ids, pooled._round = [str(number + 1) for number in range(self.windows)], None
        pooled._places = {client: place for place, client in enumerate(pooled._client_ids)}
        pooled._splits = {"train": replace(train, indices=parts)}
        return pooled

    @property
    def columns(self) -> list[str]:
        """Names of the source's columns, if it has any."""
        return list(getattr(self.source, "columns", ()))

    def sample_values(self, client: str, split: str, column: str) -> list[str]:
        values = self.source.sample_values(client, split, column)
        kept = np.isin(self.source.indices(client, split), self.indices(client, split))
        return [value for value, here in zip(values, kept, strict=True) if here]

    @property
    def partition_name(self) -> str:
        order = "in their order" if self.by is None else f"by {self.by}"
        kept = {1: "", None: ", growing"}.get(self.memory, f", the newest {self.memory} at a time")
        return f"{self.source.partition_name}, {self.windows} windows {order}{kept}"

    @property
    def planted_groups(self) -> dict[str, int] | None:
        return self.source.planted_groups

    def fingerprint(self, split: str) -> str:
        """Return a short hash of which client holds which samples, and in which round."""
        base_hash = super().fingerprint(split)
        if split != "train":
            return base_hash
        windows = [self._window[self._places[client]].tolist() for client in self.client_ids]
        return hashlib.sha256(f"{base_hash} {self.every} {self.memory} {windows}".encode()).hexdigest()[:12]


def in_time(column: str, cells: Sequence[float | str]) -> np.ndarray:
    """Return cells of a column as numbers that grow with time, float64 `(cells,)`.

    Example:
        >>> from fedlightning.datamodules.drifting import in_time
        >>> in_time("year", ["2009", "2011.5"]).tolist()
        [2009.0, 2011.5]
        >>> first, second = in_time("day", ["2009-05-31", "2009-06-01 12:00"])
        >>> bool(first < second)
        True
    """
    try:
        times = np.array(cells, dtype=np.float64)
    except (TypeError, ValueError):
        words = [str(cell).strip() for cell in cells]
        try:
            wrong = next((word for word in words if word not in ("", "NaT") and not DATE.match(word)), None)
            if wrong is not None:  # numpy reads 20200401 as a year, and "today" as the day of the run
                raise ValueError(f"{wrong!r} is not such a date")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*timezone")  # numpy takes the offset from UTC off
                dates = np.array(words, dtype="datetime64[us]")
        except ValueError as error:
            raise ValueError(
                f"DriftingDataModule got by={column!r}, whose cells are neither numbers nor dates as in 2024-05-31: {error}."
            ) from error
        if 0 < sum(bool(ZONE.search(word)) for word in words) < sum(word not in ("", "NaT") for word in words):
            raise ValueError(
                f"DriftingDataModule got by={column!r}, where some times have a time zone and others none, so that nobody "
                "can tell which was first. Give all of them one, starts included, or none."
            ) from None
        times = np.where(np.isnat(dates), np.nan, dates.astype(np.int64).astype(np.float64))
    if np.isnan(times).any():
        raise ValueError(
            f"DriftingDataModule got by={column!r}, in which {int(np.isnan(times).sum())} cells are empty. Fill them in, or "
            "remove the rows: a sample without a time is in no window."
        )
    return times

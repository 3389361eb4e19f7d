"""Survival tables: a CSV file with a time, an event, and a column that names the site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from fedlightning.datamodules.csv_tables import Column, refuse_extremes
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.tabular import TabularFederatedDataModule
from fedlightning.ranges import checked, number_in


class SurvivalTableDataModule(TabularFederatedDataModule):
    r"""A CSV file with a header, one patient a row: the time to an event or to censoring, and perhaps a column of sites.

    Everything but the target is as in `TabularFederatedDataModule`. `x` is float32 `(batch, features)`, `y` float32
    `(batch, 2)`: 1 for an event or 0 for censoring, and the time, as `CoxRegressor` takes them. Cuts are stratified by event;
    `class_counts` counts censored patients and events.

    The NCCTG lung cancer data (Loprinzi et al. 1994; `lung` of R's survival package, public) have 228 patients of 18
    enrolling
    institutions: `target="time"`, `event="status"`, `event_value="2"`, `client="inst"`. Its patient without an institution is
    refused by the line; remove it, as it can be at no client. `configs/data/lung.yaml` has the rest.

    Args:
        path: The file, in UTF-8.
        target: Column of times, numbers of at least 0.
        event: Column that says whether the event was seen.
        client: Column that names each row's client (a hospital). It is not a feature.
        partitioner: Divides the rows if no column does; it may divide by event.
        event_value: The value of `event` that means an event; every other value is censoring.
        options: The other arguments of `TabularFederatedDataModule`, by name; `task` and `target_statistics` stay as
            they are.

    Raises:
        ValueError: If a value is out of its range; from `setup`, if a time is negative or no number, or no row has the event.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules import SurvivalTableDataModule
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "lung.csv")
        ...     rows = [f"{i % 2},{100 + i},{1 + i % 3 // 2},{50 + i}" for i in range(20)]
        ...     _ = path.write_text("\n".join(["inst,time,status,age", *rows]))
        ...     data = SurvivalTableDataModule(path, "time", "status", client="inst", event_value="2", batch_size=4)
        ...     data.setup()
        >>> x, y = next(iter(data.client_dataloader("0", "train")))
        >>> data.client_ids, data.feature_names, y.shape
        (['0', '1'], ['age'], torch.Size([4, 2]))
    """

    @checked
    def __init__(
        self,
        path: str | Path,
        target: str,
        event: str,
        client: str | None = None,
        partitioner: Partitioner | None = None,
        *,
        event_value: str = "1",
        **options: Any,
    ) -> None:
        super().__init__(path, target, client, partitioner, **options)
        if self.task != "auto" or self.target_statistics is not None:
            raise ValueError(
                f"{type(self).__name__} got task or target_statistics; its targets are events and times as they are. "
                "Leave them out."
            )
        self.event, self.event_value = event, event_value
        self.class_names = ["censored", "event"]

    @property
    def _targeted(self) -> list[str]:
        return [self.target, self.event]

    def _targets(self, columns: Sequence[Column], kept: np.ndarray) -> tuple[torch.Tensor, np.ndarray | None]:
        times, events = columns
        if times.numbers is None:
            raise ValueError(f"{self.path}: {times.name!r} holds words; times are numbers.")
        kept_times = times.numbers[kept]
        if (kept_times < 0).any():
            row = int(np.flatnonzero(times.numbers < 0)[0])
            raise ValueError(
                f"{self.path}: sample {row + 1} has the time {times.numbers[row]:g} in {times.name!r}; it is negative."
            )
        refuse_extremes(f"{self.path}: the time {times.name!r}", kept_times, [np.arange(len(kept_times))])
        same = np.array([_same(cell, self.event_value) for cell in np.array(events.cells)[kept]])
        if not same.any():
            values = sorted(set(events.cells) - {""})
            raise ValueError(
                f"{self.path}: no row has {events.name!r} = {self.event_value!r}; its values are "
                f"{', '.join(values[:10])}. Give the one that means an event as event_value."
            )
        others = sorted(set(np.array(events.cells)[kept][~same].tolist()))
        if len(others) > 1:
            rank_zero_warn(
                f"{self.path}: {events.name!r} has {', '.join(others[:10])} beside {self.event_value!r}, and all "
                "of them count as censored. Correct what is a slip.",
                category=UserWarning,
            )
        classes = same.astype(np.int64)
        return torch.from_numpy(np.stack([classes, kept_times], axis=1)).float(), classes


def _same(cell: str, value: str) -> bool:
    """Return True if a cell holds a value: the same words, or the same number (2 and 2.0)."""
    try:
        return cell == value or number_in(cell) == number_in(value)
    except ValueError:
        return False

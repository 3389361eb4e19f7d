"""KU-HAR: what ninety people do, from the sensors of a phone at the waist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from fedlightning.datamodules.base import in_order
from fedlightning.datamodules.download import refuse_absent
from fedlightning.datamodules.har import read_numbers
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import PositiveInt, ShareBelowOne, checked

ACTIVITIES = (
    *("Stand", "Sit", "Talk-sit", "Talk-stand", "Stand-sit", "Lay", "Lay-stand", "Pick", "Jump", "Push-up", "Sit-up"),
    *("Walk", "Walk-backwards", "Walk-circle", "Run", "Stair-up", "Stair-down", "Table-tennis"),
)
"""Names of the classes, in order: the folders `0.Stand` to `17.Table-tennis`."""
_FOLDER = re.compile(r"(\d+)\.\D.*")
_FILE = re.compile(r"(\d+)_[A-Z]_(\d+(?:_\d+)*)\.csv")
_COLUMNS = 8  # time, three accelerations, time, three angular velocities


class KUHARDataModule(NaturalSites):
    """KU-HAR: recordings of a phone's accelerometer and gyroscope at 100 Hz, 18 activities; the 90 subjects are the clients.

    Sikder, Nahid 2021, "KU-HAR: An open dataset for heterogeneous human activity recognition"; CC BY 4.0. Nothing is
    downloaded: unpack `2.Trimmed_interpolated_data.zip` of https://data.mendeley.com/datasets/45f952y38r (version 5) and
    give the folder with `0.Stand` to `17.Table-tennis` as root. The publisher's table of ready-made windows has no
    subjects, so it cannot be divided by them.

    Recordings are cut into windows that do not overlap; what is left at their end is dropped. `x` is float32 `(batch, 6,
    window)`: accelerations in m/s² and angular velocities in rad/s along x, y and z. `y` is int64 `(batch,)`, the place in
    `ACTIVITIES`. All windows of a recording are in one split, stratified by activity. Subjects did few activities each, so
    labels are very skewed.

    Args:
        root: Folder of the folders of activities.
        batch_size: Number of samples in a batch.
        val_fraction: Share of the training recordings for validation, in [0, 1).
        test_fraction: Share of a subject's recordings for testing, in [0, 1).
        window: Samples of a window; 300 are three seconds.
        min_windows: Subjects with fewer windows are left out, with a warning.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if a file is damaged.

    Example:
        >>> from fedlightning.datamodules import KUHARDataModule
        >>> KUHARDataModule("data/KU-HAR").window  # files are read by data.setup()
        300
    """

    classes = len(ACTIVITIES)

    @checked
    def __init__(
        self,
        root: str = "data/KU-HAR",
        batch_size: int = 32,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne = 0.2,
        *,
        window: PositiveInt = 300,
        min_windows: PositiveInt = 20,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.window, self.min_windows = int(window), int(min_windows)

    def prepare_data(self) -> None:
        """Check that the folders are there (Lightning's hook)."""
        found = {match.group(1) for path in self.root.glob("*") if (match := _FOLDER.fullmatch(path.name))}
        lacking = [f"{k}.{name}" for k, name in enumerate(ACTIVITIES) if str(k) not in found]
        way = "unpack 2.Trimmed_interpolated_data.zip of https://data.mendeley.com/datasets/45f952y38r there"
        refuse_absent(self, lacking, self.root, way)

    def read(self) -> SiteSamples:
        windows: list[np.ndarray] = []
        labels: list[int] = []
        subjects: list[str] = []
        gaps = 0
        for activity, path in self._recordings():
            values = _read(path)
            if not np.isfinite(values).all():
                gaps += 1
                continue
            count = len(values) // self.window
            cut = values[: count * self.window].reshape(count, self.window, 6)
            windows.append(cut.transpose(0, 2, 1))
            labels.append(activity)
            subjects.append(path.name.partition("_")[0])
        sizes = [len(part) for part in windows]
        y, recordings = np.repeat(labels, sizes), np.repeat(np.arange(len(sizes)), sizes)
        who = np.repeat(np.array(subjects), sizes)
        counts = {subject: int((who == subject).sum()) for subject in dict.fromkeys(subjects)}
        clients = in_order(subject for subject, count in counts.items() if count >= self.min_windows)
        if not clients:
            raise ValueError(f"{self.root}: no subject has min_windows={self.min_windows} windows; use fewer.")
        if gaps or len(clients) < len(counts):
            rank_zero_warn(
                f"KUHARDataModule leaves out {gaps} recordings with gaps and {len(counts) - len(clients)} of "
                f"{len(counts)} subjects with fewer than min_windows={self.min_windows} windows.",
                category=UserWarning,
            )
        data = ArrayDataset(torch.from_numpy(np.concatenate(windows)), torch.from_numpy(y))
        return SiteSamples(
            data, {client: {"train": np.flatnonzero(who == client)} for client in clients}, y, recordings
        )

    def _recordings(self) -> list[tuple[int, Path]]:
        """Return the activity and the file of each recording, in order."""
        found: list[tuple[int, Path]] = []
        for folder in sorted(self.root.iterdir()):
            match = _FOLDER.fullmatch(folder.name)
            if not match or not folder.is_dir():
                continue
            activity = int(match.group(1))
            for path in sorted(folder.glob("*.csv")):
                if not _FILE.fullmatch(path.name):
                    raise ValueError(
                        f"{path} is no recording by its name, such as 1001_A_1.csv (subject, kind, number)."
                    )
                if activity >= len(ACTIVITIES):
                    raise ValueError(f"{folder} is no activity 0 ... {len(ACTIVITIES) - 1}.")
                found.append((activity, path))
        return sorted(found)


def _read(path: Path) -> np.ndarray:
    """Return a recording's six signals, `(samples, 6)`; empty cells are NaN."""
    found = read_numbers(path, _COLUMNS, ",")
    if not len(found):
        raise ValueError(f"{path} is empty; get it again.")
    return found[:, [1, 2, 3, 5, 6, 7]].astype(np.float32)

"""What people do, from the sensors of a phone: UCI-HAR (thirty people) and KU-HAR (ninety, the phone at the waist)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from fedlightning.datamodules.csv_tables import extreme_of, text_of
from fedlightning.datamodules.download import refuse_absent
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.datamodules.views import ArrayDataset, Indices
from fedlightning.ranges import PositiveInt, ShareBelowOne, checked, number_in

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""Channels of a window, in order."""
ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
SUBJECTS = 30
"""Numbers of the subjects: 1 to this."""
WINDOW, FEATURES = 128, 561


class UCIHARDataModule(NaturalSites):
    """UCI-HAR: 10299 windows of 2.56 s of a phone's sensors, six activities; the 30 subjects are the clients.

    Anguita, Ghio, Oneto, Parra, Reyes-Ortiz 2013; CC BY 4.0. Nothing is downloaded: unpack
    https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip and give the folder
    `UCI HAR Dataset` (with `train` and `test`) as root.

    `x` is float32 `(batch, 9, 128)` (accelerations in g and angular velocities in rad/s, `SIGNALS`), or `(batch, 561)` with
    `inputs="features"`; `y` int64 `(batch,)`, the place in `ACTIVITIES`.

    The publisher's split puts whole subjects into training or test, so no subject would have both. Here the windows of
    both parts are joined, and each subject's are cut: of each activity the last ones are for testing, those before for
    validation. Windows overlap by half with the next; the one before each cut is left out, so that no two splits share
    a second.

    Args:
        root: Folder `UCI HAR Dataset`.
        batch_size: Number of samples in a batch.
        val_fraction: Share of the training windows for validation, in [0, 1).
        test_fraction: Share of a subject's windows for testing, in [0, 1).
        inputs: `"signals"` or the publisher's `"features"`.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if a file is damaged.

    Example:
        >>> from fedlightning.datamodules import UCIHARDataModule
        >>> UCIHARDataModule("data/UCI HAR Dataset").inputs  # files are read by data.setup()
        'signals'
    """

    common_options = ("inputs",)

    @checked
    def __init__(
        self,
        root: str = "data/UCI HAR Dataset",
        batch_size: int = 32,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne = 0.2,
        *,
        inputs: Literal["signals", "features"] = "signals",
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.test_fraction, self.inputs = val_fraction, test_fraction, inputs

    def prepare_data(self) -> None:
        """Check that the files are there (Lightning's hook)."""
        files = [path for part in ("train", "test") for path in self._files(part)]
        lacking = [str(path.relative_to(self.root)) for path in files if not path.is_file()]
        if lacking:
            raise FileNotFoundError(
                f"{type(self).__name__}: {', '.join(lacking[:3])} and {max(0, len(lacking) - 3)} more files are not "
                f"in {self.root}; unpack UCI's archive there."
            )

    def read(self) -> SiteSamples:
        parts = [self._read(part) for part in ("train", "test")]
        x, y, subjects = (np.concatenate(column) for column in zip(*parts, strict=True))
        clients = sort_clients(map(str, np.unique(subjects).tolist()))
        rows = {client: {"train": np.flatnonzero(subjects == int(client))} for client in clients}
        return SiteSamples(ArrayDataset(torch.from_numpy(x), torch.from_numpy(y)), rows, y)

    def cut(
        self, rows: Indices, fraction: float, draw: torch.Generator, samples: SiteSamples
    ) -> tuple[Indices, Indices]:
        labels = np.asarray(samples.labels)[rows]
        pieces = [_cut_last(rows[labels == activity], fraction) for activity in range(len(ACTIVITIES))]
        rest, last = (np.sort(np.concatenate(parts)) for parts in zip(*pieces, strict=True))
        return rest, last

    def _files(self, part: str) -> list[Path]:
        folder = self.root / part
        signals = [folder / "Inertial Signals" / f"{name}_{part}.txt" for name in SIGNALS]
        inputs = signals if self.inputs == "signals" else [folder / f"X_{part}.txt"]
        return [folder / f"subject_{part}.txt", folder / f"y_{part}.txt", *inputs]

    def _read(self, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, classes and subjects of a part."""
        subject_file, label_file, *files = self._files(part)
        subjects = _numbers_up_to(subject_file, SUBJECTS, "subject")
        labels = _numbers_up_to(label_file, len(ACTIVITIES), "activity")
        width = WINDOW if self.inputs == "signals" else FEATURES
        columns = [read_numbers(path, width) for path in files]
        for path, values in zip([label_file, *files], [labels, *columns], strict=True):
            if len(values) != len(subjects):
                raise ValueError(
                    f"{path} has {len(values)} lines and {subject_file.name} {len(subjects)}; the files do not belong "
                    "together."
                )
        x = np.stack(columns, axis=1) if self.inputs == "signals" else columns[0]
        return x.astype(np.float32), labels - 1, subjects


def _cut_last(rows: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Cut the last windows off, and leave out the one before them."""
    size = round(fraction * len(rows))
    return (rows[: max(0, len(rows) - size - 1)], rows[len(rows) - size :]) if size else (rows, rows[:0])


def _numbers_up_to(path: Path, most: int, what: str) -> np.ndarray:
    """Return the whole numbers from 1 of a file with one a line."""
    values = read_numbers(path, 1)[:, 0]
    wrong = np.flatnonzero(~np.isin(values, range(1, most + 1)))
    if len(wrong):
        raise ValueError(
            f"{path}, line {wrong[0] + 1}: {values[wrong[0]]:g} is not one of the {what} numbers 1 ... {most}."
        )
    return values.astype(np.int64)


def read_numbers(path: Path, width: int, delimiter: str | None = None) -> np.ndarray:
    """Return the numbers of a file, `width` on each line, float64 `(lines, width)`; cells without a value are NaN.

    Args:
        path: The file, in UTF-8.
        width: Numbers of a line.
        delimiter: Between two numbers; `None` for spaces, and no cell is without a value.

    Raises:
        ValueError: With the line that holds something else.
    """
    lines = text_of(path).splitlines()
    table = np.empty((len(lines), width))
    for number, line in enumerate(lines, start=1):
        cells = line.split(delimiter)
        try:
            table[number - 1] = [number_in(cell) if cell.strip() else np.nan for cell in cells]
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {len(cells)} cells, not {width} numbers ({error}).") from error
    flat = table.ravel()
    wrong = np.flatnonzero(np.isinf(flat) | (np.isnan(flat) & (delimiter is None))).tolist()
    if not wrong and (place := extreme_of(np.nan_to_num(flat))) is not None:
        wrong = [place]
    if wrong:
        row, column = divmod(wrong[0], width)
        raise ValueError(f"{path}, line {row + 1}: number {column + 1} is {flat[wrong[0]]}; get it again.")
    return table


KU_ACTIVITIES = (
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
    `KU_ACTIVITIES`. All windows of a recording are in one split, stratified by activity. Subjects did few activities each, so
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

    classes = len(KU_ACTIVITIES)
    common_options = ("window",)

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
        numbers = {match.group(1) for path in self.root.glob("*") if (match := _FOLDER.fullmatch(path.name))}
        lacking = [f"{k}.{name}" for k, name in enumerate(KU_ACTIVITIES) if str(k) not in numbers]
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
        clients = sort_clients(subject for subject, count in counts.items() if count >= self.min_windows)
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
        recordings: list[tuple[int, Path]] = []
        for folder in sorted(self.root.iterdir()):
            match = _FOLDER.fullmatch(folder.name)
            if not match or not folder.is_dir():
                continue
            activity = int(match.group(1))
            for path in sorted(folder.glob("*.csv")):
                if not _FILE.fullmatch(path.name):
                    raise ValueError(
                        f"{path} is not a recording by its name, such as 1001_A_1.csv (subject, kind, number)."
                    )
                if activity >= len(KU_ACTIVITIES):
                    raise ValueError(f"{folder} is not an activity 0 ... {len(KU_ACTIVITIES) - 1}.")
                recordings.append((activity, path))
        return sorted(recordings)


def _read(path: Path) -> np.ndarray:
    """Return a recording's six signals, `(samples, 6)`; empty cells are NaN."""
    table = read_numbers(path, _COLUMNS, ",")
    if not len(table):
        raise ValueError(f"{path} is empty; get it again.")
    return table[:, [1, 2, 3, 5, 6, 7]].astype(np.float32)

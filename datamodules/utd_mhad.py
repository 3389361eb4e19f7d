"""UTD-MHAD: what eight people do, from a sensor at the body and a skeleton that a camera sees."""

from __future__ import annotations

import io
import re
import struct
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fedlightning.datamodules.csv_tables import extreme_of
from fedlightning.datamodules.modality_dataset import ModalityDataset
from fedlightning.datamodules.multimodal_data import MultimodalDataModule
from fedlightning.datamodules.partitioners import NaturalPartitioner
from fedlightning.datamodules.plans import Partitioner
from fedlightning.ranges import Range, checked

ACTIONS, JOINTS = 27, 20
FILES = {"inertial": ("Inertial", "d_iner"), "skeleton": ("Skeleton", "d_skel")}
"""Modalities: the publisher's folder, and the name of the array in its files."""
_ARRAY, _PACKED = 14, 15
_PARTS = {*range(1, 8), 9, 12, 13, _ARRAY, _PACKED, 16, 17, 18}
"""Kinds of the parts of a file of MATLAB's version 5: numbers, an array, what is packed by zlib, texts."""
_NAME = re.compile(r"a(\d+)_s(\d+)_t(\d+)_(inertial|skeleton)\.mat")


class UTDMHADDataModule(MultimodalDataModule):
    """UTD-MHAD: 861 recordings of 27 actions by 8 subjects, who are the clients, with two modalities.

    Chen, Jafari, Kehtarnavaz 2015, "UTD-MHAD: A multimodal dataset for human action recognition utilizing a depth camera
    and a wearable inertial sensor"; free for research, with citation. Nothing is downloaded: get `Inertial.zip` and
    `Skeleton.zip` from https://personal.utdallas.edu/~kehtar/UTD-MHAD.html and unpack both in root.

    A batch is `({"inertial": (batch, 6, length), "skeleton": (batch, 60, length)}, labels)`: accelerations (g) and angular
    velocities (degrees/s), and the x, y and z of 20 joints relative to their mean in the first frame (metres). Recordings
    have different lengths; each signal is interpolated linearly to `length` values. `y` is int64 `(batch,)`, action 1 is 0.

    Subjects did each action four times. The last time is for testing, so that every client has all actions in training
    and test data; the publisher's split by subjects would leave clients without test data.

    Args:
        root: Folder with `Inertial` and `Skeleton`.
        partitioner: Divides the recordings. `None` makes a client of each subject.
        length: Values of each signal.
        test_trial: The times, from 1 on, that are tested: this one and later ones.
        options: The other arguments of `MultimodalDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if a file is damaged or lacks its other modality.

    Example:
        >>> from fedlightning.datamodules import UTDMHADDataModule
        >>> UTDMHADDataModule("data/UTD-MHAD", length=64).length  # files are read by data.setup()
        64
    """

    common_options = ("length",)

    @checked
    def __init__(
        self,
        root: str = "data/UTD-MHAD",
        partitioner: Partitioner | None = None,
        *,
        length: Annotated[int, Range("[2, inf)")] = 128,
        test_trial: Annotated[int, Range("[2, inf)")] = 4,
        **options: Any,
    ) -> None:
        super().__init__(NaturalPartitioner() if partitioner is None else partitioner, **options)
        self.root, self.length, self.test_trial = Path(root), int(length), int(test_trial)
        self._subjects: dict[str, np.ndarray] = {}

    def prepare_data(self) -> None:
        """Check that both folders are there (Lightning's hook)."""
        lacking = [folder for folder, _ in FILES.values() if not any((self.root / folder).glob("*.mat"))]
        if lacking:
            raise FileNotFoundError(
                f"UTDMHADDataModule: no recordings in {', '.join(str(self.root / name) for name in lacking)}; unpack "
                "Inertial.zip and Skeleton.zip of https://personal.utdallas.edu/~kehtar/UTD-MHAD.html there."
            )

    def load(self) -> tuple[ModalityDataset, ModalityDataset]:
        self.prepare_data()
        paths_by_modality: dict[str, dict[tuple[int, int, int], Path]] = {name: self._files(name) for name in FILES}
        for name, other in (("inertial", "skeleton"), ("skeleton", "inertial")):
            alone = sorted(set(paths_by_modality[name]) - set(paths_by_modality[other]))
            if alone:
                raise ValueError(
                    f"{paths_by_modality[name][alone[0]]} has no {other} recording beside it ({len(alone)} such files); "
                    "unpack both archives, or take it away."
                )
        keys = sorted(paths_by_modality["inertial"])
        inputs = {
            name: torch.from_numpy(np.stack([self._read(paths[key], name) for key in keys]))
            for name, paths in paths_by_modality.items()
        }
        y = torch.tensor([action - 1 for action, _, _ in keys])
        trials = np.array([trial for _, _, trial in keys])
        data, subjects = ModalityDataset(inputs, y), np.array([subject for _, subject, _ in keys])
        parts = {"train": np.flatnonzero(trials < self.test_trial), "test": np.flatnonzero(trials >= self.test_trial)}
        if not all(map(len, parts.values())):
            raise ValueError(
                f"UTDMHADDataModule got test_trial={self.test_trial}, and {self.root} has the times {trials.min()} to "
                f"{trials.max()}; leave some for training and some for testing."
            )
        self._subjects = {split: subjects[rows] for split, rows in parts.items()}
        train, test = (data.subset(torch.from_numpy(rows)) for rows in parts.values())
        return train, test

    def groups(self, split: str, dataset: ModalityDataset) -> np.ndarray:
        """Return each recording's subject.

        Args:
            split: `"train"` or `"test"`.
            dataset: The recordings of that split.

        Raises:
            ValueError: If samples are limited.
        """
        if getattr(self.partitioner, "groups", None) is not None:
            return super().groups(split, dataset)
        if len(self._subjects[split]) != len(dataset):
            raise ValueError(
                "UTDMHADDataModule makes a client of each subject without max_train and max_test; leave them out, or "
                "use another partitioner."
            )
        return self._subjects[split]

    def _files(self, modality: str) -> dict[tuple[int, int, int], Path]:
        """Return the files of a modality by action, subject and trial."""
        paths_by_key: dict[tuple[int, int, int], Path] = {}
        for path in sorted((self.root / FILES[modality][0]).glob("*.mat")):
            match = _NAME.fullmatch(path.name)
            if match is None or match.group(4) != modality or not 1 <= int(match.group(1)) <= ACTIONS:
                raise ValueError(
                    f"{path} is not a recording of {modality} data by its name, such as a1_s1_t1_{modality}.mat."
                )
            paths_by_key[int(match.group(1)), int(match.group(2)), int(match.group(3))] = path
        return paths_by_key

    def _read(self, path: Path, modality: str) -> np.ndarray:
        """Return a recording as float32 `(signals, length)`."""
        from scipy.io import loadmat

        try:
            _check_parts(content := path.read_bytes())
            values = np.asarray(loadmat(io.BytesIO(content))[FILES[modality][1]], dtype=np.float64)
        except Exception as error:  # scipy raises many kinds at damaged files
            raise ValueError(f"{path} cannot be read as a recording ({error}); get it again.") from error
        if modality == "skeleton" and values.ndim == 3:
            values = (values - values[:, :, :1].mean(axis=0)).reshape(-1, values.shape[2]).T
        width = 6 if modality == "inertial" else 3 * JOINTS
        if values.ndim != 2 or values.shape[1] != width or len(values) < 2 or not np.isfinite(values).all():
            raise ValueError(f"{path} has shape {values.shape} or a gap; a recording is (frames, {width}).")
        if extreme_of(values.ravel()) is not None:
            raise ValueError(f"{path} has a number beyond single precision, or far from all others; get it again.")
        frames, wanted = np.arange(len(values)), np.linspace(0, len(values) - 1, self.length)
        return np.stack([np.interp(wanted, frames, signal) for signal in values.T]).astype(np.float32)


def _check_parts(content: bytes) -> None:
    """Refuse a file of MATLAB's version 5 with a part of a kind that there is not, at which scipy ends the process."""
    place = 128
    while content[126:128] == b"IM" and place + 8 <= len(content):
        kind, size = struct.unpack_from("<II", content, place)
        if kind & 0xFFFF not in _PARTS:
            raise ValueError(f"byte {place} begins a part of kind {kind & 0xFFFF}")
        small = kind >> 16 or kind == _ARRAY  # what is in the tag itself; the parts of an array follow its tag
        place += 8 if small else 8 + size + (-size % 8 if kind != _PACKED else 0)

"""Data sets that come divided: their clients are the hospitals, regions or people that the samples are of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fedlightning.datamodules.download import refuse_absent
from fedlightning.datamodules.federated_data import SPLITS
from fedlightning.datamodules.groups import cut_groups
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split, check_each
from fedlightning.datamodules.views import Indices
from fedlightning.ranges import checked
from fedlightning.seeding import generator


@dataclass
class SiteSamples:
    """What the files of a natural data set hold.

    Attributes:
        dataset: The samples of all clients.
        rows: Each client's samples in `dataset` by split, in client order. What a client lacks of `test` and `val` is cut
            from its `train`.
        labels: Class of every sample, int64 `(samples,)`, or `None`.
        groups: Group (a patient) of every sample, int64 `(samples,)`, or `None`.
        strata: What the cuts are stratified by, if not by the labels.
        training: The samples as they are trained on, if they are changed for that.
    """

    dataset: Dataset[Any]
    rows: Mapping[str, Mapping[str, Indices | list[int]]]
    labels: np.ndarray | None = None
    groups: np.ndarray | None = None
    strata: np.ndarray | None = None
    training: Dataset[Any] | None = None


class NaturalSites(IndexedFederatedDataModule):
    """Base of data sets that have clients of their own. A subclass is its files, and how they are read.

    Attributes:
        files: What has to be in `root`, by path.
        way: How the user gets it.
        address: Name of the data set in the addresses of its random cuts.
        classes: Number of classes, where clients alone may lack the last ones.
        val_fraction: Share of a client's training samples for validation, where the data set has no validation samples.
        test_fraction: Share of a client's samples for testing, where the data set has no test samples.
        val_seed: Seed of the validation cut alone. `None` is `seed`.

    Args:
        root: Folder of the files.
        batch_size: Number of samples in a batch.
        options: The other arguments of `IndexedFederatedDataModule`, by name.
    """

    files: Sequence[str | Path] = ()
    way = ""
    address = "partition"
    classes: int | None = None
    val_fraction = 0.0
    test_fraction = 0.0
    val_seed: int | None = None

    @checked
    def __init__(self, root: str, batch_size: int = 32, **options: Any) -> None:
        super().__init__(batch_size, **options)
        self.root = Path(root)

    @abstractmethod
    def read(self) -> SiteSamples:
        """Return the samples of the files, which are there."""

    def path_of(self, name: str | Path) -> Path:
        """Return where a file is."""
        return self.root / name

    def prepare_data(self) -> None:
        """Check that the files are there (Lightning's hook)."""
        paths = {name: self.path_of(name) for name in self.files}
        lacking = [str(name) for name, path in paths.items() if not (path.is_file() if path.suffix else path.exists())]
        refuse_absent(self, lacking, self.root, self.way)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if self.classes is not None:
            self._num_classes = self.classes

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        self.prepare_data()
        samples = self.read()
        cuts = {
            "test": (self.test_fraction, self.seed),
            "val": (self.val_fraction, self.seed if self.val_seed is None else self.val_seed),
        }
        parts: dict[str, list[Indices]] = {split: [] for split in SPLITS}
        owners: dict[int, str] = {}
        count = len(samples.dataset)  # type: ignore[arg-type]
        check_each(self, count, labels=samples.labels, groups=samples.groups, strata=samples.strata)
        for client, places in samples.rows.items():
            rows = {"train": np.empty(0, dtype=np.int64)}
            rows |= {split: np.asarray(indices, dtype=np.int64) for split, indices in places.items()}
            taken = np.concatenate(list(rows.values()))
            if not set(rows) <= set(SPLITS) or len(np.unique(taken)) < len(taken):
                raise ValueError(
                    f"{type(self).__name__}: client {client!r} has {len(taken)} rows of {', '.join(rows)}. Give "
                    f"{', '.join(SPLITS)} only, and each sample once: what is trained on is not tested on."
                )
            for row in taken.tolist():
                if not 0 <= row < count or owners.setdefault(row, client) != client:
                    why = f"client {owners[row]!r} has it too" if row in owners else f"there are {count} samples"
                    raise ValueError(
                        f"{type(self).__name__}: client {client!r} has the sample {row}, and {why}. Each sample is of one "
                        "client, counted from 0."
                    )
            for split, (fraction, seed) in cuts.items():
                if split not in rows:
                    draw = generator(seed, self.address, split, client)
                    rows["train"], rows[split] = self.cut(rows["train"], fraction, draw, samples)
            for split, indices in parts.items():
                indices.append(rows[split])
        plain = samples.dataset
        datasets = dict.fromkeys(SPLITS, plain) | {"train": plain if samples.training is None else samples.training}
        return list(samples.rows), {
            split: Split(datasets[split], indices, samples.labels, groups=samples.groups)
            for split, indices in parts.items()
        }

    def cut(
        self, rows: Indices, fraction: float, draw: torch.Generator, samples: SiteSamples
    ) -> tuple[Indices, Indices]:
        """Cut a part off a client's samples: return the others, and the part.

        Args:
            rows: The client's samples.
            fraction: The share of them.
            draw: Says which, at random.
            samples: All samples.
        """
        return cut_groups(
            rows, fraction, draw, samples.labels if samples.strata is None else samples.strata, samples.groups
        )

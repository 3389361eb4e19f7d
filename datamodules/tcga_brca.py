"""Fed-TCGA-BRCA: survival of breast cancer patients of six regions, as FLamby prepares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlightning.datamodules.csv_tables import Column, column_of, numbers_of, read_table, refuse_extremes, refuse_twice
from fedlightning.datamodules.federated_data import clients_here
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import ShareBelowOne, checked

REGIONS = ("0", "1", "2", "3", "4", "5")
"""The clients: FLamby's numbers of the regions of the hospitals that took the samples."""
FILES = ("brca.csv", "train_test_split.csv")
FEATURES = 39


class TCGABRCADataModule(NaturalSites):
    """Fed-TCGA-BRCA of FLamby: 1088 patients of six regions, 39 clinical features, time to death or censoring.

    Ogier du Terrail et al., "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
    Settings", NeurIPS 2022. The patients are those of TCGA-BRCA (The Cancer Genome Atlas Network 2012; Liu et al. 2018):
    open access under the policies of the Genomic Data Commons, which forbid attempts to re-identify anybody. FLamby's
    files are under the MIT licence.

    Nothing is downloaded. Put `brca.csv` and `dataset_creation_scripts/train_test_split.csv` of
    https://github.com/owkin/FLamby/tree/main/flamby/datasets/fed_tcga_brca under `root`, in one folder or as they lie
    there.

    The clients are "0" ... "5" (Northeast, South, West, Midwest, Europe, Canada), with 311, 196, 206, 162, 162 and 51
    patients. The publisher's split is kept: train/test 248/63, 156/40, 164/42, 129/33, 129/33, 40/11. Validation
    patients are `val_fraction` of the training patients, stratified by event. Eight patients of `brca.csv` are in no
    region and are in nobody's data, as in FLamby.

    `x` is float32 `(batch, 39)`: the age in years and 38 columns of 0 and 1, not scaled, as FLamby trains on them. `y` is
    float32 `(batch, 2)`: 1 for death or 0 for censoring, and the time in days. `class_counts` counts censored patients
    and deaths.

    Nothing is computed over several regions, so a region on its own (`regions`) has the patients, splits and features that it
    has among the six.

    Args:
        root: Folder of the two files.
        batch_size: Number of samples in a batch (FLamby: 8). 1000 makes the loss the partial likelihood of a whole
            client.
        val_fraction: Share of the training patients for validation, in [0, 1); FLamby has none.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        regions: The regions that are here, as `["3"]` at that region's site. `None`: all six.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If `regions` is empty, names one twice or one that does not exist.

    Example:
        >>> from fedlightning.datamodules import TCGABRCADataModule
        >>> data = TCGABRCADataModule(root="data/tcga_brca")  # files are read by data.setup()
        >>> data.batch_size, len(data.regions)
        (8, 6)
    """

    files = FILES
    way = "copy them from flamby/datasets/fed_tcga_brca of https://github.com/owkin/FLamby"
    address = "tcga brca"

    @checked
    def __init__(
        self,
        root: str = "data/tcga_brca",
        batch_size: int = 8,
        val_fraction: ShareBelowOne = 0.2,
        *,
        val_seed: int | None = None,
        regions: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.val_seed = val_fraction, val_seed
        self.regions = clients_here(self, "regions", regions, REGIONS)
        self.feature_names: list[str] = []

    def read(self) -> SiteSamples:
        path = self.path_of(FILES[0])
        table = read_table(path)
        patients = column_of(table, "pid", "patient").cells
        refuse_twice(path, patients, "patient")
        names = [name for name in table if name not in ("pid", "E", "T")]
        if len(names) != FEATURES:
            raise ValueError(f"{path} has {len(names)} features, FLamby's file {FEATURES}; get it again.")
        self.feature_names = names
        x = np.stack([numbers_of(path, table[name]) for name in names], axis=1)
        for name, values in zip(names, x.T, strict=True):
            refuse_extremes(f"{path}: column {name!r}", values, [np.arange(len(values))])
        y = np.stack([numbers_of(path, column_of(table, name, "target")) for name in ("E", "T")], axis=1)
        if not np.isin(y[:, 0], (0, 1)).all() or (y[:, 1] < 0).any():
            raise ValueError(f"{path} has an E other than 0 and 1 or a negative T; it is not FLamby's file.")
        events = y[:, 0].astype(np.int64)
        parts = self._read_folds(patients)
        rows = {region: {split: parts[f"{split}_{region}"] for split in ("train", "test")} for region in self.regions}
        return SiteSamples(ArrayDataset(torch.from_numpy(x).float(), torch.from_numpy(y).float()), rows, events)

    def _read_folds(self, patients: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the rows of each region and split, ascending: `train_0`, `test_0`, ..."""
        path = self.path_of(FILES[1])
        table = read_table(path)
        columns: dict[str, Column] = {name: column_of(table, name, "split") for name in ("pid", "fold2")}
        place = {patient: row for row, patient in enumerate(patients)}
        parts: dict[str, list[int]] = {f"{split}_{region}": [] for split in ("train", "test") for region in REGIONS}
        seen: dict[str, int] = {}
        for line, (patient, part) in enumerate(zip(*(columns[name].cells for name in columns), strict=True), start=2):
            wrong = (
                f"there is no patient {patient!r} in {FILES[0]}"
                if patient not in place
                else f"patient {patient!r} is on line {seen[patient]}, too"
                if patient in seen
                else f"there is no part {part!r}"
                if part not in parts
                else None
            )
            if wrong is not None:
                raise ValueError(f"{path}, line {line}: {wrong}; a patient belongs to one region and one split.")
            seen[patient] = line
            parts[part].append(place[patient])
        empty = [part for part, rows in parts.items() if not rows and part.split("_")[1] in self.regions]
        if empty:
            raise ValueError(f"{path} has no patients in {', '.join(empty)}; it is not FLamby's file.")
        return {part: np.sort(np.array(rows, dtype=np.int64)) for part, rows in parts.items()}

    def path_of(self, name: str | Path) -> Path:
        below = self.root / "dataset_creation_scripts" / name
        return below if below.is_file() else self.root / name

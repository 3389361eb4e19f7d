"""Fed-Heart-Disease: four hospitals, a natural partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlightning.datamodules.agreed_statistics import spread_of
from fedlightning.datamodules.csv_tables import finite, refuse_extremes, text_of
from fedlightning.datamodules.federated_data import clients_here
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import ShareBelowOne, at_most_one, checked

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""The clients, in order."""

_DROPPED = (10, 11, 12)  # slope, ca, thal: missing for most patients outside of Cleveland
_CATEGORIES = {2: (1, 2, 3, 4), 6: (0, 1, 2)}  # cp and restecg; the first level is dropped
_NUMERIC = (0, 1, 3, 4, 5, 7, 8, 9)
COLUMNS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
"""Columns of numbers, the first of the features."""
_TRAIN_SHARE = 0.66
_LARGEST = 2**20


class HeartDiseaseDataModule(NaturalSites):
    """UCI Heart Disease as FLamby prepares it: 740 patients of four hospitals, 13 features, two classes.

    Janosi, Steinbrunn, Pfisterer, Detrano 1988; FLamby: Ogier du Terrail et al. 2022. The clients are "cleveland",
    "hungarian", "switzerland" and "va".

    Columns slope, ca and thal are dropped, then rows with a missing value; cp and restecg are one-hot encoded without
    their first level; the label is `num > 0`. Features are standardised with each hospital's own training statistics
    (validation included, so that they do not change with `seed`; a column that is constant there is only centred). `x`
    is float32 `(batch, 13)`: age, sex, trestbps, chol, fbs, thalach, exang, oldpeak, cp=2, cp=3, cp=4, restecg=1,
    restecg=2. `y` is int64 0 or 1 of shape `(batch,)`, or float32 with `binary_float`.

    Test patients are 34 % of each hospital, stratified by label if both labels have more than two patients, drawn by
    scikit-learn's `train_test_split` with `split_seed` exactly as FLamby's code draws them (its seed is 43): train/test
    199/104, 172/89, 30/16, 85/45 in the order of the clients. Validation patients are `val_fraction` of the others.

    Nothing is computed over several hospitals, so a hospital on its own (`hospitals`) has the patients, splits, features
    and batches that it has among the four.

    Args:
        root: Folder with `processed.cleveland.data` and the other three files of the UCI repository
            (https://archive.ics.uci.edu/dataset/45/heart+disease).
        batch_size: Number of samples in a batch (FENDA-FL: 4).
        val_fraction: Share of the training patients for validation, in [0, 1).
        split_seed: Seed of the test cut; 43 is FLamby's.
        binary_float: Return labels as float32, for `binary_cross_entropy_with_logits`.
        val_seed: Seed of the validation cut alone, as in the other data modules. `None` is `seed`.
        grades: Keep the five grades of `num`, 0 ... 4, as classes (PLayer-FL) instead of `num > 0`; patients and splits
            are the same. PLayer-FL writes of five hospitals; UCI has four files, as its public code has clients (Zurich
            and Basel are one).
        statistics: Mean and standard deviation of columns, `{"age": [54, 9]}`, of a public sample, for all hospitals; other
            columns stay as they are then. `None`: each hospital's own.
        hospitals: The hospitals that are here, as `["cleveland"]` at that hospital's site; only their files are read and need
            to be there. `None`: all four.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If `hospitals` is empty, names one twice or one that is not among the four.

    Example:
        >>> from fedlightning.datamodules import HeartDiseaseDataModule
        >>> data = HeartDiseaseDataModule(root="data/heart_disease")  # files are read by data.setup()
        >>> data.batch_size, data.split_seed
        (4, 43)
    """

    common_options = ("grades", "binary_float", "statistics")
    way = "unpack https://archive.ics.uci.edu/static/public/45/heart+disease.zip there"
    address = "heart disease"

    @checked
    @at_most_one("grades", "binary_float", why="five grades are not binary labels. Use one of them.")
    def __init__(
        self,
        root: str = "data/heart_disease",
        batch_size: int = 4,
        val_fraction: ShareBelowOne = 0.2,
        *,
        split_seed: int = 43,
        binary_float: bool = False,
        val_seed: int | None = None,
        grades: bool = False,
        hospitals: Sequence[str] | None = None,
        statistics: Mapping[str, Sequence[float]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.val_seed = val_fraction, val_seed
        self.split_seed, self.binary_float = int(split_seed), binary_float
        self.grades, self.classes = grades, 5 if grades else None  # a hospital alone may lack the highest grade
        self.hospitals = clients_here(self, "hospitals", hospitals, HOSPITALS)
        self.files = [f"processed.{name}.data" for name in self.hospitals]
        self.statistics = statistics
        for column, pair in (statistics or {}).items():
            if column not in COLUMNS or len(pair) != 2 or not np.isfinite(pair).all() or pair[1] <= 0:
                raise ValueError(
                    f"HeartDiseaseDataModule got statistics {list(pair)} of {column!r}. Give [mean, standard deviation > 0] "
                    f"of columns among {', '.join(COLUMNS)}."
                )

    def read(self) -> SiteSamples:
        features, labels, grades = [], [], []
        rows: dict[str, dict[str, np.ndarray]] = {}
        start = 0
        for name, file in zip(self.hospitals, self.files, strict=True):
            x, y, grade = read_hospital(self.path_of(file))
            train, test = _flamby_split(y, self.split_seed)
            centre, spread = x[train].mean(axis=0), spread_of(x[train])
            if self.statistics is not None:
                others = [(0.0, 1.0)] * (x.shape[1] - len(COLUMNS))
                pairs = [*(self.statistics.get(name, (0.0, 1.0)) for name in COLUMNS), *others]
                centre, spread = np.array(pairs, dtype=np.float64).T
            features.append((x - centre) / spread)
            labels.append(y)
            grades.append(grade)
            rows[name] = {"train": train + start, "test": test + start}
            start += len(y)
        strata = np.concatenate(labels)
        classes = np.concatenate(grades) if self.grades else strata
        targets = torch.from_numpy(classes)
        data = ArrayDataset(
            torch.from_numpy(np.concatenate(features)).float(), targets.float() if self.binary_float else targets
        )
        return SiteSamples(data, rows, classes, strata=strata)

    @property
    def coupled_records(self) -> str:
        if self.statistics is not None:
            return ""
        return "features are scaled by the mean and deviation of a hospital's patients. Give statistics of a public sample."

    @property
    def columns(self) -> list[str]:
        """Names of the columns that `sample_values` has."""
        return list(COLUMNS)

    def sample_values(self, client: str, split: str, column: str) -> list[str]:
        if column not in COLUMNS:
            raise ValueError(f"There is no column {column!r}; the columns are {', '.join(COLUMNS)}.")
        tables = [read_hospital(self.path_of(file))[0] for file in self.files]
        before = sum(map(len, tables[: self.hospitals.index(client)]))
        rows = tables[self.hospitals.index(client)][self.indices(client, split) - before]
        return [f"{value:g}" for value in rows[:, COLUMNS.index(column)]]


def read_hospital(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read the complete rows of one processed UCI file: features, labels 0 or 1, grades 0 to 4.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.heart_disease import read_hospital
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "processed.va.data")
        ...     _ = path.write_text("63,1,4,145,233,1,2,150,0,2.3,3,0,6,1")
        ...     features, labels, grades = read_hospital(path)
        >>> features.shape, labels, grades
        ((1, 13), array([1]), array([1]))
    """
    rows = []
    if path.stat().st_size > _LARGEST:
        raise ValueError(
            f"{path} has more than {_LARGEST} bytes, a real one less than 20000; it is not a processed UCI file."
        )
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if cells == [""]:
            continue
        if len(cells) != 14:
            raise ValueError(
                f"{path}, line {number}: {len(cells)} columns instead of 14; it is not a processed UCI file."
            )
        kept = [cell for column, cell in enumerate(cells) if column not in _DROPPED]
        if "?" in kept:
            continue
        try:
            rows.append([0.0 if column in _DROPPED else finite(cell) for column, cell in enumerate(cells)])
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; it is not a processed UCI file.") from error
    if not rows:
        raise ValueError(f"{path} has no complete row; it is not a processed UCI file.")
    table = np.array(rows)
    columns = [table[:, column] for column in _NUMERIC]
    for name, values in zip(COLUMNS, columns, strict=True):
        refuse_extremes(f"{path}: column {name!r}", values, [np.arange(len(values))])
    for column, levels in _CATEGORIES.items():
        if not np.isin(table[:, column], levels).all():
            raise ValueError(f"{path}: column {column} has values other than {levels}; it is not a processed UCI file.")
        columns += [(table[:, column] == level).astype(np.float64) for level in levels[1:]]
    grades = table[:, 13].astype(np.int64)
    if not np.isin(table[:, 13], range(5)).all():
        raise ValueError(f"{path}: column 13 has values other than 0 to 4; it is not a processed UCI file.")
    return np.stack(columns, axis=1), (grades > 0).astype(np.int64), grades


def _flamby_split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and test rows of one hospital, ascending."""
    from sklearn.model_selection import train_test_split

    counts = np.bincount(labels, minlength=2)
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=1 - _TRAIN_SHARE,
        train_size=_TRAIN_SHARE,
        random_state=seed,
        shuffle=True,
        stratify=labels if counts.min() > 2 else None,
    )
    return np.sort(train), np.sort(test)

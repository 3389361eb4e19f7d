"""Hugging Face `datasets`: their columns as inputs, labels and clients, read from disk as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.arrays import federate, keys_for, suited
from fedlightning.datamodules.csv_tables import refuse_extremes
from fedlightning.datamodules.image_files import floats_of, pixels_of, shown
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.labels import as_classes, check_classes, encode
from fedlightning.datamodules.partitioners import NaturalPartitioner
from fedlightning.datamodules.plans import Partitioner
from fedlightning.errors import import_package
from fedlightning.ranges import Length, ShareBelowOne, checked, exactly_one

_VALIDATION = ("validation", "val", "valid", "dev")


class HuggingFaceDataModule(IndexedFederatedDataModule):
    """A data set of Hugging Face's `datasets`: a column names the clients, or a partitioner divides the rows.

    Rows stay on disk, in Arrow's format, and are read when they are asked for (`num_workers` reads them in parallel);
    clients are views of them. Needs the package `datasets` (extra `huggingface`).

    `x` is what the columns in `inputs` hold: an image as float32 `(batch, channels, height, width)` in [0, 1], numbers
    and lists of numbers as float32, whole numbers (tokens) as int64. Several columns must be numbers or lists of numbers;
    they are one vector, in the order given. `transform` maps the cell, or that vector, to the model's input; texts need
    one. `y` is int64 `(batch,)` for classes (whole numbers, words or a `ClassLabel`), else float32 `(batch,)`.

    A data set with splits keeps them (`train`, `validation`, `test`); what it lacks of validation and test data is cut
    from each client's training rows, stratified by class.

    Args:
        source: Folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, a `Dataset` or `DatasetDict`, or,
            with `download`, what `datasets.load_dataset` takes (a name of the Hub, a folder of Parquet, CSV or JSON files).
        inputs: Column of the inputs, or several columns of numbers.
        label: Column of the targets.
        client: Column that names each row's client (a hospital, a writer).
        partitioner: Divides the rows if no column does.
        batch_size: Number of samples in a batch.
        val_fraction: Share of every client's training rows for validation, in [0, 1), without a validation split.
        test_fraction: Share of every client's training rows for testing, in [0, 1), without a test split.
        group: Column of what rows belong to and never part from (a patient); no group is at two clients or in two splits.
        transform: Maps an input to the model's.
        name: Configuration of the data set, as `datasets.load_dataset` takes it.
        download: Let `datasets.load_dataset` get `source`; it keeps an Arrow copy in its cache.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If not exactly one of `client` and `partitioner` is given; from `setup`, if a column is missing or has
            gaps, or texts have no `transform`.
        FileNotFoundError: From `setup`, if `source` is not a saved folder and `download` is off.

    Example:
        >>> import datasets
        >>> from fedlightning.datamodules import HuggingFaceDataModule
        >>> rows = {"x": [[0.5, 1.0]] * 20, "label": [0, 1] * 10, "hospital": ["Rome"] * 12 + ["Oslo"] * 8}
        >>> data = HuggingFaceDataModule(datasets.Dataset.from_dict(rows), "x", client="hospital")
        >>> data.setup()
        >>> data.client_ids, data.num_samples("Rome"), next(iter(data.client_dataloader("Rome", "test")))[0].shape
        (['Oslo', 'Rome'], 8, torch.Size([2, 2]))
    """

    @checked
    @exactly_one("client", "partitioner", why="name the column of the clients, or give a partitioner of the rows.")
    def __init__(
        self,
        source: Any,
        inputs: str | Annotated[list[str], Length(1, different=True)],
        label: str = "label",
        *,
        client: str | None = None,
        partitioner: Partitioner | None = None,
        batch_size: int = 32,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne = 0.2,
        group: str | None = None,
        transform: Callable[[Any], Tensor] | None = None,
        name: str | None = None,
        download: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        self.source, self.label, self.client, self.group = source, label, client, group
        self.inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self.partitioner: Partitioner = NaturalPartitioner() if partitioner is None else partitioner
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.transform, self.name, self.download = transform, name, download
        self.class_names: list[str] | None = None
        self._named_by_file: dict[str, Any] = {}

    @property
    def partition_name(self) -> str:
        return f"by {self.client}" if self.client is not None else self.partitioner.describe()

    @property
    def meaning(self) -> dict[str, list[str]]:
        return super().meaning | ({"inputs": self.inputs} if len(self.inputs) > 1 else {})

    @property
    def named_by_file(self) -> dict[str, Any]:
        return self._named_by_file

    def prepare_data(self) -> None:
        """Get the data set where `download` is on (Lightning's hook)."""
        if isinstance(self.source, str | Path):
            self._tables()

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        tables = self._tables()
        columns = [*self.inputs, self.label, *(name for name in (self.client, self.group) if name is not None)]
        if self.label in self.inputs:
            raise ValueError(f"Column {self.label!r} is the label and among inputs={self.inputs}; leave it out there.")
        for split, table in tables.items():
            lacking = [name for name in columns if name not in table.column_names]
            if lacking:
                raise ValueError(
                    f"The {split} data have no column {', '.join(map(repr, lacking))}; there are "
                    f"{', '.join(map(repr, table.column_names))}."
                )
            used = table.select_columns(columns)  # a damaged file of Arrow could end the process as it is read
            read(f"The {split} data cannot be read", lambda frame: frame.data.validate(full=True), used)
        labels = encode(raw := {split: self._labels(table, split) for split, table in tables.items()})
        present = [cells for cells in raw.values() if cells is not None]
        if self.class_names is None and present and len(present) == len(raw) and all(len(cells) for cells in present):
            check_classes(np.concatenate(present), f"Column {self.label!r}", "make it a ClassLabel with its names")
        if self.class_names is None and any(labels[split] is not cells for split, cells in raw.items()):
            self.class_names = np.unique(np.concatenate(present)).tolist()
            self._named_by_file = {f"a ClassLabel of {self.label!r}": self.class_names}
        self._divides = suited(self.partitioner, labels, "HuggingFaceDataModule")
        datasets: dict[str, Dataset[Any]] = {
            split: Rows(table, self.inputs, self._targets(table, labels[split], split), self.transform)
            for split, table in tables.items()
        }
        clients = {split: self._column(table, self.client, split) for split, table in tables.items()}
        groups = {split: self._column(table, self.group, split) for split, table in tables.items()}
        keys = keys_for(self._divides, datasets, labels, lambda split, _: clients[split])
        return federate(
            self._divides,
            datasets,
            labels,
            keys,
            self.seed,
            self.val_fraction,
            self.test_fraction,
            groups=None if self.group is None else groups,
        )

    def _tables(self) -> dict[str, Any]:
        """Return the table of each split."""
        datasets = import_package("datasets", "HuggingFaceDataModule reads by the package datasets", "huggingface")
        source = self.source
        if isinstance(source, str | Path):
            saved = any(Path(source, name).is_file() for name in ("dataset_dict.json", "state.json"))
            if saved:
                source = read(f"{source} is not a data set that can be read", datasets.load_from_disk, str(source))
            elif self.download:
                source = datasets.load_dataset(str(source), self.name)
            else:
                raise FileNotFoundError(
                    f"{source} is not a folder of Dataset.save_to_disk. Write one (datasets.load_dataset(...).save_to_disk("
                    "folder)), or let load_dataset get it by download=True."
                )
        if isinstance(source, datasets.Dataset):
            source = {"train": source}
        if not isinstance(source, Mapping):
            raise ValueError(f"HuggingFaceDataModule got a {type(source).__name__}; give a Dataset or a DatasetDict.")
        names = list(source)
        source = {split: table for split, table in source.items() if len(table)}  # an empty split is none
        tables = {split: source[split] for split in ("train", "test") if split in source}
        validation = next((split for split in _VALIDATION if split in source), None)
        if validation is not None:
            tables["val"] = source[validation]
        if "train" not in tables:
            raise ValueError(f"The data set has the splits {', '.join(names)}; one of them must be called 'train'.")
        return tables

    def _labels(self, table: Any, split: str) -> np.ndarray | None:
        """Return the class of each row, `None` for measurements."""
        cells = cells_of(table, self.label, split)
        gap = next((row for row, cell in enumerate(cells) if cell is None or cell != cell), None)
        if gap is not None:
            raise ValueError(f"Row {gap} of the {split} data has no {self.label!r}; leave it out.")
        names = getattr(table.features[self.label], "names", None)
        if names is not None:
            self.class_names = list(names)
            if min(cells) < 0:  # as public benchmarks hide the labels of their test split
                raise ValueError(
                    f"Row {cells.index(min(cells))} of the {split} data has the {self.label!r} {min(cells)}, no class of its "
                    "ClassLabel: it is hidden. Leave such rows out, or the split: test data are then cut from training data."
                )
        return as_classes(cells)

    def _targets(self, table: Any, labels: np.ndarray | None, split: str) -> Tensor:
        if labels is not None:
            return torch.from_numpy(labels)
        values = np.asarray(cells_of(table, self.label, split))
        if values.ndim != 1 or values.dtype.kind != "f":
            raise ValueError(
                f"Column {self.label!r} of the {split} data holds neither classes nor one number for each row."
            )
        refuse_extremes(f"The {split} data: column {self.label!r}", values, [np.arange(len(values))])
        return torch.from_numpy(values).float()

    def _column(self, table: Any, name: str | None, split: str) -> np.ndarray | None:
        if name is None:
            return None
        cells = cells_of(table, name, split)
        gap = next((row for row, cell in enumerate(cells) if cell is None or cell != cell), None)
        if gap is not None:
            raise ValueError(f"Row {gap} of the {split} data has no {name!r}; every row belongs to one.")
        return np.array([str(cell) for cell in cells]) if not isinstance(cells[0], int) else np.asarray(cells)


def read(what: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Return what a function reads; of damaged files come errors of Arrow, of Pillow and of `datasets`, of many kinds."""
    try:
        return function(argument)
    except Exception as error:
        raise ValueError(f"{what} ({type(error).__name__}: {error}). Get the data set again.") from error


def cells_of(table: Any, name: str, split: str) -> list[Any]:
    """Return the cells of a column."""
    what = f"Column {name!r} of the {split} data cannot be read"
    cells: list[Any] = read(what, lambda column: table.with_format(None)[column][:], name)
    return cells


class Rows(Dataset[Any]):
    """Rows of an Arrow table as samples `(x, y)`, read when they are asked for.

    Args:
        table: A `datasets.Dataset`.
        inputs: Columns of the inputs.
        targets: Target of each row, `(samples,)`.
        transform: Maps an input to the model's.

    Raises:
        ValueError: From an access, if an input is a text or has a gap; the message names the row.
    """

    def __init__(
        self, table: Any, inputs: Sequence[str], targets: Tensor, transform: Callable[[Any], Tensor] | None = None
    ) -> None:
        self.table, self.inputs, self.targets = table.with_format(None).select_columns(list(inputs)), inputs, targets
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([int(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        cells = read(f"Rows {list(indices)[:5]} cannot be read", self.table.__getitem__, list(indices))
        rows = zip(*(cells[name] for name in self.inputs), strict=True)
        return [(self._input(row, index), self.targets[index]) for row, index in zip(rows, indices, strict=True)]

    def _input(self, row: tuple[Any, ...], index: int) -> Tensor:
        names = ", ".join(map(repr, self.inputs))
        if any(cell is None for cell in row):
            raise ValueError(f"Row {index} has a gap in {names}; leave it out of the data set.")
        if len(row) == 1 and (isinstance(row[0], str) or (isinstance(row[0], dict) and self.transform is not None)):
            if self.transform is None:
                raise ValueError(f"Column {names} holds texts; give transform=, which maps a text to a tensor.")
            return self.transform(row[0])
        try:
            parts = [_tensor(cell) for cell in row]
        except (TypeError, ValueError) as error:
            raise ValueError(f"Row {index}: {names} holds no numbers and no image ({error}).") from error
        x = parts[0] if len(parts) == 1 and parts[0].ndim else torch.cat([part.float().reshape(-1) for part in parts])
        return x if self.transform is None else self.transform(x)


def _tensor(cell: Any) -> Tensor:
    """Return a cell's numbers; an image as floats in [0, 1]."""
    if hasattr(cell, "convert"):  # an image of Pillow
        image = shown(cell, "L" if cell.mode == "L" else "RGB")
        return floats_of(pixels_of(image, len(image.getbands())))
    values = np.asarray(cell)
    if values.dtype.kind not in "iubf":
        raise ValueError(f"{type(cell).__name__}")
    if not np.isfinite(values.astype(np.float32)).all():
        raise ValueError("NaN, or a number beyond single precision")
    return torch.from_numpy(values.astype(np.int64 if values.dtype.kind in "iu" else np.float32))

"""Tables: a CSV file whose rows are samples, divided among clients by a column or by a partitioner."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from fedlightning.datamodules.agreed_statistics import Open, check_scale, one_hot, standardised
from fedlightning.datamodules.arrays import federate, suited
from fedlightning.datamodules.csv_tables import (
    Column,
    Form,
    classes_named,
    code_of,
    codes_of,
    column_of,
    complete,
    levels_of,
    read_header,
    read_table,
    refuse_extremes,
    refuse_other_numbers,
    repeats,
)
from fedlightning.datamodules.groups import looks_like_identifier
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.labels import ask_about_one, ask_about_spelling, check_classes
from fedlightning.datamodules.partitioners import NaturalPartitioner
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.public_from_another import Public, share_of
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import Length, PositiveInt, ShareBelowOne, checked, exactly_one

MOST_CLASSES = 20
"""A target of whole numbers with more different values than this is a measurement."""


class TabularFederatedDataModule(IndexedFederatedDataModule):
    r"""A CSV file with a header: one row a sample, one column the target, and perhaps one that names the client.

    `x` is float32 `(batch, features)`: columns of numbers as they are named in the header, and for each column of words
    one 0-1 column a word (`feature_names`). `y` is int64 `(batch,)` for a classification, with the classes in ascending
    order (`class_names`), or float32 `(batch,)` for a regression.

    *What clients learn of each other.* With `scale: local` a client's features are standardised with the mean and standard
    deviation of its own training and validation rows, and gaps are filled with that mean. Nothing of other clients' values
    is used, unless you give `statistics` (of a public sample), which all clients use alike. A column that is constant at a
    client is only centred; one that has no values there is 0. With `scale: none` numbers stay as they are, and gaps are
    refused.

    With `scale: federated` all clients are scaled alike, by the mean and standard deviation of all training rows of the
    clients that train. Each gives count, sum and sum of squares of its training rows once, before round 1, to the server,
    which adds them up and sends the totals to all; the totals stand in `statistics.json` of the run. A client gives no sum
    of fewer than `least` rows (patients, with `group`), and a column takes three sites, since of two each could subtract its
    own. The server sees each client's sums. A column in `ranges` is scaled by median and interquartile range instead, from
    counts of 100 agreed bins, of which a client takes neighbours together until `least` are in them: quantiles are
    off by a hundredth of the range, or by the width that so many rows of a client take; no smallest or largest value
    shows. Until a federation has agreed, `x` is NaN there.

    Which words a column can hold and which classes there are is taken from the whole file, since all clients train one
    network. Where every site has a file of its own, name them: `classes`, and `categories`, which has for each column of
    words a public list of codes, or how many words to agree on: the most common of those that at least `least` rows
    (patients) of a client have; the server sees their counts, other clients do not. Other words are in one more column,
    `name=other`.

    Test rows are cut from each client's rows, then validation rows, stratified by class. Where several rows are of one
    patient, name the patient's column by `group`: no patient is then at two clients, or in two splits of one client.
    A row without a target is left out, with a warning.

    Args:
        path: The file.
        target: Column to predict.
        client: Column that names each row's client (a hospital, a user). It is not a feature.
        partitioner: Divides the rows if no column does.
        task: `"classification"`, `"regression"`, or `"auto"`: words, and at most 20 different whole numbers, are
            classes.
        group: Column that names what rows belong to (a patient, a lesion). It is not a feature. Shares and stratification
            are then by group. `None` asks about a column that looks like an identifier and repeats; `False` says that
            rows are independent.
        drop: Columns to leave out.
        categorical: Columns of numbers whose values are categories.
        statistics: Mean and standard deviation of columns, `{"age": [61.2, 9.8]}`, for all clients.
        target_statistics: Mean and standard deviation that a regression's targets are standardised with; `None` leaves
            them as they are.
        scaling: `False` is `scale: none`.
        scale: Standardise features by each client's own rows (`"local"`), by all training rows (`"federated"`), or leave them
            as they are (`"none"`).
        ranges: Ends of the bins of columns, `{"lactate": [0, 20]}`, with `scale: federated`.
        categories: Column -> its codes, `{"unit": ["ICU", "CCU"]}`, or how many to agree on, `{"diagnosis": 30}`.
        least: Fewest rows (patients, with `group`) behind what a client gives before round 1.
        classes: The target's classes in their order, where a client's own file may lack some.
        val_fraction: Share of the training rows for validation, in [0, 1).
        test_fraction: Share of a client's rows for testing, in [0, 1).
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        delimiter: Character between two cells; `None` finds a comma, semicolon, tab or bar.
        decimal: Sign before the fraction of a number; `None` takes a comma for it where it cannot be a mark of thousands, in
            files with another delimiter.
        encoding: Of the file: `"cp1252"` or `"utf-16"` where a spreadsheet wrote it so.
        public_fraction: As `public`, for a share.
        public: Public data, which are in nobody's training, validation or test data: a share of every client's training
            samples, in [0, 1), or another data set, as a Dataset or a data module (its training data). What a client holds
            too is left out of that.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a value is out of its range, or neither or both of `client` and `partitioner` are given.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules import TabularFederatedDataModule
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "patients.csv")
        ...     rows = [f"{40 + i},{'fm'[i % 2]},{'Rome' if i < 12 else 'Oslo'},{i % 2}" for i in range(20)]
        ...     _ = path.write_text("\n".join(["age,sex,hospital,ill", *rows]))
        ...     data = TabularFederatedDataModule(path, target="ill", client="hospital", batch_size=4)
        ...     data.setup()
        >>> data.client_ids, data.feature_names, data.class_names
        (['Oslo', 'Rome'], ['age', 'sex=f', 'sex=m'], ['0', '1'])
    """

    @checked
    @exactly_one("client", "partitioner", why="give the column that names the client, or what divides the rows.")
    def __init__(
        self,
        path: str | Path,
        target: str,
        client: str | None = None,
        partitioner: Partitioner | None = None,
        *,
        group: str | bool | None = None,
        task: Literal["auto", "classification", "regression"] = "auto",
        drop: Sequence[str] = (),
        categorical: Sequence[str] = (),
        statistics: Mapping[str, Sequence[float]] | None = None,
        target_statistics: Sequence[float] | None = None,
        scaling: bool = True,
        scale: Literal["local", "federated", "none"] = "local",
        ranges: Mapping[str, Sequence[float]] | None = None,
        categories: Mapping[str, Sequence[str] | int] | None = None,
        least: PositiveInt = 5,
        classes: Annotated[Sequence[str], Length(2, different=True)] | None = None,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne = 0.2,
        val_seed: int | None = None,
        delimiter: str | None = None,
        decimal: Literal[".", ","] | None = None,
        encoding: str = "utf-8-sig",
        public_fraction: ShareBelowOne = 0.0,
        public: Public = None,
        **options: Any,
    ) -> None:
        super().__init__(public=public, **options)
        self.public_fraction = share_of(self, public, public_fraction)
        name = type(self).__name__
        moments_by_column = dict(statistics or {}) | ({} if target_statistics is None else {target: target_statistics})
        for column, pair in moments_by_column.items():
            if len(pair) != 2 or not np.isfinite(pair).all() or pair[1] <= 0:
                raise ValueError(
                    f"{name} got statistics {list(pair)} of {column!r}; give [mean, standard deviation > 0]."
                )
        self.path, self.target, self.client, self.task = Path(path), target, client, task
        self.partitioner = NaturalPartitioner(column=str(client)) if partitioner is None else partitioner
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise ValueError(f"{name} got delimiter={delimiter!r}; give the one character between two cells.")
        if group is True:
            raise ValueError(f"{name} got group=True; give the name of a column, or False if rows are independent.")
        self.group = group
        self.drop, self.categorical = tuple(drop), tuple(categorical)
        self.statistics, self.target_statistics, self.scaling = dict(statistics or {}), target_statistics, scaling
        self.scale = scale if scaling else "none"
        self.ranges, self.categories, self.least = dict(ranges or {}), dict(categories or {}), least
        self.classes = None if classes is None else [str(name) for name in classes]
        if self.classes is not None and task == "regression":
            raise ValueError(f"{name} got classes {self.classes} with task='regression'; give one of them.")
        self._open = Open(self.ranges, least)
        check_scale(name, scale if scaling else f"{scale} and scaling: false", self.ranges, self.categories)
        self.val_fraction, self.test_fraction, self.val_seed = val_fraction, test_fraction, val_seed
        try:
            "".encode(codecs.lookup(encoding).name)  # LookupError: also of rot13, which is not an encoding of text
        except (LookupError, ValueError):
            raise ValueError(
                f"{name} got encoding={encoding!r}, which Python does not know; such as utf-8, cp1252."
            ) from None
        self._form = Form(delimiter, decimal, encoding)
        self.feature_names: list[str] = []
        self._scaled_by_rows: list[str] = []
        self._scaling_rows: dict[str, np.ndarray] = {}
        self._named_by_file: dict[str, Any] = {}
        self.class_names: list[str] | None = None
        self._divides = self.partitioner

    @property
    def partition_name(self) -> str:
        return f"by {self.client}" if self.client is not None else self._divides.describe()

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        table = read_table(self.path, self._form)
        targets = [column_of(table, name, "target") for name in self._targeted]
        named_columns = {"drop": self.drop, "categorical": self.categorical, "statistics": self.statistics}
        named_columns |= {"ranges": self.ranges, "categories": self.categories}
        for what, names in named_columns.items():
            for name in names:
                column_of(table, name, what)
        kept = complete(targets)
        named = " and ".join(map(repr, self._targeted))
        if not kept.any():
            raise ValueError(f"{self.path}: no row has a {named}.")
        if not kept.all():
            rank_zero_warn(
                f"{self.path}: {int((~kept).sum())} of {len(kept)} rows have no {named} and are left out.",
                category=UserWarning,
            )
        y, classes = self._targets(targets, kept)
        labels: dict[str, np.ndarray | None] = {"train": classes}
        self._divides = suited(self.partitioner, labels, f"{type(self).__name__}({self.path.name})")
        keys: Any = int(kept.sum())
        if self.client is not None:
            keys = self._groups(column_of(table, self.client, "client"), kept)
            ask_about_one(keys, "client", f"{self.path}, column {self.client!r}")
        elif self._divides.needs == "groups":
            keys = self._groups(column_of(table, getattr(self._divides, "column", "groups"), "partitioner"), kept)
        elif self._divides.needs == "labels":
            keys = classes
        data: dict[str, Any] = {"train": range(int(kept.sum()))}
        fractions = (self.val_fraction, self.test_fraction)
        groups = self._units(table, kept)
        self._open = Open(self.ranges, self.least, None if groups is None else groups["train"])
        ids, splits = federate(
            self._divides, data, labels, {"train": keys}, self.seed, *fractions, self.val_seed, groups
        )
        training_rows = [
            np.concatenate([splits[name].indices[place] for name in ("train", "val") if name in splits])
            for place in range(len(ids))
        ]
        everything = [np.concatenate([split.indices[place] for split in splits.values()]) for place in range(len(ids))]
        self._scaling_rows = dict(zip(ids, training_rows, strict=True))
        x = self._features(table, kept, training_rows, everything)
        dataset = ArrayDataset(torch.from_numpy(x).float(), y)
        for split in splits.values():
            split.dataset = dataset
        return ids, splits

    def inputs_of(self, path: str | Path, client: str) -> torch.Tensor:
        r"""Return the inputs of other rows, scaled and coded as those of a client, for its model or the global one.

        Args:
            path: A file with the columns of features; it need not have others.
            client: Whose training and validation rows scale the new ones (`scale: local`).

        Raises:
            ValueError: If a word has no feature, or `scale: federated` or a number of `categories` was agreed on in a run, or
                the data module's file has changed since setup.

        Example:
            >>> import tempfile
            >>> folder = Path(tempfile.mkdtemp())
            >>> path, new = folder / "patients.csv", folder / "new.csv"
            >>> rows = [f"{age},{'fm'[age % 2]},{'AB'[age % 2]},{age // 2 % 2}" for age in range(40, 80)]
            >>> _ = path.write_text("\n".join(["age,sex,site,ill", *rows]))
            >>> _ = new.write_text("sex,age\nf,60")
            >>> data = TabularFederatedDataModule(path, target="ill", client="site", batch_size=4)
            >>> data.setup()
            >>> data.inputs_of(new, "A").shape, data.feature_names
            (torch.Size([1, 3]), ['age', 'sex=f', 'sex=m'])
        """
        if self.scale == "federated" or any(isinstance(words, int) for words in self.categories.values()):
            raise ValueError(
                "inputs_of does not know what clients agreed on in a run: give the numbers and words of its statistics.json "
                "as statistics and categories, with scale: local."
            )
        self.indices(client)  # there is such a client
        table, other = read_table(self.path, self._form), read_table(Path(path), self._form)
        kept = complete([table[name] for name in self._targeted])
        dataset = next(iter(self._splits.values())).dataset
        assert isinstance(dataset, ArrayDataset)  # `build` made it, for all splits
        changed_since = ValueError(
            f"{self.path} has changed since setup, and its rows scale the new ones. Call setup anew."
        )
        if kept.sum() != len(dataset):
            raise changed_since
        count = len(next(iter(other.values())).cells)
        joined = {}
        for name, column in table.items():
            is_feature = any(feature == name or feature.startswith(f"{name}=") for feature in self.feature_names)
            if not is_feature or name in {*self._targeted, *self._apart}:
                continue
            more = column_of(other, name, "feature")
            if column.numbers is not None and more.numbers is None:
                raise ValueError(f"{path}: column {name!r} holds words, and numbers in {self.path}.")
            numbers = None if column.numbers is None else np.concatenate([column.numbers, more.numbers])
            joined[name] = Column(name, column.cells + more.cells, numbers)
        rows, new = self._scaling_rows[client], np.arange(len(dataset), len(dataset) + count)
        both = copy.copy(self)
        both.path, both._named_by_file = Path(f"{self.path} and {path}"), {}  # for what it says of them
        features = both._features(joined, np.append(kept, np.ones(count, bool)), [rows], [np.append(rows, new)])
        unseen = [name for name in both.feature_names if name not in self.feature_names]
        if unseen:
            raise ValueError(
                f"{path}: {unseen[0]} has no feature, since {self.path} has no such row. Leave such rows out, or train with "
                "categories, in which other words have one."
            )
        x = torch.from_numpy(features).to(dataset.x.dtype)
        if not torch.equal(x[rows], dataset.x[rows]):
            raise changed_since
        return x[new]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that features and target are made of."""
        return [name for name in read_header(self.path, self._form) if name not in self._apart]

    @property
    def _apart(self) -> set[Any]:
        """Columns that divide the rows, and those that are left out."""
        return {self.client, getattr(self._divides, "column", None), self.group, *self.drop}

    def sample_values(self, client: str, split: str, column: str) -> list[str]:
        stamp = self.path.stat().st_mtime_ns
        return _kept_cells(self.path, stamp, self._form, tuple(self._targeted), column)[
            self.indices(client, split)
        ].tolist()

    @property
    def _targeted(self) -> list[str]:
        """Columns that the targets are made of."""
        return [self.target]

    def _targets(self, columns: Sequence[Column], kept: np.ndarray) -> tuple[torch.Tensor, np.ndarray | None]:
        """Return the targets of the rows, and their classes unless they are measurements."""
        (column,) = columns
        numbers = None if column.numbers is None else column.numbers[kept]
        if self.classes is not None:
            classes, self.class_names = classes_named(self.path, column, kept, self.classes), list(self.classes)
            return torch.from_numpy(classes), classes
        if self.task != "classification":
            refuse_other_numbers(self.path, column, "give task='classification'")
        few = numbers is None or ((numbers == np.round(numbers)).all() and len(np.unique(numbers)) <= MOST_CLASSES)
        if self.task == "classification" or (self.task == "auto" and few):
            values: Any = np.array(column.cells)[kept] if numbers is None else numbers
            levels, classes = np.unique(values, return_inverse=True)
            if len(levels) < 2:
                raise ValueError(
                    f"{self.path}: all rows have {self.target!r} = {levels[0]}; there is nothing to learn."
                )
            check_classes(values, f"{self.path}, column {self.target!r}", "name them all by classes=[...]")
            self.class_names = [str(name) if numbers is None else f"{name:g}" for name in levels.tolist()]
            self._named_by_file["classes"] = self.class_names
            return torch.from_numpy(classes.astype(np.int64)), classes.astype(np.int64)
        if numbers is None:
            raise ValueError(f"{self.path}: {self.target!r} holds words; a regression needs numbers.")
        broken = numbers[numbers != np.round(numbers)]
        if self.task == "auto" and 0 < len(broken) <= max(1, len(numbers) // 100):
            rank_zero_warn(
                f"{self.path}: {self.target!r} holds whole numbers but for {broken[0]:g}, and is taken for a measurement. "
                "Say which it is by task='classification' or 'regression'.",
                category=UserWarning,
            )
        refuse_extremes(f"{self.path}: the target {self.target!r}", numbers, [np.arange(len(numbers))])
        mean, deviation = (0.0, 1.0) if self.target_statistics is None else self.target_statistics
        return torch.from_numpy((numbers - mean) / deviation).float(), None

    def _units(self, table: Mapping[str, Column], kept: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return the group of each row, or `None` if rows are independent."""
        if self.group:
            groups = self._groups(column_of(dict(table), self.group, "group"), kept, "group")
            ask_about_spelling(groups, f"{self.path}, column {self.group!r}")
            return {"train": groups}
        named = {*self._targeted, self.client, getattr(self._divides, "column", None)}
        asked = [
            name
            for name, column in table.items()
            if name not in named
            and (looks_like_identifier(name, column.cells) or (name in self.drop and repeats(column)))
        ]
        if self.group is None and asked:
            rank_zero_warn(
                f"{self.path}: column {asked[0]!r} has {len(set(table[asked[0]].cells))} different values in "
                f"{len(kept)} rows. If it names patients, rows of one may now be in training and test data: give "
                f"group={asked[0]!r}. If rows are independent: group=False.",
                category=UserWarning,
            )
        return None

    def _groups(self, column: Column, kept: np.ndarray, what: str = "client") -> np.ndarray:
        cells = np.array(column.cells)[kept]
        if (cells == "").any():
            row = int(np.flatnonzero(cells == "")[0]) + 1
            raise ValueError(
                f"{self.path}: sample {row} has no {column.name!r}, so no {what}; fill it in or remove the row."
            )
        return cells

    def _features(
        self, table: Mapping[str, Column], kept: np.ndarray, own_rows: Sequence[np.ndarray], rows: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return the features of all rows, each scaled by its own client."""
        unused = {*self._targeted, *self._apart}
        self.feature_names, self._scaled_by_rows = [], []
        columns: list[np.ndarray] = []
        for name, column in table.items():
            if name in unused:
                continue
            if name in self.categories:
                self._add_words(column, kept, self.categories[name], columns)
                continue
            if name not in self.categorical:
                refuse_other_numbers(self.path, column, f"give categorical: [{name}]")
            if column.numbers is None or name in self.categorical:
                cells = np.array(column.cells)[kept]
                self._named_by_file.setdefault("categories", {})[name] = levels_of(column)
                ask_about_spelling(levels_of(column), f"{self.path}, column {name!r}")
                for level in levels_of(column):
                    self.feature_names.append(f"{name}={level}")
                    columns.append((cells == level).astype(np.float64))
                continue
            self.feature_names.append(name)
            kept_rows = np.flatnonzero(kept)
            refuse_extremes(f"{self.path}: column {name!r}", column.numbers, [kept_rows[part] for part in rows])
            if self.scale == "federated" and name not in self.statistics:
                self._open.numbers[name] = len(columns), column.numbers[kept]
                columns.append(np.full(int(kept.sum()), np.nan))
            else:
                columns.append(self._scaled(name, column.numbers[kept], own_rows, rows))
        if not columns:
            raise ValueError(f"{self.path}: no column is left as a feature beside {self.target!r}.")
        return np.stack(columns, axis=1)

    def _add_words(
        self, column: Column, kept: np.ndarray, words: Sequence[str] | int, columns: list[np.ndarray]
    ) -> None:
        """Add the columns of a column of words: of those that are named, or places for those that are agreed on."""
        name, cells = column.name, codes_of(column, kept)
        if isinstance(words, int):
            self._open.words[name] = len(columns), words, cells
            self.feature_names += [f"{name}=(place {place + 1})" for place in range(words)] + [f"{name}=other"]
            columns += [np.full(len(cells), np.nan) for _ in range(words + 1)]
            return
        self.feature_names += [f"{name}={word}" for word in words] + [f"{name}=other"]
        named = [str(word) for word in words]
        if not np.isin(cells, named).any():  # codes of whole numbers are without decimals here
            named = [code_of(word) for word in named]
        ask_about_spelling([*named, *dict.fromkeys(cells.tolist())], f"{self.path}, column {name!r}")
        columns += one_hot(cells, named, len(words))

    @property
    def coupled_records(self) -> str:
        if not self._scaled_by_rows:
            return ""
        return (
            f"{self._scaled_by_rows[0]!r} is scaled by the mean and deviation of all rows of a client (scale: local). Give "
            "statistics of a public sample for such columns, or scale: none."
        )

    @property
    def meaning(self) -> dict[str, list[str]]:
        scales = [f"{name}: {list(map(float, pair))}" for name, pair in sorted(self.statistics.items())]
        targets = [str(name) for name in self.class_names or (self.target_statistics or ())]
        return {"inputs": [*self.feature_names, self.scale, *scales], "targets": [*self._targeted, *targets]}

    @property
    def named_by_file(self) -> dict[str, Any]:
        return self._named_by_file

    @property
    def wanted_statistics(self) -> dict[str, Any] | None:
        return self._open.wanted

    def statistics_of(self, client: str) -> dict[str, Any]:
        return self._open.sums(self.indices(client, "train"))

    def with_statistics(self, totals: Mapping[str, Any]) -> TabularFederatedDataModule:
        standardised_data = copy.copy(self)
        dataset_with_gaps = next(iter(self._splits.values())).dataset
        assert isinstance(dataset_with_gaps, ArrayDataset)  # `build` made it, for all splits
        x, standardised_data.feature_names = self._open.filled(dataset_with_gaps.x, self.feature_names, totals)
        standardised_data._open = Open(self.ranges, self.least)
        dataset = ArrayDataset(x, dataset_with_gaps.y)
        standardised_data._splits = {name: replace(split, dataset=dataset) for name, split in self._splits.items()}
        return standardised_data

    def _pooled(self, split: str) -> Any:
        if self.wanted_statistics is not None:
            raise ValueError(
                f"{type(self).__name__}(scale='federated') is scaled by statistics that a FederatedTrainer asks clients for. "
                "For another trainer use scale='local', or give statistics."
            )
        return super()._pooled(split)

    def _scaled(
        self, name: str, values: np.ndarray, own_rows: Sequence[np.ndarray], rows: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return a column of numbers with every client's values standardised and gaps filled."""
        if self.scale == "none" and name not in self.statistics:
            if np.isnan(values).any():
                raise ValueError(
                    f"{self.path}: column {name!r} has {int(np.isnan(values).sum())} gaps, which scaling fills with "
                    "each client's mean; use scale: local or federated, give statistics, or drop the column."
                )
            return values
        self._scaled_by_rows += [] if name in self.statistics else [name]
        return standardised(values, own_rows, rows, self.statistics.get(name))


@lru_cache(maxsize=2)
def _kept_cells(path: Path, stamp: int, form: Form, targets: tuple[str, ...], column: str) -> np.ndarray:
    """Return the cells of a column in rows with a target, for all clients, which ask for it one after the other.

    `stamp` is the time of the file's last change.
    """
    table = read_table(path, form, {*targets, column})
    if column not in table:
        column_of(read_table(path, form), column, "subgroup")
    return np.array(table[column].cells)[complete([table[name] for name in targets])]

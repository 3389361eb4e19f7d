"""A table and a picture of the samples that each client holds.

Equal inputs: the same image or row in training and test data, or at two clients.

How the columns of a table differ from client to client: gaps, quantiles, and a test with its effect.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.federated_data import SPLITS, FederatedDataModule, sort_clients
from fedlightning.datamodules.indexed import IndexedFederatedDataModule
from fedlightning.ranges import number_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLUMNS = ("split", "client", "samples", "total_variation")
"""Columns of a table of clients that are not classes."""


@dataclass
class PartitionReport:
    """Class histograms of all clients; `print` it for a table.

    Attributes:
        client_ids: Names of the clients.
        classes: Names of the classes.
        counts: Samples of each class, int64 of shape `(clients, classes)`.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules import PartitionReport
        >>> print(PartitionReport(["a", "b"], ["cat", "dog"], np.array([[30, 10], [10, 30]])))
        client  samples     TV  cat  dog
             a       40  0.250   30   10
             b       40  0.250   10   30
        2 clients, 80 samples, smallest 40, mean total variation to all labels 0.250
    """

    client_ids: list[str]
    classes: list[str]
    counts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each client, shape `(clients,)`."""
        return np.asarray(self.counts.sum(axis=1))

    @property
    def min_size(self) -> int:
        """Samples of the smallest client."""
        return int(self.sizes.min())

    @property
    def total_variation(self) -> np.ndarray:
        """Distance of each client's label distribution to that of all samples, shape `(clients,)`.

        Half of the sum of absolute differences: 0 is equal, 1 is disjoint. NaN for a client without samples.
        """
        overall = self.counts.sum(axis=0) / max(1, self.counts.sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = self.counts / self.sizes[:, None]
        return np.asarray(np.abs(shares - overall).sum(axis=1) / 2)

    @property
    def mean_total_variation(self) -> float:
        """Mean distance over the clients that have samples; NaN if none has."""
        distances = self.total_variation[self.sizes > 0]
        return float(distances.mean()) if len(distances) else float("nan")

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary a client: `client`, `samples`, `total_variation` and one entry a class.

        A class that is called as another column is `class NAME`.
        """
        names = [f"class {name}" if name in COLUMNS else name for name in self.classes]
        return [
            {"client": client, "samples": int(size), "total_variation": float(distance)}
            | dict(zip(names, map(int, row), strict=True))
            for client, size, distance, row in zip(
                self.client_ids, self.sizes, self.total_variation, self.counts, strict=True
            )
        ]

    def __str__(self) -> str:
        header = ["client", "samples", "TV", *self.classes]
        body = [
            [client, str(size), f"{distance:.3f}", *map(str, row)]
            for client, size, distance, row in zip(
                self.client_ids, self.sizes.tolist(), self.total_variation, self.counts.tolist(), strict=True
            )
        ]
        widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *body]
        ]
        lines.append(
            f"{len(self.client_ids)} clients, {int(self.sizes.sum())} samples, smallest {self.min_size}, "
            f"mean total variation to all labels {self.mean_total_variation:.3f}"
        )
        return "\n".join(lines)


def describe(
    source: FederatedDataModule | Sequence[Any],
    labels: Any = None,
    split: str = "train",
    client_ids: Sequence[str] | None = None,
) -> PartitionReport:
    """Count the samples of each class that each client holds.

    Args:
        source: A data module after `setup`, or one index array for each client.
        labels: With index arrays: the label of every sample, shape `(samples,)`. `None` counts all as one class.
        split: With a data module: the split.
        client_ids: With index arrays: the clients' names. `None` is `"0" .. "N-1"`.

    Raises:
        ValueError: If the numbers of names and of index arrays differ.

    Example:
        >>> from fedlightning.datamodules import describe
        >>> describe([[0, 1, 2], [3]], labels=["cat", "cat", "dog", "dog"]).counts
        array([[2, 1],
               [0, 1]])
    """
    if isinstance(source, FederatedDataModule):
        ids = sort_clients(source.client_ids)
        count_rows = [source.class_counts(client, split) for client in ids]
        if any(row is None for row in count_rows):
            table = np.array([[source.num_samples(client, split)] for client in ids])
        else:
            table = np.array(count_rows)
        names = class_names_of(source) or [str(number) for number in range(source.num_classes or 0)]
        return PartitionReport(ids, names if len(names) == table.shape[1] else ["all"], table.astype(np.int64))
    ids = [str(i) for i in range(len(source))] if client_ids is None else [str(name) for name in client_ids]
    if len(ids) != len(source):
        raise ValueError(f"describe got {len(ids)} client_ids for {len(source)} index lists; give one name each.")
    if labels is None:
        return PartitionReport(ids, ["all"], np.array([[len(part)] for part in source], dtype=np.int64))
    values, codes = np.unique(np.asarray(labels), return_inverse=True)
    counts = np.stack([np.bincount(codes[np.asarray(part, dtype=np.int64)], minlength=len(values)) for part in source])
    return PartitionReport(ids, [str(value) for value in values.tolist()], counts.astype(np.int64))


def class_names_of(data: FederatedDataModule) -> list[str]:
    """Return the names of the classes in their order, as the data or who made them have it; `[]` where there are none."""
    for source in (data, data.original):
        names = [str(name) for name in getattr(source, "class_names", None) or ()]
        if names and len(names) == data.num_classes:
            return names
    return []


def plot_partition(
    source: PartitionReport | FederatedDataModule | Sequence[Any],
    labels: Any = None,
    split: str = "train",
    title: str | None = None,
    axis: str = "client",
) -> Figure:
    """Return stacked bars, one for each client, coloured by class.

    Args:
        source: A report, or what `describe` takes (with `labels` and `split`).
        labels: As for `describe`.
        split: As for `describe`.
        title: Title of the picture. `None` states sizes and skew in words.
        axis: What a bar is of.

    Returns:
        A matplotlib figure that belongs to no window or global state. Save it with `figure.savefig(path)`.

    Example:
        >>> from fedlightning.datamodules import plot_partition
        >>> figure = plot_partition([[0, 1, 2], [3]], labels=[0, 0, 1, 1])
        >>> figure.axes[0].get_title()
        '2 clients, the smallest has 1 sample; labels differ by 0.33 (0 alike, 1 disjoint)'
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    report = source if isinstance(source, PartitionReport) else describe(source, labels, split)
    clients, classes = report.counts.shape
    figure = Figure(figsize=(float(np.clip(3.5 + 0.28 * clients, 6, 16)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    palette = colormaps["tab10"] if classes <= 10 else colormaps["tab20"] if classes <= 20 else colormaps["turbo"]
    colours = [palette(c if classes <= 20 else c / (classes - 1)) for c in range(classes)]
    positions = np.arange(clients)
    bottom = np.zeros(clients)
    for column in range(classes):
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3} if clients <= 40 else {}
        axes.bar(
            positions,
            report.counts[:, column],
            0.85,
            bottom,
            color=colours[column],
            label=report.classes[column],
            **edge,
        )
        bottom += report.counts[:, column]
    step = max(1, -(-clients // 40))  # more than 40 labels would overlap
    axes.set_xticks(positions[::step], report.client_ids[::step], parse_math=False)  # a client may be called "$x"
    if max(len(name) for name in report.client_ids) * min(clients, 40) > 100:
        axes.tick_params(axis="x", rotation=60)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_xlabel(axis)
    axes.set_ylabel("samples")
    axes.locator_params(axis="y", nbins=4)  # five ticks
    axes.spines[["top", "right"]].set_visible(False)
    words = f"{clients} {axis}s, the smallest has {report.min_size} sample{'s' if report.min_size != 1 else ''}"
    if classes > 1:
        words += f"; labels differ by {report.mean_total_variation:.2f} (0 alike, 1 disjoint)"
    axes.set_title(words if title is None else title, fontsize=10)
    if 1 < classes <= 30:
        handles, names = axes.get_legend_handles_labels()
        figure.legend(
            handles[::-1], names[::-1], title="class", loc="outside right center", fontsize=8,
            ncols=1 + (classes - 1) // 15, frameon=False,
        )  # fmt: skip
    elif classes > 30:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        figure.colorbar(ScalarMappable(Normalize(0, classes - 1), palette), ax=axes, label="class")
    return figure


@dataclass
class Duplicates:
    """Samples whose inputs are equal, bit for bit.

    Attributes:
        leaked: Validation and test samples that are in somebody's training data, too.
        shared: Training samples that another client has in its training data.
        read: Samples that were compared.
        examples: A few of them in words, leaked ones first.

    Example:
        >>> from fedlightning.datamodules.partition_report import Duplicates
        >>> print(Duplicates(leaked=1, shared=0, read=90, examples=["test sample 3 of client 'a' is training sample 0"]))
        Equal inputs: 1 of 90 samples are validation or test samples that somebody trains on; 0 training samples are at more
        than one client. Such as: test sample 3 of client 'a' is training sample 0.
    """

    leaked: int
    shared: int
    read: int
    examples: list[str]

    def __str__(self) -> str:
        if not self.leaked and not self.shared:
            return f"Equal inputs: none between training and other data, or between clients ({self.read} samples)."
        return (
            f"Equal inputs: {self.leaked} of {self.read} samples are validation or test samples that somebody trains on; "
            f"{self.shared} training samples are at more\nthan one client. Such as: {'; '.join(self.examples)}."
        )


def find_duplicates(data: FederatedDataModule, most: int = 200_000) -> Duplicates | None:
    """Find samples with equal inputs in training and other data, and at two clients.

    A score on a test image that was trained on is too good, and a patient who is at two hospitals is not an independent
    sample of either. Rows of a small table may be equal by chance. Inputs are compared by their hash, targets are not.

    Args:
        data: The data module, after `setup`. Its samples are read once, in this process.
        most: Samples that are read at most; with more of them nothing is compared.

    Returns:
        What was found, or `None` where there are more samples, inputs are not tensors or wait for statistics of all clients,
        or clients are made when they are asked for.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule
        >>> from fedlightning.datamodules.partition_report import find_duplicates
        >>> data = DigitsDataModule()
        >>> data.setup()
        >>> find_duplicates(data).leaked
        0
    """
    if not isinstance(data, IndexedFederatedDataModule) or data.wanted_statistics is not None:  # all are NaN yet
        return None
    clients = data.client_ids
    total = sum(data.num_samples(client, split) for client in clients for split in SPLITS)
    if total > most:
        return None
    trained: dict[bytes, tuple[str, int]] = {}
    shared = leaked = 0
    examples: list[str] = []
    hash_by_position: dict[tuple[int, int], bytes | None] = {}
    for split in sorted(SPLITS, key=lambda name: name != "train"):
        for client in clients:
            for row, key in enumerate(_hashes(data, client, split, hash_by_position)):
                if key is None:
                    return None
                if split == "train":
                    home = trained.setdefault(key, (client, row))
                    if home[0] != client:
                        shared += 1
                        examples.append(
                            f"training sample {row} of client {client!r} is sample {home[1]} of {home[0]!r}"
                        )
                elif key in trained:
                    leaked += 1
                    home = trained[key]
                    examples.insert(
                        0, f"{split} sample {row} of client {client!r} is training sample {home[1]} of {home[0]!r}"
                    )
    return Duplicates(leaked, shared, total, examples[:3])


def _hashes(
    data: IndexedFederatedDataModule, client: str, split: str, hash_by_position: dict[tuple[int, int], bytes | None]
) -> Iterator[bytes | None]:
    """Yield the hash of each input of a client's split; `None` for one that is not a tensor."""
    loader = data.client_dataloader(client, split)
    view: Any = getattr(loader, "dataset", ())
    for row, index in zip(range(len(view)), getattr(view, "indices", ()), strict=True):
        place = (id(view.dataset), int(index))
        if place not in hash_by_position:
            hash_by_position[place] = _hash(view[row])
        yield hash_by_position[place]


def _hash(sample: Any) -> bytes | None:
    x = sample[0] if isinstance(sample, tuple | list) and sample else sample
    parts = list(x.values()) if isinstance(x, Mapping) else [x]
    if not all(isinstance(part, Tensor) for part in parts):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(str(tuple(part.shape)).encode())
        digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_VALUES = 20
"""Fewest values of a client whose 5 % and 95 % quantiles are given: of fewer these would be nearly its extremes."""
MOST_LEVELS = 10
"""Columns with at most so many different values are compared as categories, numbers too."""
_OWN = 0.5  # share of different cells from which words are free text or numbers of patients, not categories
_NUMBERS = 0.5  # share of a column's values that are numbers, for it to be one of numbers


@dataclass(frozen=True)
class ColumnReport:
    """One column of a table at all clients.

    Attributes:
        name: Name of the column.
        test: `"Kruskal-Wallis"` for numbers, `"chi-square"` for words, or `""` where there is nothing to compare: one
            value only, or texts, of which no words are given.
        p: p-value of the hypothesis that all clients have one distribution, not adjusted for the other columns.
        effect: Size of the differences from 0 to 1: epsilon squared of Kruskal-Wallis, or Cramer's V.
        clients: One line a client: `client`, `samples`, `missing` (share), and `q05`, `q25`, `median`, `q75`, `q95`, or for
            words `most` and its share `share`.
    """

    name: str
    test: str
    p: float | None
    effect: float | None
    clients: list[dict[str, Any]]


def describe_columns(
    data: FederatedDataModule, columns: Sequence[str], split: str = "train", group: str | None = None
) -> list[ColumnReport]:
    r"""Describe columns of a table, the smallest p-value first.

    Args:
        data: The data module, after `setup`; its samples have columns (`sample_values`).
        columns: Names of the columns.
        split: The split.
        group: Column that names the patient of a row: a test takes one row of each, since rows of one are not independent.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules import TabularFederatedDataModule
        >>> from fedlightning.datamodules.partition_report import describe_columns
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "patients.csv")
        ...     rows = [f"{40 + i},{'fm'[i % 2]},{'Rome' if i < 30 else 'Oslo'},{i % 2}" for i in range(60)]
        ...     _ = path.write_text("\n".join(["age,sex,hospital,ill", *rows]))
        ...     data = TabularFederatedDataModule(path, target="ill", client="hospital")
        ...     data.setup()
        ...     found = describe_columns(data, ["sex", "age"])
        >>> [(one.name, one.test, one.p < 0.05) for one in found]
        [('age', 'Kruskal-Wallis', True), ('sex', 'chi-square', False)]
    """
    clients = sort_clients(data.client_ids)
    patients = {client: data.sample_values(client, split, group) if group else None for client in clients}
    reports = []
    for name in columns:
        cells = {client: data.sample_values(client, split, name) for client in clients}
        single = {client: _first_of_each(column, patients[client]) for client, column in cells.items()}
        reports.append(_report(name, cells, single))
    return sorted(reports, key=lambda report: (report.p is None, report.p or 0.0, -(report.effect or 0.0)))


def _report(name: str, cells: dict[str, list[str]], single: dict[str, list[str]]) -> ColumnReport:
    every = [cell for column in cells.values() for cell in column if cell]
    numbers = len(set(every)) > MOST_LEVELS and sum(map(_is_number, every)) > _NUMBERS * len(every)
    free = not numbers and len(set(every)) > max(MOST_LEVELS, _OWN * len(every))
    lines = []
    for client, column in cells.items():
        full = [cell for cell in column if cell and (not numbers or _is_number(cell))]
        line: dict[str, Any] = {
            "client": client,
            "samples": len(column),
            "missing": 1 - len(full) / max(1, len(column)),
        }
        lines.append(line | (_quantiles(full) if numbers else _commonest([] if free else full)))
    if free:  # each cell would be a category of its own, and the commonest one a patient's text
        return ColumnReport(name, "", None, None, lines)
    groups = [[cell for cell in column if cell and (not numbers or _is_number(cell))] for column in single.values()]
    test, p, effect = _compared([group for group in groups if group], numbers)
    return ColumnReport(name, test, p, effect, lines)


def _compared(groups: list[list[str]], numbers: bool) -> tuple[str, float | None, float | None]:
    """Return the test of equal distributions, its p-value and its effect."""
    from scipy import stats

    total, different = sum(map(len, groups)), {cell for group in groups for cell in group}
    if len(groups) < 2 or len(different) < 2:
        return "", None, None
    if numbers:
        kruskal = stats.kruskal(*[np.array(group, dtype=np.float64) for group in groups])
        return "Kruskal-Wallis", float(kruskal.pvalue), float(kruskal.statistic) / (total - 1)
    words = sorted(different)
    table = np.array([[Counter(group)[word] for word in words] for group in groups])
    tested = stats.chi2_contingency(table, correction=False)
    effect = float(np.sqrt(tested.statistic / (total * (min(table.shape) - 1))))
    return "chi-square", float(tested.pvalue), effect


def _quantiles(cells: list[str]) -> dict[str, float | None]:
    values = np.array(cells, dtype=np.float64)
    shares = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
    few = {"q05", "q95"} if len(values) < MIN_VALUES else set()
    return {
        name: None if name in few or not len(values) else float(np.quantile(values, q)) for name, q in shares.items()
    }


def _commonest(cells: list[str]) -> dict[str, Any]:
    if not cells:
        return {"most": None, "share": None}
    word, count = min(Counter(cells).items(), key=lambda pair: (-pair[1], pair[0]))
    return {"most": word, "share": count / len(cells)}


def _first_of_each(cells: list[str], patients: list[str] | None) -> list[str]:
    if patients is None:
        return cells
    first = {patient: place for place, patient in reversed(list(enumerate(patients)))}
    return [cells[place] for place in sorted(first.values())]


def _is_number(cell: str) -> bool:
    try:
        return bool(np.isfinite(number_in(cell)))
    except ValueError:
        return False


LINES = 40
"""Lines of clients' images that stand below each other; more clients stand beside them."""


def plot_images(data: FederatedDataModule, split: str = "train", most: int = 8) -> Figure | None:
    """Return the first images of each client side by side, all clients in their order; `None` if samples are not images.

    Args:
        data: The data module, after `setup`.
        split: The split.
        most: Images of a client.
    """
    from matplotlib.figure import Figure

    shown = {client: _images(data, client, split, most) for client in sort_clients(data.client_ids)}
    if not any(shown.values()):
        return None
    beside = -(-len(shown) // LINES)
    lines = -(-len(shown) // beside)
    figure = Figure(figsize=((1.0 + 0.9 * most) * beside, 0.95 * lines), layout="constrained")
    grid = figure.subplots(lines, most * beside, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for number, (client, images) in enumerate(shown.items()):
        client_axes = grid[number % lines, number // lines * most :]
        for axes, image in zip(client_axes, images, strict=False):
            axes.imshow(image, cmap="gray")
        client_axes[0].set_title(f"client {client}", fontsize=8, loc="left", parse_math=False)
    return figure


def _images(data: FederatedDataModule, client: str, split: str, most: int) -> list[np.ndarray]:
    loader = data.client_dataloader(client, split)
    dataset: Any = () if loader is None else loader.dataset
    images = []
    for place in range(min(most, len(dataset))):
        x = dataset[place][0] if isinstance(dataset[place], list | tuple) else None
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[0] not in (1, 3):
            return []
        x = x.detach().float().permute(1, 2, 0).numpy()
        low, high = float(x.min()), float(x.max())
        images.append((x - low) / ((high - low) or 1.0))
    return images

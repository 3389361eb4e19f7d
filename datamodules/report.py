"""A table and a picture of the samples that each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlightning.datamodules.base import FederatedDataModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
            own = self.counts / self.sizes[:, None]
        return np.asarray(np.abs(own - overall).sum(axis=1) / 2)

    @property
    def mean_total_variation(self) -> float:
        """Mean distance over the clients that have samples; NaN if none has."""
        held = self.total_variation[self.sizes > 0]
        return float(held.mean()) if len(held) else float("nan")

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary a client: `client`, `samples`, `total_variation` and one entry a class."""
        return [
            {"client": client, "samples": int(size), "total_variation": float(distance)}
            | dict(zip(self.classes, map(int, row), strict=True))
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
        ids = source.client_ids
        held = [source.class_counts(client, split) for client in ids]
        if any(row is None for row in held):
            table = np.array([[source.num_samples(client, split)] for client in ids])
        else:
            table = np.array(held)
        names = [str(c) for c in range(table.shape[1])] if source.num_classes is not None else ["all"]
        return PartitionReport(ids, names if len(names) == table.shape[1] else ["all"], table.astype(np.int64))
    ids = [str(i) for i in range(len(source))] if client_ids is None else [str(name) for name in client_ids]
    if len(ids) != len(source):
        raise ValueError(f"describe got {len(ids)} client_ids for {len(source)} index lists; give one name each.")
    if labels is None:
        return PartitionReport(ids, ["all"], np.array([[len(part)] for part in source], dtype=np.int64))
    values, codes = np.unique(np.asarray(labels), return_inverse=True)
    counts = np.stack([np.bincount(codes[np.asarray(part, dtype=np.int64)], minlength=len(values)) for part in source])
    return PartitionReport(ids, [str(value) for value in values.tolist()], counts.astype(np.int64))


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
        '2 clients, smallest 1 samples, mean TV distance 0.33'
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
    axes.spines[["top", "right"]].set_visible(False)
    words = f"{clients} {axis}s, smallest {report.min_size} samples, mean TV distance {report.mean_total_variation:.2f}"
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

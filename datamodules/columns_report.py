"""How the columns of a table differ from client to client: gaps, quantiles, and a test with its effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.ranges import number_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 20
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
        >>> from fedlightning.datamodules.columns_report import describe_columns
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
    patients = {client: data.sample_values(client, split, group) if group else None for client in data.client_ids}
    found = []
    for name in columns:
        cells = {client: data.sample_values(client, split, name) for client in data.client_ids}
        single = {client: _first_of_each(own, patients[client]) for client, own in cells.items()}
        found.append(_report(name, cells, single))
    return sorted(found, key=lambda one: (one.p is None, one.p or 0.0, -(one.effect or 0.0)))


def _report(name: str, cells: dict[str, list[str]], single: dict[str, list[str]]) -> ColumnReport:
    every = [cell for own in cells.values() for cell in own if cell]
    numbers = len(set(every)) > MOST_LEVELS and sum(map(_is_number, every)) > _NUMBERS * len(every)
    free = not numbers and len(set(every)) > max(MOST_LEVELS, _OWN * len(every))
    lines = []
    for client, own in cells.items():
        known = [cell for cell in own if cell and (not numbers or _is_number(cell))]
        line: dict[str, Any] = {"client": client, "samples": len(own), "missing": 1 - len(known) / max(1, len(own))}
        lines.append(line | (_quantiles(known) if numbers else _commonest([] if free else known)))
    if free:  # each cell would be a category of its own, and the commonest one a patient's text
        return ColumnReport(name, "", None, None, lines)
    groups = [[cell for cell in own if cell and (not numbers or _is_number(cell))] for own in single.values()]
    test, p, effect = _compared([own for own in groups if own], numbers)
    return ColumnReport(name, test, p, effect, lines)


def _compared(groups: list[list[str]], numbers: bool) -> tuple[str, float | None, float | None]:
    """Return the test of equal distributions, its p-value and its effect."""
    from scipy import stats

    total, different = sum(map(len, groups)), {cell for own in groups for cell in own}
    if len(groups) < 2 or len(different) < 2:
        return "", None, None
    if numbers:
        found = stats.kruskal(*[np.array(own, dtype=np.float64) for own in groups])
        return "Kruskal-Wallis", float(found.pvalue), float(found.statistic) / (total - 1)
    words = sorted(different)
    table = np.array([[Counter(own)[word] for word in words] for own in groups])
    tested = stats.chi2_contingency(table, correction=False)
    effect = float(np.sqrt(tested.statistic / (total * (min(table.shape) - 1))))
    return "chi-square", float(tested.pvalue), effect


def _quantiles(cells: list[str]) -> dict[str, float | None]:
    values = np.array(cells, dtype=np.float64)
    shares = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
    few = {"q05", "q95"} if len(values) < FEWEST else set()
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
    """Return the first images of each client side by side, all clients in their order; `None` if samples are no images.

    Args:
        data: The data module, after `setup`.
        split: The split.
        most: Images of a client.
    """
    from matplotlib.figure import Figure

    shown = {client: _images(data, client, split, most) for client in data.client_ids}
    if not any(shown.values()):
        return None
    beside = -(-len(shown) // LINES)
    lines = -(-len(shown) // beside)
    figure = Figure(figsize=((1.0 + 0.9 * most) * beside, 0.95 * lines), layout="constrained")
    grid = figure.subplots(lines, most * beside, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for number, (client, images) in enumerate(shown.items()):
        own = grid[number % lines, number // lines * most :]
        for axes, image in zip(own, images, strict=False):
            axes.imshow(image, cmap="gray")
        own[0].set_title(client, fontsize=8, loc="left", parse_math=False)
    return figure


def _images(data: FederatedDataModule, client: str, split: str, most: int) -> list[np.ndarray]:
    loader = data.client_dataloader(client, split)
    dataset: Any = () if loader is None else loader.dataset
    found = []
    for place in range(min(most, len(dataset))):
        x = dataset[place][0] if isinstance(dataset[place], list | tuple) else None
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[0] not in (1, 3):
            return []
        x = x.detach().float().permute(1, 2, 0).numpy()
        low, high = float(x.min()), float(x.max())
        found.append((x - low) / ((high - low) or 1.0))
    return found

"""Plans and partitioners: each client's share of every class is fixed once and applied to every split.

Whole samples out of real-valued shares: apportionment, tables with exact margins, Sinkhorn-Knopp scaling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch

from fedlightning.datamodules.views import Indices
from fedlightning.ranges import Range, check_on_creation


def apportion(weights: np.ndarray, total: int, minimum: int = 0) -> np.ndarray:
    """Split `total` into whole parts proportional to `weights` by largest remainder.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.plans import apportion
        >>> apportion(np.array([1.0, 2.0, 4.0]), 10)
        array([1, 3, 6])
    """
    weights = np.asarray(weights, dtype=np.float64)
    if total < minimum * len(weights):
        raise ValueError(f"{total} samples cannot give {len(weights)} parts of {minimum} or more; lower the minimum.")
    free = np.ones(len(weights), dtype=bool)
    real = np.zeros(len(weights))
    for _ in range(len(weights)):
        mass = weights[free].sum()
        scaled = weights / mass if mass > 0 else np.full(len(weights), 1.0 / free.sum())
        real = np.where(free, scaled * (total - minimum * (~free).sum()), minimum)
        low = free & (real < minimum)
        if not low.any():
            break
        free &= ~low
    parts = np.floor(real + 1e-9).astype(np.int64)
    order = np.argsort(-(real - parts).round(9), kind="stable")  # parts that differ by rounding are equal
    parts[order[: total - parts.sum()]] += 1
    return parts


def round_table(table: np.ndarray) -> np.ndarray:
    """Round a non-negative table whose column sums are whole, keeping every margin.

    Largest remainder in every column, then rows are repaired by single-unit moves along columns (Cox's controlled
    rounding, 1987): every entry is the floor or the ceiling of the real one, column sums are exact, and every row sum
    is the floor or the ceiling of the real row sum. Such a table always exists, because the constraints are those of a
    flow with whole capacities.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.plans import round_table
        >>> rounded = round_table(np.full((3, 2), 10 / 3))
        >>> rounded.sum(axis=0), rounded.sum(axis=1)
        (array([10, 10]), array([7, 7, 6]))
    """
    near = np.rint(table)
    table = np.where(np.abs(table - near) < 1e-6, near, table)  # remove float error from whole numbers
    low = np.floor(table).astype(np.int64)
    loose = table > low
    counts = low.copy()
    deficit = np.zeros(len(table))
    for column, total in enumerate(np.rint(table.sum(axis=0)).astype(np.int64)):
        deficit += table[:, column] - low[:, column]
        spare = int(total - low[:, column].sum())
        # Remainders are carried over from class to class, so that the same client is not rounded up every time.
        order = np.argsort(-np.where(loose[:, column], deficit.round(9), -np.inf), kind="stable")[:spare]
        counts[order, column] += 1
        deficit[order] -= 1
    rows = table.sum(axis=1)
    near = np.rint(rows)
    rows = np.where(np.abs(rows - near) < 1e-6, near, rows)
    floor, ceiling = np.floor(rows).astype(np.int64), np.ceil(rows).astype(np.int64)
    _repair(counts, low, loose, give=counts.sum(axis=1) > ceiling, room=ceiling, down=True)
    _repair(counts, low, loose, give=counts.sum(axis=1) < floor, room=floor, down=False)
    return np.asarray(counts)


def _repair(
    counts: np.ndarray, low: np.ndarray, loose: np.ndarray, give: np.ndarray, room: np.ndarray, down: bool
) -> None:
    """Move single units (in place) from rows above `room` to rows below it; `down=False`: the reverse."""
    sign = 1 if down else -1
    for start in np.flatnonzero(give).tolist():
        while sign * (counts[start].sum() - room[start]) > 0:
            upper = (counts > low) if down else (loose & (counts == low))
            lower = (loose & (counts == low)) if down else (counts > low)
            path = _path(start, upper, lower, sign * (room - counts.sum(axis=1)) > 0)
            if path is None:  # due to float error in the margins only: columns are exact, the row is off by one
                break
            for row, column, following in path:
                counts[row, column] -= sign
                counts[following, column] += sign


def _path(start: int, leave: np.ndarray, enter: np.ndarray, goal: np.ndarray) -> list[tuple[int, int, int]] | None:
    """Return the shortest chain of unit moves (row, column, next row) from `start` to a row of `goal`, or `None`."""
    came: dict[int, tuple[int, int]] = {start: (-1, -1)}
    queue = deque([start])
    while queue:
        row = queue.popleft()
        for column in np.flatnonzero(leave[row]).tolist():
            for following in np.flatnonzero(enter[:, column]).tolist():
                if following in came:
                    continue
                came[following] = (row, column)
                if goal[following]:
                    path = []
                    while following != start:
                        row, column = came[following]
                        path.append((row, column, following))
                        following = row
                    return path[::-1]
                queue.append(following)
    return None


def sinkhorn(
    table: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    floor: float = 1e-6,
    tolerance: float = 1e-9,
    max_iterations: int = 10_000,
) -> np.ndarray:
    """Scale rows and columns of a positive table until it has the given margins (Sinkhorn and Knopp, 1967).

    The result is `a_i P_ij b_j`, the KL projection of `P = max(table, floor)` onto the tables with these margins. A
    table that has them already is returned unchanged.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.plans import sinkhorn
        >>> sinkhorn(np.array([[3.0, 1.0], [1.0, 3.0]]), rows=np.array([8, 8]), columns=np.array([8, 8]))
        array([[6., 2.],
               [2., 6.]])
    """
    scaled = np.maximum(np.asarray(table, dtype=np.float64), floor)
    rows, columns = np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64)
    if not np.isclose(rows.sum(), columns.sum(), rtol=1e-9):
        raise ValueError(f"Row margins sum to {rows.sum():g} and column margins to {columns.sum():g}; make them equal.")
    allowed = tolerance * rows.mean()
    for _ in range(max_iterations + 1):
        error = np.abs(scaled.sum(axis=1) - rows).max()
        if error < allowed and np.abs(scaled.sum(axis=0) - columns).max() < allowed:
            return scaled
        scaled *= (rows / scaled.sum(axis=1))[:, None]
        scaled *= columns / scaled.sum(axis=0)
    raise ValueError(
        f"Sinkhorn-Knopp did not reach the margins in {max_iterations} iterations (largest row error {error:.3g} "
        f"samples, {allowed:.3g} allowed); use a larger alpha or raise max_iterations."
    )


Concentration = Annotated[
    float, Range("(0, inf)", "It is a Dirichlet concentration: 0.1 is very skewed, 100 nearly even.")
]


class Plan(ABC):
    """A partition that can be applied to any set of samples of the same task.

    Attributes:
        client_ids: Names of the clients.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import IIDPartitioner, Plan
        >>> labels = torch.arange(3).repeat(20)
        >>> plan = IIDPartitioner(num_clients=2).plan(labels, torch.Generator())
        >>> isinstance(plan, Plan), [len(part) for part in plan.split(labels)]
        (True, [30, 30])
    """

    client_ids: list[str]

    @abstractmethod
    def split(self, labels: Any, generator: torch.Generator | None = None) -> list[Indices]:
        """Divide samples among the clients.

        Args:
            labels: One key for each sample, shape `(samples,)` (labels; groups for a natural partition), or the number
                of samples if the plan needs no keys.
            generator: Chooses which samples of a class go to which client. `None` keeps their order.

        Returns:
            One ascending int64 array for each client of `client_ids`. They are disjoint and together are all of `0 ..
            samples - 1`. A client may get none.
        """


@dataclass
class SharePlan(Plan):
    """A plan by shares: client `i` gets the share `shares[i, c]` of the samples of class `classes[c]`.

    Shares are turned into whole samples by `round_table`. A plan of whole counts is therefore met exactly, and every
    client's size is within one sample of its share of any other split. A class that the plan has never seen is divided
    by client size. Without classes all samples count as one class.

    Attributes:
        client_ids: Names of the clients.
        classes: The class values, ascending, or `None` for a plan without labels.
        shares: Float64 of shape `(clients, classes)`; every column sums to 1.
        sizes: Each client's share of all samples, float64 of shape `(clients,)`.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules import SharePlan
        >>> plan = SharePlan.of_counts(np.array([[9, 1], [1, 9]]), classes=np.array([0, 1]))
        >>> [part.tolist() for part in plan.split(np.array([0] * 10 + [1] * 10))]
        [[0, 1, 2, 3, 4, 5, 6, 7, 8, 10], [9, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
    """

    client_ids: list[str]
    classes: np.ndarray | None
    shares: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of_counts(cls, counts: np.ndarray, classes: np.ndarray | None) -> SharePlan:
        """Return the plan of a table of samples.

        Args:
            counts: Samples of each client and class, shape `(clients, classes)` (whole numbers or not), with no empty
                column.
            classes: The class values, or `None` for a plan without labels.
        """
        counts = np.asarray(counts, dtype=np.float64)
        ids = [str(i) for i in range(len(counts))]
        return cls(ids, classes, counts / counts.sum(axis=0), counts.sum(axis=1) / counts.sum())

    def split(self, labels: Any, generator: torch.Generator | None = None) -> list[Indices]:
        """Divide samples among the clients; see `Plan.split`.

        Raises:
            ValueError: If the plan needs labels and got their number only.
        """
        if isinstance(labels, int | np.integer):
            if self.classes is not None:
                raise ValueError("This plan divides every class by its own shares; give split() labels, not a number.")
            groups, shares = [np.arange(int(labels))], self.shares
        elif self.classes is None:
            groups, shares = [np.arange(len(np.asarray(labels)))], self.shares
        else:
            keys = as_labels(labels, "Plan.split")
            present = np.unique(keys)
            groups = [np.flatnonzero(keys == value) for value in present]
            column = {value: position for position, value in enumerate(self.classes.tolist())}
            shares = (
                np.stack(
                    [self.shares[:, column[value]] if value in column else self.sizes for value in present.tolist()],
                    axis=1,
                )
                if len(present)
                else np.zeros((len(self.client_ids), 0))
            )
        counts = round_table(shares * np.array([len(group) for group in groups]))
        parts: list[list[Indices]] = [[] for _ in self.client_ids]
        for group, amounts in zip(groups, counts.T, strict=True):
            if generator is not None:
                group = group[torch.randperm(len(group), generator=generator).numpy()]
            for part, piece in zip(parts, np.split(group, np.cumsum(amounts)[:-1]), strict=True):
                part.append(piece)
        return [np.sort(np.concatenate(part)).astype(np.int64) if part else np.zeros(0, np.int64) for part in parts]


class Partitioner(ABC):
    """Base of the partitioners, which divide the samples of one data set among clients.

    A plan is a pure function of the partitioner's arguments, the keys and a generator.

    Attributes:
        needs: What `plan` must be given for each sample: `"labels"`, `"groups"`, `"nothing"` (then the number of samples is
            enough) or `"samples"` (then the dataset itself).

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedlightning.datamodules import Partitioner, SharePlan
        >>> class TwoToOne(Partitioner):
        ...     def plan(self, labels, generator):
        ...         classes, counts = np.unique(labels, return_counts=True)
        ...         return SharePlan.of_counts(np.outer([2, 1], counts / 3), classes)
        >>> labels = np.arange(3).repeat(20)
        >>> [len(part) for part in TwoToOne().plan(labels, torch.Generator()).split(labels)]
        [40, 20]
    """

    needs: Literal["labels", "groups", "nothing", "samples"] = "labels"

    def __init_subclass__(cls, **options: Any) -> None:
        """Let arguments be checked by their annotations."""
        super().__init_subclass__(**options)
        check_on_creation(cls)

    def describe(self) -> str:
        """Return the partitioner with its options, as in `DirichletPartitioner(num_clients=10, alpha=0.5)`."""
        options = {name: value for name, value in vars(self).items() if name != "needs" and not name.startswith("_")}
        plain = {name: value for name, value in options.items() if isinstance(value, bool | int | float | str)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"

    def without_labels(self) -> Partitioner | None:
        """Return the partitioner that takes the place of this one where samples have no labels.

        Returns:
            One that divides by size alone, or `None` if there is none, as here.
        """
        return None

    @abstractmethod
    def plan(self, labels: Any, generator: torch.Generator) -> Plan:
        """Fix every client's share of every class.

        Args:
            labels: What `needs` names, shape `(samples,)`, or the number of samples if nothing is needed.
            generator: The only source of randomness.

        Raises:
            ValueError: If these samples cannot be divided like this. The message says why and the way out.
        """

    def _tally(self, labels: Any, num_clients: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the classes in `labels` and their counts `(C,)`; one class of all samples if no labels are needed."""
        name = type(self).__name__
        if isinstance(labels, int | np.integer):
            if self.needs != "nothing":
                raise ValueError(f"{name} divides samples by label, but got only their number ({labels}); pass labels.")
            classes, counts = None, np.array([int(labels)])
        else:
            array = as_labels(labels, name)
            if self.needs == "nothing":
                classes, counts = None, np.array([len(array)])
            else:
                classes, counts = np.unique(array, return_counts=True)
        if counts.sum() < num_clients:
            raise ValueError(
                f"{name} cannot give {num_clients} clients a sample each out of {counts.sum()}; "
                f"use num_clients <= {counts.sum()}."
            )
        return classes, counts


def cut(
    indices: Indices, fraction: float, generator: torch.Generator, labels: np.ndarray | None = None
) -> tuple[Indices, Indices]:
    """Cut a random part off one client's samples, stratified by label if labels are given.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedlightning.datamodules.plans import cut
        >>> labels = np.arange(2).repeat(10)
        >>> rest, part = cut(np.arange(20), 0.2, torch.Generator(), labels)
        >>> len(rest), labels[part]
        (16, array([0, 0, 1, 1]))
    """
    size = len(indices)
    amount = min(size - 1, max(1, round(fraction * size))) if fraction > 0 and size > 1 else 0
    shuffled = np.asarray(indices)[torch.randperm(size, generator=generator).numpy()]
    if amount and labels is not None:
        codes = np.unique(labels[shuffled], return_inverse=True)[1]
        quota = apportion(np.bincount(codes), amount)
        # A stable sort keeps the random order inside each class; the first `quota` of each class are cut off.
        order = np.argsort(codes, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(codes))[:-1]])
        rank = np.arange(size) - starts[codes[order]]
        chosen = np.zeros(size, dtype=bool)
        chosen[order] = rank < quota[codes[order]]
    else:
        chosen = np.arange(size) < amount
    return np.sort(shuffled[~chosen]).astype(np.int64), np.sort(shuffled[chosen]).astype(np.int64)


def as_labels(labels: Any, owner: str) -> np.ndarray:
    """Return `labels` as a one-dimensional numpy array.

    Example:
        >>> from fedlightning.datamodules.plans import as_labels
        >>> as_labels([0, 1, 1], owner="MyPartitioner")
        array([0, 1, 1])
    """
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"{owner} needs one label for each sample, an array of shape (n,); got shape {array.shape}.")
    return array


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """Return a numpy generator seeded by one draw from `generator` (Dirichlet draws need numpy's).

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.plans import numpy_generator
        >>> first, second = (numpy_generator(torch.Generator().manual_seed(0)).random() for _ in range(2))
        >>> first == second
        True
    """
    return np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator).item()))

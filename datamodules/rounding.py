"""Whole samples out of real-valued shares: apportionment, tables with exact margins, Sinkhorn-Knopp scaling."""

from __future__ import annotations

from collections import deque

import numpy as np


def apportion(weights: np.ndarray, total: int, minimum: int = 0) -> np.ndarray:
    """Split `total` into whole parts proportional to `weights` by largest remainder.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.rounding import apportion
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
        >>> from fedlightning.datamodules.rounding import round_table
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
        >>> from fedlightning.datamodules.rounding import sinkhorn
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

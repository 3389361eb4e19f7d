"""What a partition is: a plan that fixes each client's share of every class, applied to every split alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedlightning.datamodules.rounding import apportion, round_table
from fedlightning.datamodules.views import Indices


class Plan(ABC):
    """A partition that can be applied to any set of samples of the same task."""

    client_ids: list[str]

    @abstractmethod
    def split(self, labels: Any, generator: torch.Generator | None = None) -> list[Indices]:
        """Divide samples among the clients.

        Args:
            labels: one key for each sample, shape ``(n,)`` (labels; groups for a natural partition), or the number of
                samples where the plan needs no keys.
            generator: says which samples of a class go where; ``None`` keeps their order.

        Returns:
            One ascending int64 array for each client of :attr:`client_ids`; disjoint, together all of ``0..n-1``.
            A client may get none.
        """


@dataclass
class SharePlan(Plan):
    """Client ``i`` gets the share ``shares[i, c]`` of the samples of class ``classes[c]``.

    Shares are turned into whole samples by :func:`round_table`, so a planned table of whole counts is met exactly, and
    every client's size is within one sample of its share of any other split. A class that the plan has never seen is
    divided by client size. Without classes all samples count as one class.

    Attributes:
        client_ids: names of the N clients.
        classes: the C class values, ascending, or ``None`` for a plan without labels.
        shares: float64 of shape ``(N, C)``; every column sums to 1.
        sizes: float64 of shape ``(N,)``: each client's share of all samples.
    """

    client_ids: list[str]
    classes: np.ndarray | None
    shares: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of_counts(cls, counts: np.ndarray, classes: np.ndarray | None) -> SharePlan:
        """The plan of a table of samples, shape ``(N, C)`` (whole numbers or not), with no empty column."""
        counts = np.asarray(counts, dtype=np.float64)
        ids = [str(i) for i in range(len(counts))]
        return cls(ids, classes, counts / counts.sum(axis=0), counts.sum(axis=1) / counts.sum())

    def split(self, labels: Any, generator: torch.Generator | None = None) -> list[Indices]:
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
    """Divides the samples of one data set among clients: a pure function of its arguments, the keys and a generator.

    Attributes:
        needs: what :meth:`plan` must be given for each sample: ``"labels"``, ``"groups"`` or ``"nothing"`` (then the
            number of samples is enough).
    """

    needs: Literal["labels", "groups", "nothing"] = "labels"

    def describe(self) -> str:
        """The partitioner with its options, as in ``DirichletPartitioner(num_clients=10, alpha=0.5)``."""
        options = {name: value for name, value in vars(self).items() if name != "needs" and not name.startswith("_")}
        plain = {name: value for name, value in options.items() if isinstance(value, bool | int | float | str)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"

    @abstractmethod
    def plan(self, labels: Any, generator: torch.Generator) -> Plan:
        """Fix every client's share of every class.

        Args:
            labels: what :attr:`needs` names, shape ``(n,)``, or ``n`` itself where nothing is needed.
            generator: the only source of randomness.

        Raises:
            ValueError: these samples cannot be divided like this; the sentence says why and the way out.
        """

    def _tally(self, labels: Any, num_clients: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The classes in ``labels`` and their counts ``(C,)``; one class of all samples where no labels are needed."""
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
    """Cut a random part off one client's samples, stratified by label where labels are given.

    Args:
        indices: the client's samples, shape ``(n,)``.
        fraction: share to cut off, ``0 <= fraction < 1``; ``round(fraction * n)`` samples, but from two samples on at
            least one is cut off and at least one stays. A single sample stays.
        generator: says which.
        labels: the labels of *all* samples, indexed by ``indices``.

    Returns:
        ``(rest, part)``, both ascending.
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
    """``labels`` as a one-dimensional numpy array, or a ``ValueError`` that names ``owner``."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"{owner} needs one label for each sample, an array of shape (n,); got shape {array.shape}.")
    return array


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """A numpy generator seeded by one draw from ``generator`` (Dirichlet draws need numpy's)."""
    return np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator).item()))


def check_num_clients(owner: object, num_clients: int) -> int:
    """``num_clients`` if it is a whole number of at least 1, else a ``ValueError``."""
    if isinstance(num_clients, bool) or int(num_clients) != num_clients or num_clients < 1:
        raise ValueError(f"{type(owner).__name__} got num_clients={num_clients!r}; use a whole number of 1 or more.")
    return int(num_clients)


def check_alpha(owner: object, **values: float) -> None:
    """A ``ValueError`` for a Dirichlet concentration that is not positive and finite."""
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(
                f"{type(owner).__name__} got {name}={value!r}; a Dirichlet concentration must be positive and finite "
                "(0.1 is very skewed, 100 nearly even)."
            )


def check_fraction(owner: object, **values: float) -> None:
    """A ``ValueError`` for a fraction outside of ``[0, 1)``."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{type(owner).__name__} got {name}={value!r}; use a share of at least 0 and below 1.")

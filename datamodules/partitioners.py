"""Partitions without a Dirichlet draw: even, pathological, natural."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedlightning.datamodules.plans import Partitioner, Plan, SharePlan, as_labels, numpy_generator
from fedlightning.datamodules.views import Indices
from fedlightning.ranges import PositiveInt


class IIDPartitioner(Partitioner):
    """An even partition: every client draws from the same distribution.

    Args:
        num_clients: Number of clients.
        stratified: `True` deals every class evenly: counts per class and sizes of two clients differ by at most one.
            `False` cuts a random permutation into equal parts; labels are neither needed nor used. Data modules do the
            same, with a warning, where samples have no class labels.

    Raises:
        ValueError: If `num_clients` is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import IIDPartitioner, describe
        >>> labels = torch.arange(3).repeat(100)
        >>> generator = torch.Generator().manual_seed(0)
        >>> parts = IIDPartitioner(num_clients=3).plan(labels, generator).split(labels, generator)
        >>> describe(parts, labels).sizes
        array([100, 100, 100])
    """

    def __init__(self, num_clients: PositiveInt, stratified: bool = True) -> None:
        self.num_clients, self.stratified = int(num_clients), stratified
        self.needs = "labels" if stratified else "nothing"

    def without_labels(self) -> IIDPartitioner:
        return IIDPartitioner(self.num_clients, stratified=False)

    def plan(self, labels: Any, generator: torch.Generator) -> SharePlan:
        classes, counts = self._tally(labels, self.num_clients)
        return SharePlan.of_counts(np.tile(counts / self.num_clients, (self.num_clients, 1)), classes)


class PathologicalPartitioner(Partitioner):
    """A partition in which every client holds few classes.

    `scheme="classes"` (FedRep, Collins et al. 2021; FLIU): each client draws `k` distinct classes, and the samples of a
    class are divided evenly among its holders. Draws in which a class has no holder are repeated (at most 100 times,
    then classes held twice or more give way), so that no sample is lost. This needs `k * N >= C` for N clients and C
    classes.

    `scheme="shards"` (FedAvg, McMahan et al. 2017): samples sorted by label are cut into `k * N` shards of equal size,
    `k` random ones for each client. A shard can straddle classes, so a client can hold up to `2 k`.

    Args:
        num_clients: N, the number of clients.
        classes_per_client: k, classes or shards of each client.
        scheme: `"classes"` or `"shards"`.

    Raises:
        ValueError: If a value is out of its range; from `plan`, if these samples cannot be divided like this.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import PathologicalPartitioner
        >>> labels = torch.arange(10).repeat(30)
        >>> generator = torch.Generator().manual_seed(0)
        >>> parts = PathologicalPartitioner(num_clients=5, classes_per_client=2).plan(labels, generator).split(labels)
        >>> [len(labels[part].unique()) for part in parts]
        [2, 2, 2, 2, 2]
    """

    def __init__(
        self,
        num_clients: PositiveInt,
        classes_per_client: PositiveInt = 2,
        scheme: Literal["classes", "shards"] = "classes",
    ) -> None:
        self.num_clients = int(num_clients)
        self.classes_per_client, self.scheme = int(classes_per_client), scheme

    def plan(self, labels: Any, generator: torch.Generator) -> SharePlan:
        classes, counts = self._tally(labels, self.num_clients)
        rng = numpy_generator(generator)
        table = self._shards(counts, rng) if self.scheme == "shards" else self._classes(counts, rng)
        return SharePlan.of_counts(table, classes)

    def _classes(self, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        clients, classes_each, total = self.num_clients, self.classes_per_client, len(counts)
        if classes_each > total:
            raise ValueError(
                f"PathologicalPartitioner got classes_per_client={classes_each}, but the labels have {total} classes; "
                f"use classes_per_client <= {total}."
            )
        if classes_each * clients < total:
            raise ValueError(
                f"PathologicalPartitioner: {clients} clients of {classes_each} classes cannot hold all {total} classes and "
                f"samples would be lost; use classes_per_client >= {-(-total // clients)} or more clients."
            )
        for _ in range(100):
            holds = np.zeros((clients, total), dtype=bool)
            for row in holds:
                row[rng.choice(total, classes_each, replace=False)] = True
            if holds.any(axis=0).all():
                break
        for orphan in np.flatnonzero(~holds.any(axis=0)):
            # k * N >= C and an orphan: some class is held twice; its holder takes the orphan instead.
            spare = int(np.argmax(holds.sum(axis=0)))
            client = int(rng.choice(np.flatnonzero(holds[:, spare])))
            holds[client, spare], holds[client, orphan] = False, True
        crowded = holds.sum(axis=0) > counts
        if crowded.any():
            raise ValueError(
                f"PathologicalPartitioner: {crowded.sum()} classes have fewer samples than holders; use fewer clients "
                "or fewer classes_per_client."
            )
        return np.asarray(holds * (counts / holds.sum(axis=0)))

    def _shards(self, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        clients, shards = self.num_clients, self.num_clients * self.classes_per_client
        total = int(counts.sum())
        if total < shards:
            raise ValueError(
                f"PathologicalPartitioner cannot cut {total} samples into {clients} x {self.classes_per_client} "
                "shards; use fewer clients or shards."
            )
        pieces = np.array_split(np.repeat(np.arange(len(counts)), counts), shards)
        tallies = np.stack([np.bincount(piece, minlength=len(counts)) for piece in pieces])
        return np.asarray(tallies[rng.permutation(shards)].reshape(clients, -1, len(counts)).sum(axis=1))


@dataclass
class GroupPlan(Plan):
    """A plan by groups: client `client_ids[i]` gets every sample of group `groups[i]`.

    Attributes:
        client_ids: Names of the clients.
        groups: The group of each client.

    Example:
        >>> from fedlightning.datamodules import GroupPlan
        >>> GroupPlan(["a", "b"], ["a", "b"]).split(["b", "a", "b"])
        [array([1]), array([0, 2])]
    """

    client_ids: list[str]
    groups: list[Any]

    def split(self, labels: Any, generator: torch.Generator | None = None) -> list[Indices]:
        """Divide samples by their group; see `Plan.split`.

        Raises:
            ValueError: If a sample's group is not a client of the plan (no sample is dropped silently).
        """
        keys = as_labels(labels, "NaturalPartitioner")
        strange = sorted(set(keys.tolist()) - set(self.groups), key=str)
        if strange:
            raise ValueError(
                f"NaturalPartitioner: groups {strange[:5]} have no training samples and so are not clients; remove "
                "their samples from the other splits."
            )
        return [np.flatnonzero(keys == group).astype(np.int64) for group in self.groups]


class NaturalPartitioner(Partitioner):
    """One client for each group (hospital, user, scanner): no group is split and nothing is dropped.

    Client ids are the groups' names, in ascending order.

    Args:
        column: Where `Partitioned` finds each sample's group: an attribute of the dataset, or a key of its items if
            items are dictionaries.
        groups: The groups themselves, instead: an array `(samples,)` for the training dataset, a mapping from split to
            array, or a function `dataset -> array`.

    Example:
        >>> from fedlightning.datamodules import NaturalPartitioner
        >>> plan = NaturalPartitioner().plan(["Rome", "Oslo", "Rome"])
        >>> dict(zip(plan.client_ids, plan.split(["Rome", "Oslo", "Rome"])))
        {'Oslo': array([1]), 'Rome': array([0, 2])}
    """

    needs = "groups"

    def __init__(self, column: str = "groups", groups: Any | Callable[[Any], Any] | None = None) -> None:
        self.column, self.groups = column, groups

    def plan(self, labels: Any, generator: torch.Generator | None = None) -> GroupPlan:
        """Return the plan with one client for each group.

        Args:
            labels: The group of each sample, shape `(samples,)`.
            generator: Not used: the plan is not random.

        Raises:
            ValueError: If there are no samples, or only their number is given.
        """
        if isinstance(labels, int | np.integer):
            raise ValueError("NaturalPartitioner needs each sample's group, an array of shape (n,), not their number.")
        groups = np.unique(as_labels(labels, "NaturalPartitioner")).tolist()
        if not groups:
            raise ValueError("NaturalPartitioner got no samples; there is no group to make a client of.")
        return GroupPlan([str(group) for group in groups], groups)

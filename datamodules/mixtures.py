"""Clients whose data are mixtures of two or more groups: the partitions of FedSoft and PI-FL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader

from fedlightning.datamodules.arrays import ArrayFederatedDataModule, cut_off
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.plans import apportion, cut
from fedlightning.datamodules.views import ArrayDataset, IndexView, Indices, collate_rows
from fedlightning.ranges import Instance, Length, PositiveInt, checked, number_in
from fedlightning.seeding import generator

Classes = Annotated[list[int], Length(note="Lists of classes.")]
"""The classes of a group."""


class MixtureDataModule(IndexedFederatedDataModule):
    """Clients of equal size whose samples come from several groups in fixed shares.

    Ruan, Joe-Wong, "FedSoft", AAAI 2022 and Khan et al., "PI-FL", 2023. The groups are sets of classes, or the same classes
    seen in different orientations. Inside a group, classes are drawn evenly. As many samples are used as the shares allow;
    none is used twice, and some may be left over. Every group's test samples stay together as hold-out data of that group
    (:meth:`group_dataloader`), to score every centre on every group.

    Args:
        source: The samples, such as `DigitsDataModule()`. Its partitioner is not used; its batch size, `val_fraction`,
            public data, seed and limits are.
        num_clients: N.
        groups: `"rotation"`: the upper half of the samples (by chance) upright, the others turned by 90 degrees. Or a list
            of lists of classes.
        mixture: Share `a_i` of the first group in client i's data. `"10:90"`: 0.9 in the first half of the clients, 0.1
            in the second; `"30:70"` likewise; any two numbers. `"linear"`: `a_i = (i + 0.5) / N`. `"random"`: gaps of
            sorted uniform numbers, for any number of groups. `"disjoint"`: every client is in one group, the first clients in
            the first one; groups differ by one client at most. Or a table of shares, `(clients, groups)`.
        shift: The test data of a client have the shares in reverse order (`1 - a_i`).
        label_space: `"joint"`: every group has labels of its own. `"shared"`: the n-th class of every group has label n.

    Attributes:
        client_shares: Share of every group in every client's training data, float64 of shape `(clients, groups)`, in the
            order of `client_ids`; after `setup`.

    Raises:
        ValueError: If a value is out of its range; at `setup`, if a class is in two groups or in no data.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, MixtureDataModule
        >>> groups = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        >>> data = MixtureDataModule(DigitsDataModule(), 4, groups, mixture="10:90", label_space="joint")
        >>> data.setup()
        >>> counts = data.class_counts("0")
        >>> round(sum(counts[:5]) / sum(counts), 1)
        0.9
    """

    @checked
    def __init__(
        self,
        source: Annotated[ArrayFederatedDataModule, Instance("It mixes samples in memory.")],
        num_clients: PositiveInt = 10,
        groups: Literal["rotation"] | Annotated[list[Classes], Length(2)] = "rotation",
        mixture: str | list[list[float]] = "10:90",
        shift: bool = False,
        label_space: Literal["joint", "shared"] = "shared",
    ) -> None:
        super().__init__(
            source.batch_size,
            source.seed,
            source.num_workers,
            source.pin_memory,
            source.drop_last,
            public=source._public_given,
            public_labels=source._public_labels,
        )
        if source.group is not None or source.test_fraction is not None:
            raise ValueError(
                "MixtureDataModule got a source with group or test_fraction; it draws samples one by one from the "
                "official parts. Leave them out."
            )
        self.num_clients = int(num_clients)
        classes = [] if isinstance(groups, str) else [c for group in groups for c in group]
        if len(set(classes)) < len(classes):
            raise ValueError(f"MixtureDataModule got groups={groups!r}; no class may be in two groups.")
        self.source, self.groups, self.mixture = source, groups, mixture
        self.public_fraction = source.public_fraction
        self.shift, self.label_space = shift, label_space
        self.shares(np.random.default_rng(0))  # refuses mixtures that are none
        self._held_out: dict[tuple[int, str], IndexView] = {}
        self._planted: dict[str, int] = {}

    @property
    def underlying(self) -> ArrayFederatedDataModule:
        return self.source

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return 2 if isinstance(self.groups, str) else len(self.groups)

    def shares(self, rng: np.random.Generator) -> np.ndarray:
        """Return every client's share of every group, float64 of shape `(clients, groups)`; rows sum to 1.

        Args:
            rng: For random shares.

        Raises:
            ValueError: If the mixture has no such shares.
        """
        count, groups = self.num_clients, self.num_groups
        place = np.arange(count)
        if not isinstance(self.mixture, str):
            table = np.asarray(self.mixture, dtype=np.float64)
            if table.shape != (count, groups) or (table < 0).any() or not np.allclose(table.sum(1), 1):
                raise ValueError(
                    f"MixtureDataModule got a mixture of shape {table.shape}; give {count} rows (clients) of {groups} shares "
                    "(groups) that are 0 or more and sum to 1."
                )
            return table
        if self.mixture == "random":
            cuts = np.sort(rng.random((count, groups - 1)), axis=1)
            return np.diff(np.hstack([np.zeros((count, 1)), cuts, np.ones((count, 1))]), axis=1)
        if self.mixture == "disjoint":
            if count < groups:
                raise ValueError(
                    f"MixtureDataModule got {count} clients for {groups} groups; every group needs a client."
                )
            return np.eye(groups)[place * groups // count]
        if groups != 2:
            raise ValueError(
                f"MixtureDataModule got mixture={self.mixture!r} for {groups} groups; use 'random', 'disjoint' or a table."
            )
        if self.mixture == "linear":
            first = (place + 0.5) / count
        else:
            try:
                low, high = (number_in(part) for part in self.mixture.split(":"))
                small = low / (low + high)
            except (ValueError, ZeroDivisionError):
                raise ValueError(
                    f"MixtureDataModule got mixture={self.mixture!r}; use '10:90', '30:70', 'linear', 'random', "
                    "'disjoint' or a table."
                ) from None
            if not 0 <= small <= 1:
                raise ValueError(f"MixtureDataModule got mixture={self.mixture!r}; both parts must be 0 or more.")
            first = np.where(place < (count + 1) // 2, 1 - small, small)
        return np.stack([first, 1 - first], axis=1)

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator(self.seed, "mixture")).item()))
        shares = self.client_shares = self.shares(rng)
        splits = {}
        limits = {"train": self.source.max_train, "test": self.source.max_test}
        for name, part in zip(("train", "test"), self.source.load(), strict=True):
            dataset, members = self._grouped(self.source._some(part, limits[name], name), name)
            table = shares[:, ::-1] if self.shift and name == "test" else shares
            indices = self._deal(dataset.y.numpy(), members, table, generator(self.seed, "mixture", name))
            splits[name] = Split(dataset, indices, dataset.y.numpy())
            self._held_out |= {(group, name): IndexView(dataset, indices) for group, indices in enumerate(members)}
        ids = [str(number) for number in range(self.num_clients)]
        self._planted = {
            client: int(row.argmax()) for client, row in zip(ids, shares, strict=True) if (row == row.max()).sum() == 1
        }
        if self.source.val_fraction > 0:
            seed = self.seed if self.source.val_seed is None else self.source.val_seed
            splits["val"] = cut_off(splits["train"], ids, "val", self.source.val_fraction, seed)
        return ids, splits

    def _grouped(self, data: ArrayDataset, split: str) -> tuple[ArrayDataset, list[Indices]]:
        """Return the samples as the groups see them, and the indices of each group."""
        labels, x = data.y.clone(), data.x
        if isinstance(self.groups, str):
            if x.ndim < 3 or x.shape[-1] != x.shape[-2]:
                raise ValueError("MixtureDataModule turns square images; these samples are none. Use lists of classes.")
            rest, turned = cut(
                np.arange(len(labels)), 0.5, generator(self.seed, "mixture", "turned", split), labels.numpy()
            )
            members, x = [rest, turned], x.clone()
            x[turned] = torch.rot90(x[turned], 1, (-2, -1))
            if self.label_space == "joint":
                labels[turned] += int(data.y.max()) + 1
            return ArrayDataset(x, labels, data.transform), members
        missing = {c for group in self.groups for c in group} - set(labels.tolist())
        if missing:
            raise ValueError(f"MixtureDataModule got groups with class {min(missing)}, which no {split} sample has.")
        members = [np.flatnonzero(np.isin(labels.numpy(), group)) for group in self.groups]
        ranks = {
            c: rank if self.label_space == "shared" else c for group in self.groups for rank, c in enumerate(group)
        }
        for old in ranks:
            labels[data.y == old] = ranks[old]
        return ArrayDataset(x, labels, data.transform), members

    def _deal(
        self, labels: np.ndarray, members: Sequence[Indices], shares: np.ndarray, draw: torch.Generator
    ) -> list[Indices]:
        """Deal each group's samples to the clients, the classes of a group in turn."""
        # Half a sample of rounding for each client and group is left free.
        size = min(
            int((len(rows) - len(shares)) // total) for rows, total in zip(members, shares.sum(0), strict=True) if total
        )
        if size < 1:
            raise ValueError(
                f"MixtureDataModule cannot give {self.num_clients} clients a sample each; use fewer clients or more data."
            )
        counts = np.stack([apportion(row, size) for row in shares])
        parts: list[list[Indices]] = [[] for _ in shares]
        for group, rows in enumerate(members):
            shuffled = rows[torch.randperm(len(rows), generator=draw).numpy()]
            codes = np.unique(labels[shuffled], return_inverse=True)[1]
            order = np.argsort(codes, kind="stable")
            tally = np.bincount(codes)
            rank = np.empty(len(rows))
            rank[order] = (np.concatenate([np.arange(number) for number in tally]) + 0.5) / np.repeat(tally, tally)
            shuffled = shuffled[np.argsort(rank, kind="stable")]
            for part, piece in zip(parts, np.split(shuffled, np.cumsum(counts[:, group])), strict=False):
                part.append(piece)
        return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]

    def group_dataloader(self, group: int, split: str = "test") -> DataLoader[Any]:
        """Return a loader of all samples of one group, whoever has them.

        Args:
            group: Number of the group, from 0.
            split: `"test"`: hold-out data; `"train"`: with the samples that are used for validation.

        Raises:
            ValueError: If there is no such group.
        """
        self.setup()
        if (group, split) not in self._held_out:
            raise ValueError(f"There is no group {group} of split {split!r}; there are {self.num_groups} groups.")
        view = self._held_out[group, split]
        return DataLoader(
            view, self.batch_size, collate_fn=collate_rows, generator=generator(self.seed, "workers", str(group), split)
        )

    @property
    def planted_groups(self) -> dict[str, int]:
        """The group that most of a client's training samples come from; clients with two such groups have none."""
        self.setup()
        return {client: self._planted[client] for client in self.client_ids if client in self._planted}

    @property
    def partition_name(self) -> str:
        mixture = self.mixture if isinstance(self.mixture, str) else "table"
        kind = self.groups if isinstance(self.groups, str) else f"{self.num_groups} groups of classes"
        return (
            f"mixtures of {kind} ({mixture}{', shifted test data' if self.shift else ''}, {self.num_clients} clients)"
        )

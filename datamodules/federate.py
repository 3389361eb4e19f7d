"""From datasets, keys and a partitioner to every client's train, validation and test samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.groups import codes_of, cut_groups, keys_of_groups, refuse_shared, rows_of_groups
from fedlightning.datamodules.indexed import Split
from fedlightning.datamodules.labels import read_keys
from fedlightning.datamodules.partition import Partitioner
from fedlightning.datamodules.views import Indices
from fedlightning.seeding import generator


def suited(partitioner: Partitioner, labels: Mapping[str, np.ndarray | None], owner: str) -> Partitioner:
    """Return a partitioner that can divide samples with or without class labels.

    Example:
        >>> from fedlightning.datamodules import DirichletPartitioner
        >>> from fedlightning.datamodules.federate import suited
        >>> suited(DirichletPartitioner(3, 0.5), {"train": None}, "Prices")
        Traceback (most recent call last):
        ValueError: DirichletPartitioner divides samples by label, and the train data of Prices have no class labels...
    """
    lacking = next((split for split, found in labels.items() if found is None), None)
    if partitioner.needs != "labels" or lacking is None:
        return partitioner
    name, other = type(partitioner).__name__, partitioner.without_labels()
    if other is None:
        raise ValueError(
            f"{name} divides samples by label, and the {lacking} data of {owner} have no class labels (none were found, "
            "or the targets are continuous); pass labels=... to Partitioned (an array, or a function dataset -> array), "
            "or divide by something else: IIDPartitioner, QuantitySkewPartitioner or NaturalPartitioner."
        )
    rank_zero_warn(
        f"The {lacking} data of {owner} have no class labels, so {name} cuts them at random instead of class by class. "
        f"{name}(stratified=False) does so without this warning.",
        category=UserWarning,
    )
    return other


def some_rows(size: int, limit: int | None, seed: int, split: str) -> Tensor | None:
    """Return the rows to use of a dataset, at random; `None` if all are used."""
    if limit is None or limit >= size:
        return None
    return torch.randperm(size, generator=generator(seed, "subset", split))[:limit]


def given_groups(owner: object, partitioner: Partitioner, split: str, dataset: Any) -> np.ndarray:
    """Return each sample's group as `NaturalPartitioner(groups=...)` gives it."""
    given = getattr(partitioner, "groups", None)
    if given is not None and (found := read_keys(dataset, split, given)) is not None:
        return found
    raise ValueError(
        f"{type(owner).__name__} has no natural groups; use a partitioner that divides by label or by size, such as "
        "DirichletPartitioner."
    )


def keys_for(
    partitioner: Partitioner,
    datasets: Mapping[str, Any],
    labels: Mapping[str, np.ndarray | None],
    groups: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """Return what a partitioner divides each dataset by: labels, groups, the number of samples, or the samples."""
    if partitioner.needs == "samples":
        return dict(datasets)
    if partitioner.needs == "groups":
        return {split: groups(split, data) for split, data in datasets.items()}
    if partitioner.needs == "labels":
        return dict(labels)
    return {split: len(data) for split, data in datasets.items()}


def federate(
    partitioner: Partitioner,
    datasets: dict[str, Dataset[Any]],
    labels: dict[str, np.ndarray | None],
    keys: dict[str, Any],
    seed: int,
    val_fraction: float = 0.2,
    test_fraction: float = 0.2,
    val_seed: int | None = None,
    groups: Mapping[str, Any] | None = None,
) -> tuple[list[str], dict[str, Split]]:
    """Divide datasets among clients by one plan.

    The plan is made on the training data and applied to every other split, so that a client's validation and test
    samples are mixed like its training samples. A split without a dataset is cut from each client's training samples,
    stratified by label: the test part first, then `val_fraction` of what is left.

    With `groups`, each sample's group by split, whole groups are divided and cut: a group (a patient) has the label that
    most of its samples have, and sizes are numbers of groups.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules import IIDPartitioner
        >>> from fedlightning.datamodules.federate import federate
        >>> labels = {"train": np.arange(3).repeat(10)}
        >>> ids, splits = federate(IIDPartitioner(3), {"train": range(30)}, labels, labels, seed=0)
        >>> ids, {name: [len(held) for held in split.indices] for name, split in splits.items()}
        (['0', '1', '2'], {'train': [6, 6, 6], 'test': [2, 2, 2], 'val': [2, 2, 2]})
    """
    codes: dict[str, np.ndarray] = {}
    if groups is not None:
        refuse_shared(groups)
        codes = {name: codes_of(groups[name], len(cast(Sized, data)), name) for name, data in datasets.items()}
        keys = {name: keys_of_groups(keys[name], groups[name], partitioner.needs) for name in datasets}
    plan = partitioner.plan(keys["train"], generator(seed, "partition", "plan"))
    indices: dict[str, list[Indices]] = {
        name: plan.split(keys[name], generator(seed, "partition", name)) for name in datasets
    }
    if groups is not None:
        indices = {name: rows_of_groups(parts, codes[name]) for name, parts in indices.items()}
    splits = {name: Split(datasets[name], indices[name], labels[name], groups=codes.get(name)) for name in datasets}
    seeds = {"test": seed, "val": seed if val_seed is None else val_seed}
    for name, fraction in (("test", test_fraction), ("val", val_fraction)):
        if name not in datasets and fraction > 0:
            splits[name] = cut_off(splits["train"], plan.client_ids, name, fraction, seeds[name])
    return list(plan.client_ids), splits


def cut_off(train: Split, clients: Sequence[str], name: str, fraction: float, seed: int) -> Split:
    """Take a share of every client's training samples out of the training split, and return it as a split of its own."""
    pairs = [
        cut_groups(np.asarray(held), fraction, generator(seed, "partition", name, client), train.labels, train.groups)
        for client, held in zip(clients, train.indices, strict=True)
    ]
    train.indices = [rest for rest, _ in pairs]
    return Split(train.dataset, [part for _, part in pairs], train.labels, groups=train.groups)

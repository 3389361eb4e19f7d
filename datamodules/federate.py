"""From datasets, keys and a partitioner to every client's train, validation and test samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from fedlightning.datamodules.base import Split
from fedlightning.datamodules.partition import Partitioner, cut
from fedlightning.datamodules.views import Indices
from fedlightning.seeding import generator


def federate(
    partitioner: Partitioner,
    datasets: dict[str, Dataset[Any]],
    labels: dict[str, np.ndarray | None],
    keys: dict[str, Any],
    seed: int,
    val_fraction: float = 0.2,
    test_fraction: float = 0.2,
    val_seed: int | None = None,
) -> tuple[list[str], dict[str, Split]]:
    """Divide datasets among clients by one plan.

    The plan is made on the training data and applied to every other split, so that a client's validation and test
    samples are mixed like its training samples. A split without a dataset is cut from each client's training samples,
    stratified by label: the test part first, then ``val_fraction`` of what is left.

    Args:
        partitioner: makes the plan.
        datasets: ``"train"``, perhaps ``"val"`` and ``"test"``.
        labels: the classes of each dataset, int64 ``(n,)``, or ``None``.
        keys: what the partitioner divides by, for each dataset: labels, groups, or the number of samples.
        seed: every random choice has its own address under it.
        val_fraction: share cut off for validation where there is no such dataset; 0 leaves the split out.
        test_fraction: share cut off for testing, likewise.
        val_seed: seed of the validation cut alone; ``None``: ``seed``.

    Returns:
        The client ids and a :class:`Split` for each split.
    """
    plan = partitioner.plan(keys["train"], generator(seed, "partition", "plan"))
    indices: dict[str, list[Indices]] = {
        name: plan.split(keys[name], generator(seed, "partition", name)) for name in datasets
    }
    splits = {name: Split(datasets[name], indices[name], labels[name]) for name in datasets}
    seeds = {"test": seed, "val": seed if val_seed is None else val_seed}
    for name, fraction in (("test", test_fraction), ("val", val_fraction)):
        if name in datasets or fraction == 0:
            continue
        pairs = [
            cut(part, fraction, generator(seeds[name], "partition", name, client), labels["train"])
            for client, part in zip(plan.client_ids, splits["train"].indices, strict=True)
        ]
        splits["train"].indices = [rest for rest, _ in pairs]
        splits[name] = Split(datasets["train"], [part for _, part in pairs], labels["train"])
    return list(plan.client_ids), splits

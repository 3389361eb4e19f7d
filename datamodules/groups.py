"""Patients, speakers, lesions: samples of one group, which no split and no two clients share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedlightning.datamodules.partition import cut
from fedlightning.datamodules.views import Indices

_IDENTIFIER = re.compile(
    r"(^|.*[_ .-])(pid|mrn|uid|id|patient|subject|participant|person|case|record|user|speaker|lesion)"
    r"([_ .-]?(id|no|nr|num|number|code|name))?$",
    re.IGNORECASE,
)


def codes_of(groups: Any, size: int, split: str) -> np.ndarray:
    """Return the number of each sample's group, 0, 1, ..., from what names it.

    Example:
        >>> from fedlightning.datamodules.groups import codes_of
        >>> codes_of(["p7", "p2", "p7"], size=3, split="train")
        array([1, 0, 1])
    """
    names = np.asarray(groups)
    if names.shape != (size,):
        raise ValueError(
            f"The groups given for the {split} data have shape {names.shape} for {size} samples; give one for each sample."
        )
    missing = next((place for place, name in enumerate(names.tolist()) if name in (None, "") or name != name), None)
    if missing is not None:  # all of these as one group would be different people that are taken for one
        raise ValueError(
            f"Sample {missing + 1} of the {split} data has no group ({names[missing]}). Fill it in, or remove the sample; if "
            "it stands alone, give it a group of its own."
        )
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def refuse_shared(groups: Mapping[str, Any]) -> None:
    """Refuse groups that have samples in two given splits.

    Example:
        >>> from fedlightning.datamodules.groups import refuse_shared
        >>> refuse_shared({"train": ["p1", "p2"], "test": ["p2"]})
        Traceback (most recent call last):
        ValueError: 1 groups have samples in both the train and the test data, such as 'p2'; ...
    """
    names = list(groups)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            both = sorted(set(np.asarray(groups[one]).tolist()) & set(np.asarray(groups[other]).tolist()), key=str)
            if both:
                raise ValueError(
                    f"{len(both)} groups have samples in both the {one} and the {other} data, such as {both[0]!r}; a "
                    "score on them would be too good. Move all samples of a group to one of the two."
                )


def keys_of_groups(keys: Any, names: Any, needs: str) -> Any:
    """Return what a partitioner divides groups by, from the keys of samples: one key for each group, in order.

    Args:
        keys: Labels, natural groups, or the number of samples.
        names: Each sample's group.
        needs: What the partitioner needs: `"labels"`, `"groups"` or `"nothing"`.

    Raises:
        ValueError: If a group has samples at two clients of a natural partition.

    Example:
        >>> from fedlightning.datamodules.groups import keys_of_groups
        >>> keys_of_groups([0, 0, 1, 1], ["p1", "p1", "p1", "p2"], "labels")
        array([0, 1])
    """
    found, first, codes = np.unique(np.asarray(names), return_index=True, return_inverse=True)
    if needs == "samples":
        raise ValueError(
            "A partitioner that divides by inputs cannot keep groups together; use another one, or no group."
        )
    if needs == "nothing":
        return len(found)
    array = np.asarray(keys)
    if needs == "labels":
        return _most_frequent(array, codes, len(found))
    elsewhere = np.flatnonzero(array != array[first][codes])
    if len(elsewhere):
        group = codes[elsewhere[0]]
        raise ValueError(
            f"Group {found[group].item()!r} has samples at client {array[first[group]].item()!r} and at "
            f"{array[elsewhere[0]].item()!r} (sample {elsewhere[0] + 1}); a model trained at one would be tested on the same "
            "person at the other. Move them to one client, or correct the names if these are different people."
        )
    return array[first]


def rows_of_groups(parts: list[Indices], codes: np.ndarray) -> list[Indices]:
    """Return the samples of each client from its groups.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.groups import rows_of_groups
        >>> rows_of_groups([np.array([1]), np.array([0])], codes=np.array([0, 1, 1]))
        [array([1, 2]), array([0])]
    """
    holder = np.zeros(int(codes.max(initial=-1)) + 1, dtype=np.int64) - 1
    for client, held in enumerate(parts):
        holder[held] = client
    return [np.flatnonzero(holder[codes] == client).astype(np.int64) for client in range(len(parts))]


def cut_groups(
    indices: Indices,
    fraction: float,
    generator: torch.Generator,
    labels: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> tuple[Indices, Indices]:
    """Cut a random part off one client's samples, as `cut`; with groups, a part of the client's groups with all "
    "their samples.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedlightning.datamodules.groups import cut_groups
        >>> patients = np.arange(10).repeat(3)
        >>> rest, part = cut_groups(np.arange(30), 0.2, torch.Generator(), groups=patients)
        >>> len(rest), set(patients[rest]) & set(patients[part])
        (24, set())
    """
    if groups is None:
        return cut(indices, fraction, generator, labels)
    held = np.asarray(indices, dtype=np.int64)
    found, codes = np.unique(groups[held], return_inverse=True)
    frequent = None if labels is None else _most_frequent(labels[held], codes, len(found))
    _, part = cut(np.arange(len(found)), fraction, generator, frequent)
    chosen = np.isin(codes, part)
    return np.sort(held[~chosen]), np.sort(held[chosen])


def looks_like_identifier(name: str, cells: list[str]) -> bool:
    """Return True if a column has a name of identifiers, and its values repeat.

    Example:
        >>> from fedlightning.datamodules.groups import looks_like_identifier
        >>> looks_like_identifier("patient_id", ["7", "7", "9"]), looks_like_identifier("age", ["7", "7", "9"])
        (True, False)
    """
    known = [cell for cell in cells if cell]
    return _IDENTIFIER.fullmatch(name.strip()) is not None and 1 < len(set(known)) < len(known)


def _most_frequent(labels: np.ndarray, codes: np.ndarray, size: int) -> np.ndarray:
    """Return the most frequent label of each group, the smallest of those that tie."""
    values, places = np.unique(labels, return_inverse=True)
    table = np.zeros((size, len(values)), dtype=np.int64)
    np.add.at(table, (codes, places), 1)
    return np.asarray(values[table.argmax(axis=1)])

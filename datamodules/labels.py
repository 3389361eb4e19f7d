"""Find the labels (or groups) of somebody else's dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fedlightning.datamodules.csv_tables import code_of
from fedlightning.datamodules.views import ArrayDataset, IndexView
from fedlightning.errors import listed

_ATTRIBUTES = ("targets", "labels")
LABEL_KEYS = ("label", "labels", "y", "target", "targets")
SLIP_SAMPLES = 20
"""Samples from which a class with one of them may be a slip."""
MOST_FLOAT_CLASSES = 100
"""Float targets with more different values than this are measurements, even if all of them are whole numbers."""


def read_keys(dataset: Any, split: str, source: Any = None, walk: bool = True) -> np.ndarray | None:
    """Return one key (a class label or a group) for each sample of a map-style dataset.

    Float targets are classes if they are whole numbers and have at most `MOST_FLOAT_CLASSES` different values;
    otherwise they are continuous, and no labels.

    Tried in this order: `source`; the attributes `targets` and `labels`; the last tensor of a `TensorDataset`; each of
    these through `Subset` and `ConcatDataset`; and, if `walk`, one pass over the samples, taking `sample[-1]` of a
    tuple or the item `label`, `labels`, `y`, `target` or `targets` of a dictionary.

    Example:
        >>> from fedlightning.datamodules.labels import read_keys
        >>> read_keys([("a.png", 0), ("b.png", 2)], split="train")
        array([0, 2])
        >>> read_keys([{"path": "a.png", "site": "Rome"}], split="train", source="site")
        array(['Rome'], dtype='<U4')
    """
    if source is False:
        return None
    if isinstance(source, Mapping):
        if split not in source:
            raise ValueError(f"The labels given have no entry for the {split} data; give one under {split!r}.")
        source = source[split]
    if isinstance(source, str):
        keys = _find_keys(dataset, (source,))
        if keys is None:
            keys = _walk(dataset, (source,), positional=False)
        if keys is None:
            raise ValueError(
                f"The {split} data has no attribute {source!r} with one value for each sample, and its samples are no "
                f"dictionaries with that key; name another one, or pass the values themselves."
            )
        return keys
    if source is not None:
        keys = as_classes(source(dataset) if callable(source) else source)
        if keys is None or len(keys) != len(dataset):
            shape = "no array" if keys is None else f"{len(keys)} values"
            raise ValueError(
                f"The labels given for the {split} data are {shape} for {len(dataset)} samples; give one for each "
                "sample, and with several splits a mapping {'train': ..., 'test': ...} or a function dataset -> array."
            )
        return keys
    keys = _find_keys(dataset, _ATTRIBUTES)
    return _walk(dataset, LABEL_KEYS, positional=True) if keys is None and walk else keys


def as_classes(values: Any) -> np.ndarray | None:
    """Return whole numbers, truth values or strings of shape `(n,)` or `(n, 1)` as an array, else `None`.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.labels import as_classes
        >>> as_classes(torch.tensor([[1.0], [0.0]])), as_classes(torch.tensor([0.5, 1.0]))
        (array([1, 0]), None)
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        return None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iubfUS":
        return None
    if array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):  # NaN
            whole = array.astype(np.int64)
        return whole if (whole == array).all() and len(np.unique(whole)) <= MOST_FLOAT_CLASSES else None
    return array.astype(np.int64) if array.dtype.kind in "iub" else array


def check_classes(values: np.ndarray, where: str, way: str) -> None:
    """Refuse labels of which one says that there is none, and ask about one that a slip may have made.

    Args:
        values: The class of each sample, as it was given.
        where: Whose classes they are, for the messages.
        way: How classes are named, as the end of a sentence.

    Raises:
        ValueError: If -1 or -100, which stand for no label in many data sets, is the only class below 0 of three or more.

    Example:
        >>> import numpy as np
        >>> check_classes(np.array([-1, 0, 1]), "a.csv", "number them from 0")
        Traceback (most recent call last):
        ValueError: a.csv: 1 of 3 labels are -1, by which many data sets say that there is none. Leave such samples out; ...
    """
    names, counts = np.unique(values, return_counts=True)
    if values.dtype.kind in "if" and len(names) > 2 and names[0] in (-1, -100) and names[1] >= 0:
        raise ValueError(
            f"{where}: {counts[0]} of {len(values)} labels are {names[0]:g}, by which many data sets say that there is none. "
            f"Leave such samples out; if it is a class, {way}."
        )
    ask_about_spelling(names, where)
    ask_about_one(values, "class", where, f"; to have no other classes than yours, {way}")


def refuse_other_folders(root: object, folders: Iterable[str], classes: Sequence[str]) -> None:
    """Refuse folders that are not among the classes that were named.

    Example:
        >>> refuse_other_folders("data", ["ham", "eggs"], ["ham", "spam"])
        Traceback (most recent call last):
        ValueError: data: there are folders eggs, and class_names has ['ham', 'spam'].
    """
    if other := [name for name in folders if name not in classes]:
        raise ValueError(f"{root}: there are folders {listed(other)}, and class_names has {list(classes)}.")


def ask_about_spelling(names: Iterable[Any], where: str) -> None:
    """Warn of two names that differ in capitals, spaces or the zeros behind a point alone.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always")
        ...     ask_about_spelling(["Rome", "Oslo", "rome "], "a.csv, column 'hospital'")
        >>> str(found[0].message)
        "a.csv, column 'hospital': 'Rome' and 'rome ' differ in spelling alone. If they are one, write them as one."
    """
    seen: dict[str, str] = {}
    for name in dict.fromkeys(map(str, names)):
        other = seen.setdefault(code_of(" ".join(name.split())).casefold(), name)
        if other != name:
            rank_zero_warn(
                f"{where}: {other!r} and {name!r} differ in spelling alone. If they are one, write them as one.",
                category=UserWarning,
            )
            return


def ask_about_one(values: np.ndarray, what: str, where: str, way: str = "") -> None:
    """Warn of a class or client that one of many samples has."""
    names, counts = np.unique(values, return_counts=True)
    alone = names[counts == 1].tolist()
    if alone and len(values) >= SLIP_SAMPLES:
        more = f", and so have {len(alone) - 1} more" if alone[1:] else ""
        rank_zero_warn(
            f"{where}: {what} {alone[0]!r} has one of {len(values)} samples{more}. If that is a slip, correct it{way}.",
            category=UserWarning,
        )


def _find_keys(dataset: Any, attributes: tuple[str, ...]) -> np.ndarray | None:
    """Return keys that the dataset has as an attribute or tensor."""
    if isinstance(dataset, Subset | IndexView):
        inner = _find_keys(dataset.dataset, attributes)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_find_keys(part, attributes) for part in dataset.datasets]
        arrays = [part for part in parts if part is not None]
        return np.concatenate(arrays) if arrays and len(arrays) == len(parts) else None
    for name in attributes:
        value = getattr(dataset, name, None)
        if value is None or callable(value):
            continue
        array = as_classes(value)
        if array is not None and len(array) == len(dataset):
            return array
    if attributes is _ATTRIBUTES and isinstance(dataset, TensorDataset | ArrayDataset):
        return as_classes(dataset.tensors[-1] if isinstance(dataset, TensorDataset) else dataset.y)
    return None


def _walk(dataset: Any, keys: tuple[str, ...], positional: bool) -> np.ndarray | None:
    """Return keys by reading every sample."""
    values = []
    for index in range(len(dataset)):
        sample = dataset[index]
        if isinstance(sample, Mapping):
            key = next((key for key in keys if key in sample), None)
            if key is None:
                return None
            value = sample[key]
        elif positional and isinstance(sample, tuple | list) and len(sample) > 1:
            value = sample[-1]
        else:
            return None
        if isinstance(value, torch.Tensor | np.ndarray):
            if value.size != 1 if isinstance(value, np.ndarray) else value.numel() != 1:
                return None
            value = value.item()
        values.append(value)
    return as_classes(values)


def encode(keys: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray | None]:
    """Return the labels of all splits as classes 0, 1, ...

    Whole numbers from 0 on stay as they are. Others are replaced by their rank among all labels.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.labels import encode
        >>> encode({"train": np.array(["dog", "cat", "dog"])})
        {'train': array([1, 0, 1])}
    """
    arrays = [array for array in keys.values() if array is not None]
    if not arrays:
        return dict(keys)
    if all(array.dtype.kind == "i" and (not len(array) or array.min() >= 0) for array in arrays):
        return dict(keys)
    values = np.unique(np.concatenate(arrays))
    return {split: None if array is None else np.searchsorted(values, array) for split, array in keys.items()}

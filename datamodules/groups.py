"""Patients, speakers, lesions: samples of one group, which no split and no two clients share.

Samples that two data sets share, bit for bit in what a model reads.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.plans import cut
from fedlightning.datamodules.public import without_labels
from fedlightning.datamodules.sampling import preserve_generators
from fedlightning.datamodules.views import IndexView, Indices, rows_of, samples_at
from fedlightning.seeding import isolated

MOST_READ = 20_000
"""Samples up to which data that are not tensors in memory are read for the comparison."""
AT_ONCE = 512


def is_cheap(dataset: Any, count: int) -> bool:
    """Return True if so many samples of a dataset may be read to compare them.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.groups import is_cheap
        >>> is_cheap(TensorDataset(torch.zeros(3)), 10**6), is_cheap([1, 2], 10**6)
        (True, False)
    """
    return count <= MOST_READ or rows_of(dataset) is not None


def digests(dataset: Any, positions: np.ndarray, collate: Callable[[Any], Any]) -> list[bytes] | None:
    """Return a hash of the inputs of each sample, without labels; `None` if they are not tensors.

    Example:
        >>> import numpy as np, torch
        >>> from torch.utils.data import TensorDataset, default_collate
        >>> from fedlightning.datamodules.groups import digests
        >>> data = TensorDataset(torch.tensor([[1.0], [2.0], [1.0]]), torch.arange(3))
        >>> one, other, third = digests(data, np.arange(3), default_collate)
        >>> one == third, one == other
        (True, False)
    """
    view, hashes = IndexView(dataset, positions), list[bytes]()
    with isolated("overlap"), preserve_generators(dataset):
        for size, batch in _batches(view, collate):
            rows = _rows(without_labels(batch), size)
            if rows is None:
                return None
            hashes += rows
    return hashes


def _batches(view: IndexView, collate: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Yield all samples in batches, with their number."""
    for start in range(0, len(view), AT_ONCE):
        places = range(start, min(start + AT_ONCE, len(view)))
        yield len(places), collate(samples_at(view, places))


def _rows(inputs: Any, size: int) -> list[bytes] | None:
    """Return a hash of each row of a batch's inputs."""
    parts = [inputs[key] for key in sorted(inputs, key=str)] if isinstance(inputs, Mapping) else [inputs]
    if not parts or not all(isinstance(part, Tensor) and part.ndim and len(part) == size for part in parts):
        return None
    tables = [part.detach().cpu().contiguous().reshape(size, -1).view(torch.uint8).numpy() for part in parts]
    kinds = repr([(part.dtype, tuple(part.shape[1:])) for part in parts]).encode()
    return [hashlib.blake2b(kinds + b"".join(table[row].tobytes() for table in tables), digest_size=16).digest()
            for row in range(size)]  # fmt: skip


def content_hash(dataset: Any, collate: Callable[[Any], Any]) -> str | None:
    """Return a short hash of what a dataset holds; `None` if that is not tensors, or different at every look.

    Data in memory are read whole, others at 64 positions spread over them.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset, default_collate
        >>> from fedlightning.datamodules.groups import content_hash
        >>> one, other = (content_hash(TensorDataset(torch.full((9, 2), x)), default_collate) for x in (0.0, 1.0))
        >>> one == other
        False
    """
    size = len(dataset)
    whole = rows_of(dataset) is not None
    positions = np.arange(size) if whole or size <= 64 else np.linspace(0, size - 1, 64).astype(np.int64)
    looks = [_content(dataset, positions, collate) for _ in range(1 if whole else 2)]
    return looks[0] if all(look == looks[0] for look in looks) else None


def hash_samples(dataset: Any) -> str | None:
    """Return a short hash of 16 values of 4 samples of data in memory, to tell other data; `None` if they are elsewhere.

    Fractions count to a sixteenth of the largest of them, so that the last bits, which may differ from one machine to
    another where data are standardised, do not count.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.groups import hash_samples
        >>> x = torch.linspace(0.1, 0.9, 12).reshape(6, 2)
        >>> one, other, third = (hash_samples(TensorDataset(data)) for data in (x, x * (1 + 1e-6), x + 1.0))
        >>> one == other, one == third
        (True, False)
    """
    if rows_of(dataset) is None or not len(dataset):
        return None
    digest, size = hashlib.sha256(), len(dataset)
    for place in np.linspace(0, size - 1, min(4, size)).astype(np.int64).tolist():
        for part in _tensors(dataset[place]):
            flat = part.detach().cpu().reshape(-1)
            some = flat[torch.linspace(0, max(len(flat) - 1, 0), min(16, len(flat))).long()]
            digest.update(repr((str(part.dtype), tuple(part.shape), _coarse(some))).encode())
    return digest.hexdigest()[:12]


def _coarse(some: Tensor) -> list[int]:
    """Return values as integers: fractions in steps of about a sixteenth of the largest, whose exponent comes first."""
    if not some.is_floating_point():
        return [int(value) for value in some.tolist()] if not some.is_complex() else []
    numbers = torch.nan_to_num(some.double(), nan=-7.7, posinf=7.7, neginf=-7.7)
    exponent = math.frexp(1.37 * float(numbers.abs().max()))[1] if len(numbers) else 0
    return [exponent, *torch.round(numbers * 15.7 / 2.0**exponent).long().tolist()]


def _content(dataset: Any, positions: np.ndarray, collate: Callable[[Any], Any]) -> str | None:
    view, digest = IndexView(dataset, positions), hashlib.sha256(str(len(dataset)).encode())
    with isolated("content"), preserve_generators(dataset):
        for _, batch in _batches(view, collate):
            tensors = list(_tensors(batch))
            if not tensors:
                return None
            for part in tensors:
                digest.update(repr((part.dtype, tuple(part.shape))).encode())
                digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


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
    for place, split in enumerate(names):
        for other in names[place + 1 :]:
            both = sorted(set(np.asarray(groups[split]).tolist()) & set(np.asarray(groups[other]).tolist()), key=str)
            if both:
                raise ValueError(
                    f"{len(both)} groups have samples in both the {split} and the {other} data, such as {both[0]!r}; a "
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
    unique_names, first, codes = np.unique(np.asarray(names), return_index=True, return_inverse=True)
    if needs == "samples":
        raise ValueError(
            "A partitioner that divides by inputs cannot keep groups together; use another one, or no group."
        )
    if needs == "nothing":
        return len(unique_names)
    array = np.asarray(keys)
    if needs == "labels":
        return _most_frequent(array, codes, len(unique_names))
    elsewhere = np.flatnonzero(array != array[first][codes])
    if len(elsewhere):
        group = codes[elsewhere[0]]
        raise ValueError(
            f"Group {unique_names[group].item()!r} has samples at client {array[first[group]].item()!r} and at "
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
    for client, group_codes in enumerate(parts):
        holder[group_codes] = client
    return [np.flatnonzero(holder[codes] == client).astype(np.int64) for client in range(len(parts))]


def cut_groups(
    indices: Indices,
    fraction: float,
    generator: torch.Generator,
    labels: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> tuple[Indices, Indices]:
    """Cut a random part off one client's samples, as `cut`; with groups, a part of the client's groups with all
    their samples.

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
    rows = np.asarray(indices, dtype=np.int64)
    unique_groups, codes = np.unique(groups[rows], return_inverse=True)
    frequent = None if labels is None else _most_frequent(labels[rows], codes, len(unique_groups))
    _, part = cut(np.arange(len(unique_groups)), fraction, generator, frequent)
    chosen = np.isin(codes, part)
    return np.sort(rows[~chosen]), np.sort(rows[chosen])


def looks_like_identifier(name: str, cells: list[str]) -> bool:
    """Return True if a column has a name of identifiers, and its values repeat.

    Example:
        >>> from fedlightning.datamodules.groups import looks_like_identifier
        >>> looks_like_identifier("patient_id", ["7", "7", "9"]), looks_like_identifier("age", ["7", "7", "9"])
        (True, False)
    """
    filled = [cell for cell in cells if cell]
    return _IDENTIFIER.fullmatch(name.strip()) is not None and 1 < len(set(filled)) < len(filled)


def _most_frequent(labels: np.ndarray, codes: np.ndarray, size: int) -> np.ndarray:
    """Return the most frequent label of each group, the smallest of those that tie."""
    values, places = np.unique(labels, return_inverse=True)
    table = np.zeros((size, len(values)), dtype=np.int64)
    np.add.at(table, (codes, places), 1)
    return np.asarray(values[table.argmax(axis=1)])

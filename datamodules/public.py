"""Public data: loaders of chosen samples, in order or in an addressed one, alone or with targets for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedlightning.datamodules.labels import LABEL_KEYS
from fedlightning.datamodules.sampling import AddressedSampler, gives_batches
from fedlightning.datamodules.views import IndexView, collate_rows, samples_at, worker_options

WAYS = "public=0.1 (a share of every client's training samples), or public: another data set"
"""How a data module gets public data, for messages."""


class PairedBatch(NamedTuple):
    """A batch of public samples with a row of targets for each of them.

    Attributes:
        batch: The batch as the public loader gives it.
        targets: Rows that belong to its samples, in the same order.
    """

    batch: Any
    targets: Tensor


class _PairedSamples(NamedTuple):
    """Samples of a batch before they are collated, with their rows of targets."""

    samples: Any
    targets: Tensor


class Paired(Dataset[Any]):
    """Samples of a dataset, each with its row of targets.

    Args:
        dataset: A map-style dataset.
        targets: A row for each sample.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.public import Paired
        >>> Paired("ab", torch.tensor([[1.0], [2.0]]))[1]
        ('b', tensor([2.]))
    """

    def __init__(self, dataset: Any, targets: Tensor) -> None:
        self.dataset, self.targets = dataset, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.dataset[index], self.targets[index]

    def __getitems__(self, positions: list[int]) -> _PairedSamples:
        return _PairedSamples(samples_at(self.dataset, positions), self.targets[torch.tensor(positions)])


class CollatePaired:
    """Collate function of :class:`Paired` samples.

    Args:
        collate: Collate function of the samples.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.public import CollatePaired
        >>> CollatePaired(torch.stack)([(torch.zeros(1), torch.ones(2)), (torch.ones(1), torch.ones(2))]).targets.shape
        torch.Size([2, 2])
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> PairedBatch:
        if not isinstance(samples, _PairedSamples):
            samples = _PairedSamples([sample for sample, _ in samples], torch.stack([row for _, row in samples]))
        return PairedBatch(self.collate(samples.samples), samples.targets)


class Unlabelled:
    """Collate function that takes the labels off: methods see inputs alone.

    Args:
        collate: Collate function of the labelled samples.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.public import Unlabelled
        >>> Unlabelled(torch.utils.data.default_collate)([(torch.zeros(2), 1), (torch.ones(2), 0)]).shape
        torch.Size([2, 2])
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return without_labels(self.collate(samples))


def without_labels(batch: Any) -> Any:
    """Return a batch without labels: the first entry of a tuple or list, a mapping without its label keys.

    Example:
        >>> from fedlightning.datamodules.public import without_labels
        >>> without_labels({"x": 1, "mask": 2, "label": 3}), without_labels([1, 2]), without_labels(1)
        ({'x': 1, 'mask': 2}, 1, 1)
    """
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in LABEL_KEYS}
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def has_positions(loader: Any) -> bool:
    """Return True if samples have positions: not those of a stream, of ready batches, and of what is not a `DataLoader`.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from fedlightning.datamodules.public import has_positions
        >>> [has_positions(loader) for loader in (DataLoader(range(3)), DataLoader(range(3), batch_size=None), [1])]
        [True, False, False]
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return not gives_batches(loader)


def addressable(loader: Any, owner: str) -> DataLoader[Any]:
    """Return a loader of public data whose samples have positions.

    Args:
        loader: What a data module gives as public data.
        owner: Name of the data module, for messages.

    Raises:
        ValueError: If there are no public data, or their samples have no positions.

    Example:
        >>> from fedlightning.datamodules.public import addressable
        >>> addressable(None, "MyData")
        Traceback (most recent call last):
            ...
        ValueError: MyData has no public data. Give it some: public=0.1 (a share of every client's training samples), or \
public: another data set.
    """
    if loader is None:
        raise ValueError(f"{owner} has no public data. Give it some: {WAYS}.")
    if not has_positions(loader):
        what = type(getattr(loader, "dataset", loader)).__name__
        raise ValueError(
            f"The public data of {owner} are a {what}, whose samples have no position, and they are addressed by position. "
            "Use a map-style dataset of samples (with __len__ and __getitem__), and a batch_size."
        )
    checked: DataLoader[Any] = loader
    return checked


def size_of(loader: Any, owner: str) -> int:
    """Return the number of public samples; 0 without any.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from fedlightning.datamodules.public import size_of
        >>> size_of(DataLoader(range(3)), "MyData"), size_of(None, "MyData")
        (3, 0)
    """
    return 0 if loader is None else len(addressable(loader, owner).dataset)  # type: ignore[arg-type]


def public_loader(
    loader: Any,
    owner: str,
    ids: Tensor | Sequence[int] | None = None,
    *,
    targets: Tensor | None = None,
    batch_size: int | None = None,
    shuffle: bool = False,
    reader: str = "public",
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Return a loader of public samples by their positions, whose sampler is an `AddressedSampler`.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from fedlightning.datamodules.public import public_loader
        >>> public = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)
        >>> [x.tolist() for [x] in public_loader(public, "MyData", torch.tensor([7, 2, 5]))]
        [[7.0, 2.0], [5.0]]
        >>> batch, rows = next(iter(public_loader(public, "MyData", [7], targets=torch.ones(1, 3))))
        >>> batch, rows.shape
        ([tensor([7.])], torch.Size([1, 3]))
    """
    source = addressable(loader, owner)
    dataset: Any = source.dataset
    size = len(dataset)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"public(batch_size={batch_size}): use 1 or more.")
    if ids is not None:
        positions = torch.as_tensor(ids)
        if positions.ndim != 1 or positions.dtype == torch.bool or positions.is_floating_point():
            raise ValueError(
                f"public(ids) got {positions.dtype} of shape {tuple(positions.shape)}; give positions of public samples "
                "as int64 of shape (samples,)."
            )
        positions = positions.to("cpu", torch.int64)
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < size:
            wrong = int(positions.min()) if int(positions.min()) < 0 else int(positions.max())
            raise ValueError(
                f"public(ids) got position {wrong}, but {owner} has {size} public samples: 0 to {size - 1}."
            )
        dataset = IndexView(dataset, positions.numpy())
    collate: Any = collate_rows if source.collate_fn is default_collate else source.collate_fn
    if targets is not None:
        if len(targets) != len(dataset):
            raise ValueError(
                f"public(targets) got {len(targets)} rows for {len(dataset)} samples; give one row for each."
            )
        dataset, collate = Paired(dataset, targets.detach().cpu()), CollatePaired(collate)
    sampler = AddressedSampler(len(dataset), reader, shuffle=shuffle)
    options: dict[str, Any] = {
        "batch_size": batch_size or source.batch_size or getattr(source.batch_sampler, "batch_size", None) or 1,
        "drop_last": drop_last,
    } | worker_options(source)
    return DataLoader(dataset, sampler=sampler, generator=sampler.generator, collate_fn=collate, **options)


def public_in_words(report: Mapping[str, Any]) -> str:
    """Return a data module's `public_report` as a clause.

    Example:
        >>> from fedlightning.datamodules.public import public_in_words
        >>> public_in_words({"samples": 90, "labels": False, "from": "Scans", "compared": True, "left_out": {"test": 3}})
        '90 samples of Scans, without labels; left out, since a client holds them: 3 of test'
        >>> public_in_words({"samples": None})
        'an unknown number of samples'
    """
    text = "an unknown number of samples" if report["samples"] is None else f"{report['samples']} samples"
    text += f" of {report['from']}" if "compared" in report else f", {report['from']}" if "from" in report else ""
    text += "" if report.get("labels", True) else ", without labels"
    if not report.get("compared", True):
        return f"{text}; not compared with the clients' samples"
    left_out = ", ".join(f"{count} of {split}" for split, count in report.get("left_out", {}).items())
    if left_out:
        return f"{text}; left out, since a client holds them: {left_out}"
    return f"{text}; none of them is a client's" if "compared" in report else text


def first_batch(loader: Any, owner: str) -> Any:
    """Return the first public batch, for checks at the start.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from fedlightning.datamodules.public import first_batch
        >>> first_batch(DataLoader(range(30), batch_size=3), "MyData")
        tensor([0, 1, 2])
    """
    source = addressable(loader, owner)
    size = min(source.batch_size or 1, len(source.dataset))  # type: ignore[arg-type]
    return source.collate_fn(samples_at(source.dataset, range(size)))

"""Equal inputs: the same image or row in training and test data, or at two clients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlightning.datamodules.base import SPLITS, FederatedDataModule
from fedlightning.datamodules.indexed import IndexedFederatedDataModule


@dataclass
class Duplicates:
    """Samples whose inputs are equal, bit for bit.

    Attributes:
        leaked: Validation and test samples that are in somebody's training data, too.
        shared: Training samples that another client has in its training data.
        read: Samples that were compared.
        examples: A few of them in words, leaked ones first.

    Example:
        >>> from fedlightning.datamodules.duplicates import Duplicates
        >>> print(Duplicates(leaked=1, shared=0, read=90, examples=["test sample 3 of client 'a' is training sample 0"]))
        Equal inputs: 1 of 90 samples are validation or test samples that somebody trains on; 0 training samples are at more
        than one client. Such as: test sample 3 of client 'a' is training sample 0.
    """

    leaked: int
    shared: int
    read: int
    examples: list[str]

    def __str__(self) -> str:
        if not self.leaked and not self.shared:
            return f"Equal inputs: none between training and other data, or between clients ({self.read} samples)."
        return (
            f"Equal inputs: {self.leaked} of {self.read} samples are validation or test samples that somebody trains on; "
            f"{self.shared} training samples are at more\nthan one client. Such as: {'; '.join(self.examples)}."
        )


def find_duplicates(data: FederatedDataModule, most: int = 200_000) -> Duplicates | None:
    """Find samples with equal inputs in training and other data, and at two clients.

    A score on a test image that was trained on is too good, and a patient who is at two hospitals is no independent
    sample of either. Rows of a small table may be equal by chance. Inputs are compared by their hash, targets are not.

    Args:
        data: The data module, after `setup`. Its samples are read once, in this process.
        most: Samples that are read at most; with more of them nothing is compared.

    Returns:
        What was found, or `None` where there are more samples, inputs are no tensors or wait for statistics of all clients,
        or clients are made when they are asked for.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule
        >>> from fedlightning.datamodules.duplicates import find_duplicates
        >>> data = DigitsDataModule()
        >>> data.setup()
        >>> find_duplicates(data).leaked
        0
    """
    if not isinstance(data, IndexedFederatedDataModule) or data.wanted_statistics is not None:  # all are NaN yet
        return None
    clients = data.client_ids
    total = sum(data.num_samples(client, split) for client in clients for split in SPLITS)
    if total > most:
        return None
    trained: dict[bytes, tuple[str, int]] = {}
    shared = leaked = 0
    examples: list[str] = []
    known: dict[tuple[int, int], bytes | None] = {}
    for split in sorted(SPLITS, key=lambda name: name != "train"):
        for client in clients:
            for row, key in enumerate(_hashes(data, client, split, known)):
                if key is None:
                    return None
                if split == "train":
                    home = trained.setdefault(key, (client, row))
                    if home[0] != client:
                        shared += 1
                        examples.append(
                            f"training sample {row} of client {client!r} is sample {home[1]} of {home[0]!r}"
                        )
                elif key in trained:
                    leaked += 1
                    home = trained[key]
                    examples.insert(
                        0, f"{split} sample {row} of client {client!r} is training sample {home[1]} of {home[0]!r}"
                    )
    return Duplicates(leaked, shared, total, examples[:3])


def _hashes(
    data: IndexedFederatedDataModule, client: str, split: str, known: dict[tuple[int, int], bytes | None]
) -> Iterator[bytes | None]:
    """Yield the hash of each input of a client's split; `None` for one that is no tensor."""
    loader = data.client_dataloader(client, split)
    view: Any = getattr(loader, "dataset", ())
    for row, index in zip(range(len(view)), getattr(view, "indices", ()), strict=True):
        place = (id(view.dataset), int(index))
        if place not in known:
            known[place] = _hash(view[row])
        yield known[place]


def _hash(sample: Any) -> bytes | None:
    x = sample[0] if isinstance(sample, tuple | list) and sample else sample
    parts = list(x.values()) if isinstance(x, Mapping) else [x]
    if not all(isinstance(part, Tensor) for part in parts):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(str(tuple(part.shape)).encode())
        digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()

"""Public data from another data set: read once, without the samples that a client holds too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedlightning.datamodules.federated_data import SPLITS, FederatedDataModule
from fedlightning.datamodules.groups import digests, is_cheap
from fedlightning.datamodules.public import Unlabelled
from fedlightning.datamodules.views import IndexView, collate_rows
from fedlightning.seeding import generator, isolated

Public = float | Dataset[Any] | LightningDataModule | None
"""Public data: a share of every client's training samples, or another data set."""


def share_of(owner: Any, public: Any, fraction: float) -> float:
    """Return the share of the clients' training samples that becomes public.

    Example:
        >>> from fedlightning.datamodules.public_from_another import share_of
        >>> share_of("data", 0.1, 0.0), share_of("data", None, 0.2)
        (0.1, 0.2)
    """
    name = type(owner).__name__
    if public is None:
        return fraction
    is_number = isinstance(public, int | float) and not isinstance(public, bool)
    if fraction and not (is_number and public == fraction):
        described = public if is_number else type(public).__name__
        raise ValueError(f"{name} got public={described} and public_fraction={fraction}; give one of them.")
    if is_number:
        if not 0 <= public < 1:
            raise ValueError(f"{name} got public={public}. Use a share of every client's training samples in [0, 1).")
        return float(public)
    if isinstance(public, type | str | bool) or not is_data_set(public):
        described = f"the class {public.__name__}" if isinstance(public, type) else repr(public)
        raise ValueError(
            f"{name} got public={described}; give a share of every client's training samples (0.1), a map-style Dataset, or "
            "a LightningDataModule."
        )
    return 0.0


def is_data_set(value: Any) -> bool:
    """Return whether a value can be public data: a map-style dataset, or a data module.

    Example:
        >>> is_data_set([1, 2]), is_data_set(0.1)
        (True, False)
    """
    return isinstance(value, LightningDataModule) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


def loader_of(dataset: Any, positions: Any, options: Mapping[str, Any], seed: int, labels: bool) -> DataLoader[Any]:
    """Return a loader of some samples of a dataset as public data, with or without their labels."""
    collate = options["collate_fn"] or collate_rows
    loader_options = {**options, "collate_fn": collate if labels else Unlabelled(collate)}
    return DataLoader(IndexView(dataset, positions), generator=generator(seed, "workers", "public"), **loader_options)


@dataclass
class Another:
    """Another data set as public data.

    Attributes:
        dataset: Its samples.
        positions: Those that are public.
        name: Class of the data set or data module.
        options: Keyword arguments of its loader.
        left_out: By split, the samples that a client holds too, and which are therefore not public.
        checked: Whether they could be compared with the clients' samples.
    """

    dataset: Any
    positions: np.ndarray
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    checked: bool = False


def another(owner: Any, public: Any, options: Mapping[str, Any], splits: Mapping[str, Any], seed: int) -> Another:
    """Read another data set, and leave out what a client holds too."""
    owner_name, name = type(owner).__name__, type(public).__name__
    loader_options = dict(options)
    dataset: Any = public
    if isinstance(public, LightningDataModule):
        loader = _training_loader(public, seed)
        if not isinstance(loader, DataLoader):
            raise ValueError(
                f"{owner_name} got public={name}, whose training loader is a {type(loader).__name__}; give a data module "
                "with one torch DataLoader."
            )
        dataset = loader.dataset
        loader_options = {
            "batch_size": loader.batch_size or options["batch_size"],
            "collate_fn": loader.collate_fn,
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
        }
    if isinstance(dataset, IterableDataset) or len(dataset) == 0:
        what = (
            "an iterable data set, whose samples have no position" if isinstance(dataset, IterableDataset) else "empty"
        )
        raise ValueError(f"{owner_name} got public={name}, which is {what}; give a map-style Dataset with samples.")
    public_set = Another(dataset, np.arange(len(dataset)), name, loader_options)
    _leave_out(owner, public_set, splits, options)
    return public_set


def _training_loader(public: LightningDataModule, seed: int) -> Any:
    public.prepare_data()
    with isolated(seed, "public", "setup"):
        public.setup("fit")
        if isinstance(public, FederatedDataModule):
            if public.wanted_statistics is not None:
                raise ValueError(
                    f"public={type(public).__name__} is scaled by statistics that clients agree on, and public data have no "
                    "clients. Give it scale: none, or statistics."
                )
            return public.pooled_dataloader("train")
        loader = public.train_dataloader()
    return loader[0] if isinstance(loader, list | tuple) and len(loader) == 1 else loader


def _leave_out(owner: Any, public_set: Another, splits: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Take out the samples whose inputs are, bit for bit, those of a client's sample of any split."""
    if owner.wanted_statistics is not None:  # the clients' inputs are not known yet
        return
    owner_name = type(owner).__name__
    rows = {name: _join_indices(split.indices) for name, split in splits.items()}
    sizes = [(split.dataset, len(rows[name])) for name, split in splits.items()]
    if not all(is_cheap(dataset, count) for dataset, count in [*sizes, (public_set.dataset, len(public_set.dataset))]):
        return
    public = digests(public_set.dataset, public_set.positions, public_set.options.get("collate_fn") or collate_rows)
    if public is None:
        return
    public_digests, stays = set(public), np.ones(len(public), dtype=bool)
    for name in (name for name in SPLITS if name in splits):
        split = splits[name]
        theirs = digests(
            split.dataset, rows[name], split.loader.get("collate_fn") or options.get("collate_fn") or collate_rows
        )
        if theirs is None:
            public_set.left_out.clear()
            return
        shared = public_digests.intersection(theirs)
        of_split = np.array([digest in shared for digest in public])
        if of_split.any():
            public_set.left_out[name] = int(of_split.sum())
        stays &= ~of_split
    public_set.checked, public_set.positions = True, public_set.positions[stays]
    if not public_set.left_out:
        return
    where = ", ".join(f"{count} of {name}" for name, count in public_set.left_out.items())
    if not stays.any():
        raise ValueError(
            f"{owner_name} got public={public_set.name}, but a client holds every one of its {len(public)} samples "
            f"({where}), bit for bit. Public data may not be a client's: give another data set, or public=0.1 to take a "
            "share from the clients."
        )
    rank_zero_warn(
        f"{int((~stays).sum())} of the {len(public)} public samples of {public_set.name} are left out, since a client holds "
        f"them too, bit for bit ({where}).",
        category=UserWarning,
    )


def _join_indices(indices: Sequence[Any]) -> np.ndarray:
    return (
        np.unique(np.concatenate([np.asarray(part, np.int64) for part in indices]))
        if len(indices)
        else np.zeros(0, np.int64)
    )

"""The base of LEAF's data sets: each user of the files is a client.

LEAF's JSON files: users, and each user's inputs and targets.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.csv_tables import extreme_of, read_json
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import PositiveInt, ShareBelowOne, checked, number_in

FOLDERS = {"train": "train", "test": "test"}


@dataclass
class LEAFUser:
    """A user's samples of one split.

    Attributes:
        split: `"train"` or `"test"`.
        name: The user.
        x: Inputs, as they stand in the file.
        y: Targets, one for each input.
        path: The file, for messages.
    """

    split: str
    name: str
    x: list[Any]
    y: list[Any]
    path: Path


def leaf_files(root: Path) -> dict[str, list[Path]]:
    """Return the JSON files of each split: `train/*.json` and `test/*.json` under `root` or `root/data`.

    Raises:
        FileNotFoundError: If there are none; the message says which script of LEAF writes them.
    """
    for base in (root, root / "data"):
        files_by_split = {split: sorted((base / folder).glob("*.json")) for split, folder in FOLDERS.items()}
        if files_by_split["train"]:
            return files_by_split
    raise FileNotFoundError(
        f"There is no {root / 'train'} with JSON files. Write train/ and test/ by preprocess.sh of "
        "https://github.com/TalwalkarLab/leaf (such as: ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample) and give "
        "their folder as root."
    )


def read_leaf(root: Path) -> Iterator[LEAFUser]:
    r"""Read LEAF's files, a file at a time, and check that they are whole.

    Args:
        root: Folder that holds `train` and `test`, or LEAF's folder of the data set, whose `data` holds them.

    Raises:
        FileNotFoundError: If there are no files.
        ValueError: If a file is not JSON (with the line), lacks a key, or contradicts itself or another one.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.leaf import read_leaf
        >>> with TemporaryDirectory() as folder:
        ...     Path(folder, "train").mkdir()
        ...     found = {"users": ["ann"], "num_samples": [2], "user_data": {"ann": {"x": [[0.5], [1.0]], "y": [0, 3]}}}
        ...     _ = Path(folder, "train", "a.json").write_text(json.dumps(found))
        ...     [(user.split, user.name, user.y) for user in read_leaf(Path(folder))]
        [('train', 'ann', [0, 3])]
    """
    for split, paths in leaf_files(root).items():
        seen: dict[str, Path] = {}
        for path in paths:
            for user in _users(path, split):
                if user.name in seen:
                    raise ValueError(
                        f"{path}: user {user.name!r} is in {seen[user.name].name}, too; one of the files is of "
                        "another run of preprocess.sh. Remove it."
                    )
                seen[user.name] = path
                yield user


def _users(path: Path, split: str) -> Iterator[LEAFUser]:
    content = read_json(path)
    if not isinstance(content, dict) or not {"users", "user_data"} <= set(content):
        raise ValueError(f"{path} has no 'users' and 'user_data'; it is not a file of LEAF.")
    users, data, counts = content["users"], content["user_data"], content.get("num_samples")
    names = isinstance(users, list) and users and all(isinstance(name, str | int) for name in users)
    if not names or not isinstance(data, dict) or not isinstance(counts, list | None):
        raise ValueError(
            f"{path}: 'users', 'user_data' or 'num_samples' is not a list of users, table and list; it is not a file of LEAF."
        )
    if set(users) != set(data) or len(set(users)) < len(users):
        strange = sorted(set(users) ^ set(data), key=str) or users
        raise ValueError(f"{path}: 'users' and 'user_data' do not name the same users, such as {strange[0]!r}.")
    for place, name in enumerate(users):
        samples: Any = data[name] if isinstance(data[name], dict) else {}
        x, y = samples.get("x"), samples.get("y")
        sizes = [len(part) if isinstance(part, list) else None for part in (x, y)]
        declared = counts[place] if counts is not None and place < len(counts) else sizes[1]
        if None in sizes or not sizes[0] == sizes[1] == declared:
            raise ValueError(
                f"{path}: user {name!r} has {sizes[0]} inputs x, {sizes[1]} targets y and num_samples {declared}; they "
                "must agree."
            )
        yield LEAFUser(split, str(name), x, y, path)


class LEAFDataModule(NaturalSites):
    """Base of data modules over LEAF's JSON files, `train/*.json` and `test/*.json`, as `preprocess.sh` writes them.

    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018 (code: BSD 2-clause). Nothing is downloaded: LEAF's
    scripts fetch and prepare the sources, whose own terms apply. Each user is a client. The publisher's test samples
    are the test split; validation samples are cut from each user's training samples. Subclasses turn a user's inputs
    into tensors.

    Args:
        root: Folder that holds `train` and `test`, or LEAF's folder of the data set, whose `data` holds them.
        batch_size: Number of samples in a batch (LEAF: 10).
        val_fraction: Share of the training samples for validation, in [0, 1); LEAF has none.
        largest: Keep only this many users, those with the most training samples; ties by name. `None` keeps all.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if a file is damaged.
    """

    classes: int
    """Number of classes, of the data set's; these users may lack the last ones."""
    address = "leaf"

    @checked
    def __init__(
        self,
        root: str,
        batch_size: int = 10,
        val_fraction: ShareBelowOne = 0.2,
        *,
        largest: PositiveInt | None = None,
        val_seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.val_seed, self.largest = val_fraction, val_seed, largest

    @abstractmethod
    def inputs(self, user: LEAFUser) -> Tensor:
        """Return a user's inputs, one row a sample.

        Args:
            user: The user's samples of a split.

        Raises:
            ValueError: If an input is not of this data set.
        """

    def targets(self, user: LEAFUser) -> np.ndarray:
        """Return a user's classes, int64 `(samples,)`.

        Args:
            user: The user's samples of a split.
        """
        try:
            values = [number_in(value) if isinstance(value, str) else value for value in user.y]
            classes = np.array([int(value) for value in values], dtype=np.int64)
            broken = next((value for value, number in zip(values, classes, strict=True) if value != number), None)
            if broken is not None:
                raise ValueError(f"{broken!r}")
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{user.path}: user {user.name!r} has a target that is not a whole number ({error})."
            ) from error
        if len(classes) and not 0 <= classes.min() <= classes.max() < self.classes:
            raise ValueError(
                f"{user.path}: user {user.name!r} has targets from {classes.min()} to {classes.max()}; the classes are 0 to "
                f"{self.classes - 1}. It is a file of another data set."
            )
        return classes

    def dataset(self, x: Tensor, y: np.ndarray) -> Dataset[Any]:
        """Return the samples of all users as a dataset.

        Args:
            x: What `inputs` returned, of all users, one after another.
            y: Classes, int64 `(samples,)`.
        """
        return ArrayDataset(x, torch.from_numpy(y))

    def prepare_data(self) -> None:
        """Check that the files are there (Lightning's hook)."""
        leaf_files(self.root)

    def read(self) -> SiteSamples:
        inputs, classes = [], []
        splits: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
        start = 0
        for user in read_leaf(self.root):
            x, y = self.inputs(user), self.targets(user)
            inputs.append(x)
            classes.append(y)
            splits[user.split][user.name] = np.arange(start, start + len(y))
            start += len(y)
        untrained = sort_clients(set(splits["test"]) - set(splits["train"]))
        if untrained:
            raise ValueError(
                f"{self.root}: {len(untrained)} users have test samples and no training samples, such as "
                f"{untrained[0]!r}. Split each user's samples (preprocess.sh -t sample), not the users."
            )
        if not splits["test"]:
            rank_zero_warn(f"{self.root}: there are no files in test/, so nothing is tested.", category=UserWarning)
        sizes = {name: len(rows) for name, rows in splits["train"].items()}
        kept = sorted(sort_clients(sizes), key=lambda name: -sizes[name])[: self.largest]
        if len(kept) < len(sizes):
            rank_zero_warn(
                f"{type(self).__name__} keeps the {len(kept)} largest of {len(sizes)} users (largest={self.largest}).",
                category=UserWarning,
            )
        y = np.concatenate(classes)
        nothing = np.zeros(0, np.int64)
        rows = {name: {split: splits[split].get(name, nothing) for split in splits} for name in sort_clients(kept)}
        return SiteSamples(self.dataset(torch.cat(inputs), y), rows, y)


def numbers(user: LEAFUser, width: int) -> Tensor:
    """Return a user's inputs as float32 `(samples, width)`.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.leaf.leaf_users import numbers
        >>> from fedlightning.datamodules.leaf import LEAFUser
        >>> numbers(LEAFUser("train", "ann", [[1.0, 2.0]], [0], Path("a.json")), width=3)
        Traceback (most recent call last):
        ValueError: a.json: user 'ann' has inputs of shape (1, 2); this data set has 3 numbers each. ...
    """
    try:
        raw = np.array(user.x)  # numpy would make numbers of texts
        if raw.dtype.kind not in "iuf":
            raise ValueError(f"it holds a {raw.dtype.name}")
        array = raw.astype(np.float32).reshape(len(user.x), -1 if user.x else width)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{user.path}: user {user.name!r} has an input that is not a list of {width} numbers ({error})."
        ) from error
    extreme = not np.isfinite(array).all() or extreme_of(array.ravel()) is not None
    if array.shape[1] != width or extreme:
        what = (
            f"inputs of shape {array.shape}" if array.shape[1] != width else "an input with NaN, or far from all others"
        )
        raise ValueError(
            f"{user.path}: user {user.name!r} has {what}; this data set has {width} numbers each. Is it another one?"
        )
    return torch.from_numpy(array)

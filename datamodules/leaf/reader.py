"""LEAF's JSON files: users, and each user's inputs and targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlightning.datamodules.tables import read_json

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
        found = {split: sorted((base / folder).glob("*.json")) for split, folder in FOLDERS.items()}
        if found["train"]:
            return found
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
        ValueError: If a file is no JSON (with the line), lacks a key, or contradicts itself or another one.

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
    found = read_json(path)
    if not isinstance(found, dict) or not {"users", "user_data"} <= set(found):
        raise ValueError(f"{path} has no 'users' and 'user_data'; it is no file of LEAF.")
    users, data, counts = found["users"], found["user_data"], found.get("num_samples")
    names = isinstance(users, list) and users and all(isinstance(name, str | int) for name in users)
    if not names or not isinstance(data, dict) or not isinstance(counts, list | None):
        raise ValueError(
            f"{path}: 'users', 'user_data' or 'num_samples' is no list of users, table and list; it is no file of LEAF."
        )
    if set(users) != set(data) or len(set(users)) < len(users):
        strange = sorted(set(users) ^ set(data), key=str) or users
        raise ValueError(f"{path}: 'users' and 'user_data' do not name the same users, such as {strange[0]!r}.")
    for place, name in enumerate(users):
        samples: Any = data[name] if isinstance(data[name], dict) else {}
        x, y = samples.get("x"), samples.get("y")
        sizes = [len(part) if isinstance(part, list) else None for part in (x, y)]
        said = counts[place] if counts is not None and place < len(counts) else sizes[1]
        if None in sizes or not sizes[0] == sizes[1] == said:
            raise ValueError(
                f"{path}: user {name!r} has {sizes[0]} inputs x, {sizes[1]} targets y and num_samples {said}; they "
                "must agree."
            )
        yield LEAFUser(split, str(name), x, y, path)

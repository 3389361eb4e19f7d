"""The release of a round, stored before it is written down as spent: a run that goes on replays it, and makes no other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from fedlightning.codec.tree import file_of, load
from fedlightning.tensors import State

FILE = "privacy_release.safetensors"
"""File in the run's folder."""


@dataclass(frozen=True)
class Release:
    """What a round gives to everybody.

    Attributes:
        name: Its name where spending is written down, with a hash of what it is made of.
        state: Entries of the model, with their noise.
        clip: The length to clip to in the next round.
    """

    name: str
    state: State
    clip: float


def store(folder: Path, release: Release) -> None:
    """Write a release to a run's folder, in place of that of the round before, and wait until it is on the disk."""
    content = {"name": release.name, "state": dict(release.state), "clip": release.clip}
    file_of(content, "the release").save(folder / FILE)


def stored(folder: Path | None, names: Collection[str], round: int) -> Release:
    """Return the release that is stored, of a round that was released before under one of some names.

    Raises:
        ValueError: If it is not there.
    """
    content = {} if folder is None or not (folder / FILE).exists() else load(folder / FILE)
    if content.get("name") not in names:
        raise ValueError(
            f"Round {round + 1} was released before, by this run or a copy of it, and comes out differently now. The first "
            f"release is not in {FILE} of this run's folder: go on in the folder that has it, or start a new run."
        )
    return Release(content["name"], content["state"], float(content["clip"]))

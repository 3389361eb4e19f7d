"""Grids: every method of a file under every variant of it, such as defences under attacks, or methods at budgets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedlightning.config.errors import InputError
from fedlightning.experiments.methods import tidy
from fedlightning.experiments.reproduce.fields import read_yaml

KEYS = {"config", "methods", "variants"}


@dataclass(frozen=True)
class Grid:
    """Methods and variants; each method is run under each variant.

    Attributes:
        before: Files that are read before those of a method.
        methods: Name -> files of a method, a row of the report's table.
        variants: Name -> files of a variant, read after those of the method: a column.
    """

    before: list[str]
    methods: dict[str, list[str]]
    variants: dict[str, list[str]]

    @property
    def cells(self) -> dict[str, tuple[str, str]]:
        """Name of a run -> its method and its variant.

        Example:
            >>> Grid([], {"mean": []}, {"none": [], "ALIE": []}).cells
            {'mean_none': ('mean', 'none'), 'mean_ALIE': ('mean', 'ALIE')}
        """
        return {tidy(f"{row}_{column}"): (row, column) for row in self.methods for column in self.variants}


def read_grid(path: Path, folder: Path) -> Grid:
    """Read a grid: `config`, and by name `methods` and `variants`. Files are relative to the grid's own folder.

    Args:
        path: The file. A method or variant is a file, a list of files, or what would stand in one.
        folder: Where to write files of what stands in the grid itself.

    Raises:
        InputError: If it is no grid.
    """
    try:
        given = read_yaml(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if set(given) - KEYS or not all(isinstance(given.get(key), dict) and given[key] for key in ("methods", "variants")):
        raise InputError(
            f"{path} is no grid. It has config: [FILE, ...], and by name methods and variants, each a FILE, a list of files, "
            "or what would stand in one ({}: nothing)."
        )
    count = 0

    def files(value: Any) -> list[str]:
        nonlocal count
        if isinstance(value, list):
            return [file for one in value for file in files(one)]
        if isinstance(value, str):
            return [os.path.normpath(path.parent / value)]
        if not isinstance(value, dict):
            raise InputError(f"{path}: {value!r:.80} is neither a file nor what would stand in one.")
        if not value:
            return []
        count += 1
        aside = folder / f"grid_{count}.yaml"
        aside.write_text(yaml.safe_dump(value, sort_keys=False))
        return [str(aside)]

    def named(key: str) -> dict[str, list[str]]:
        found = {str(name): files(value) for name, value in given[key].items()}
        if len(found) < len(given[key]) or not all(name.strip() for name in found):
            raise InputError(f"{path}: the names of {key} have to differ, as texts, and none may be empty.")
        return found

    grid = Grid(files(given.get("config", [])), named("methods"), named("variants"))
    if len({name.lower() for name in grid.cells}) < len(grid.methods) * len(grid.variants):
        raise InputError(f"{path}: two runs would have one name. Name methods and variants otherwise.")
    return grid

"""Algorithms of other packages: entry points of the group `fedlightning.algorithms`.

A package lists its algorithms in its `pyproject.toml`::

    [project.entry-points."fedlightning.algorithms"]
    MyAlgorithm = "my_package:MyAlgorithm"

An entry is a `FederatedCallback` class, whose row is made from its docstring, or a row (:class:`Algorithm` with a
`class_path`), which is listed without importing the class. Entry, row and class have one name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from fedlightning.catalogue.catalogue_row import CALLBACKS, FAMILIES, Algorithm
from fedlightning.errors import warn

GROUP = "fedlightning.algorithms"


def plain(name: str) -> str:
    """Return a name as names are compared: without upper case, `-` and `_`.

    Example:
        >>> plain("PLayer-FL_random")
        'playerflrandom'
    """
    return name.lower().replace("-", "").replace("_", "")


def installed_rows(taken: Iterable[str]) -> list[Algorithm]:
    """Return the rows of other packages, in the order of the packages' names.

    An entry that cannot be loaded is left out with a warning, and so is one whose name is taken.
    """
    owners = dict.fromkeys(map(plain, taken), "fedlightning")
    rows = []
    for package, entry in sorted((_package(entry), entry) for entry in entry_points(group=GROUP)):
        left_out = f"The algorithm '{entry.name}' of the package '{package}' is left out"
        key = plain(entry.name)
        if key in owners:  # not even imported: a short name in a YAML file would be that of two classes
            warn(f"{left_out}: '{owners[key]}' has one of that name already. Give it another name.")
            continue
        try:
            rows.append(_row(entry))
        except Exception as error:  # whatever another package's import may raise
            warn(f"{left_out}: it cannot be loaded ({type(error).__name__}: {error}).")
        else:
            owners[key] = package
    return rows


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.module.partition(".")[0]


def _row(entry: EntryPoint) -> Algorithm:
    """Return the row that an entry is, or the row of the class that it is."""
    target = entry.load()
    row = target if isinstance(target, Algorithm) else _row_of_class(target, f"{entry.module}.{entry.attr}")
    if row.class_path.startswith(f"{CALLBACKS}."):
        raise ValueError(f"its row has no class_path, such as '{entry.module}.{row.name}'")
    if not entry.name == row.name == row.class_path.rpartition(".")[2]:
        raise ValueError(f"entry, row and class have different names: '{entry.name}', '{row.name}', '{row.class_path}'")
    if row.family not in FAMILIES:
        raise ValueError(f"its family is '{row.family}', not one of {', '.join(FAMILIES)}")
    return row


def _row_of_class(cls: object, class_path: str) -> Algorithm:
    """Return a row with what the docstring of a class says: its first paragraph."""
    from fedlightning.contract import FederatedCallback

    if not (isinstance(cls, type) and issubclass(cls, FederatedCallback)):
        raise TypeError(f"{class_path} is neither a FederatedCallback class nor a row of the catalogue")
    sentence = " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())
    unsaid = dict.fromkeys(("down", "up", "client_state", "server_state", "deployed", "weights", "composes"), "")
    return Algorithm(cls.__name__, "other", sentence, paper="", class_path=class_path, **unsaid)

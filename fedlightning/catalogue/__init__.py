"""The algorithms, one row each: what a person needs to choose one. Classes are imported when they are asked for.

>>> from fedlightning.catalogue import create, list_algorithms
>>> list_algorithms("*sgd")
['FedSGD', 'DSGD', 'LDSGD']
>>> create("fedprox", mu=0.01)
FedProx(mu=0.01, weighting=None)

A new algorithm's row goes into the file of its kind, `fedlightning/catalogue/KIND.toml`; `like` names the row from which
one differs only in what it says itself.

================== =====================================================
``global_models``  one model for all clients
``shared_part``    a part of the model is shared, the rest stays
``own_model``      a model of each client's own, beside a global one
``from_others``    each client's model is made from other clients' models
``distillation``   what clients predict is shared: on public data, or through a model fused at the server
``clusters``       several models at the server, one for each cluster of clients
``multimodal``     clients with rare labels, different sensors or no labels
``neighbours``     no server: each client mixes its model with its neighbours' models
``baselines``      what federations are compared with
================== =====================================================

What `fedlightning.callbacks` exports and the README's table are written from the rows by ``make registry``. Rows of other
packages are found in :mod:`fedlightning.catalogue.installed`.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlightning.catalogue.catalogue_row import FAMILIES, Algorithm, Option
from fedlightning.catalogue.installed import installed_rows, plain

if TYPE_CHECKING:
    from fedlightning.contract import FederatedCallback

__all__ = ["ALGORITHMS", "FAMILIES", "Algorithm", "Option", "create", "find", "installed", "list_algorithms", "rows"]


def _rows_of(kind: str) -> tuple[Algorithm, ...]:
    """Return the rows of a kind's file."""
    rows: dict[str, Algorithm] = {}
    for name, row in tomllib.loads(Path(__file__).with_name(f"{kind}.toml").read_text("utf-8")).items():
        base = row.pop("like", None)
        rows[name] = rows[base].variant(name, **row) if base else Algorithm(name, **row)
    return tuple(rows.values())


KINDS: dict[str, tuple[Algorithm, ...]] = {
    "one model for all clients": _rows_of("global_models"),
    "a model of each client's own": _rows_of("own_model"),
    "a shared part of the model": _rows_of("shared_part"),
    "a model from other clients' models": _rows_of("from_others"),
    "shared predictions": _rows_of("distillation"),
    "a model for each cluster of clients": _rows_of("clusters"),
    "rare labels, several modalities, no labels": _rows_of("multimodal"),
    "no server: neighbours' models": _rows_of("neighbours"),
    "baselines": _rows_of("baselines"),
}
"""The rows of this repository by the file they are in, under the headings of the README."""
ALGORITHMS: tuple[Algorithm, ...] = tuple(row for kind in KINDS.values() for row in kind)
"""The rows of this repository."""


@cache
def installed() -> tuple[Algorithm, ...]:
    """Return the rows of other packages (entry points of the group `fedlightning.algorithms`), read once a process."""
    return tuple(installed_rows(row.name for row in ALGORITHMS))


def rows() -> tuple[Algorithm, ...]:
    """Return all rows: those of this repository, then those of other packages."""
    return ALGORITHMS + installed()


def list_algorithms(filter: str = "*") -> list[str]:
    """Return the names of algorithms.

    Example:
        >>> list_algorithms("fedav*")
        ['FedAvg', 'FedAvgM']
    """
    chosen = filter.lower()
    return [row.name for row in rows() if fnmatch.fnmatch(row.name.lower(), chosen) or row.family == chosen]


def find(name: str) -> Algorithm:
    """Return the row of an algorithm.

    Example:
        >>> find("player-fl").class_path
        'fedlightning.callbacks.PLayerFL'
    """
    rows = {plain(row.name): row for row in ALGORITHMS}
    if plain(name) not in rows:  # other packages are read only where they are needed
        rows |= {plain(row.name): row for row in installed()}
    if plain(name) in rows:
        return rows[plain(name)]
    close = [rows[key].name for key in difflib.get_close_matches(plain(name), rows, n=3, cutoff=0.5)]
    every = ", ".join(row.name for row in rows.values())
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {every}."
    raise ValueError(f"There is no algorithm '{name}'. {hint}")


def create(name: str, **options: Any) -> FederatedCallback:
    """Return a new instance of an algorithm, ready for `FederatedTrainer(callbacks=[...])`.

    Example:
        >>> create("FedProx", mu=0.25).mu
        0.25
    """
    row = find(name)
    cls = row.load()
    parameters = inspect.signature(cls).parameters
    unknown = [option for option in options if option not in parameters]
    if unknown:
        have = f"It has {', '.join(parameters)}." if parameters else "It has no options."
        raise ValueError(f"{row.name} has no option '{unknown[0]}'. {have}")
    return cls(**options)

"""The algorithms, one row each: what a person needs to choose one. Classes are imported when they are asked for.

>>> from fedlightning.catalogue import create, list_algorithms
>>> list_algorithms("*sgd")
['FedSGD', 'DSGD', 'LDSGD']
>>> create("fedprox", mu=0.01)
FedProx(mu=0.01, weighting=None)

A new algorithm's row goes into the file of its kind:

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

The imports of `fedlightning.callbacks` and the README's table are written from the rows by ``make registry``. Rows of
other packages are found in :mod:`fedlightning.catalogue.installed`.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from fedlightning.catalogue import (
    baselines,
    clusters,
    distillation,
    from_others,
    global_models,
    multimodal,
    neighbours,
    own_model,
    shared_part,
)
from fedlightning.catalogue.algorithm import FAMILIES, Algorithm, Option
from fedlightning.catalogue.installed import installed_rows, plain

if TYPE_CHECKING:
    from fedlightning.hooks import FederatedCallback

__all__ = ["ALGORITHMS", "FAMILIES", "Algorithm", "Option", "create", "find", "installed", "list_algorithms", "rows"]

KINDS: dict[str, tuple[Algorithm, ...]] = {
    "one model for all clients": global_models.ROWS,
    "a model of each client's own": own_model.ROWS,
    "a shared part of the model": shared_part.ROWS,
    "a model from other clients' models": from_others.ROWS,
    "shared predictions": distillation.ROWS,
    "a model for each cluster of clients": clusters.ROWS,
    "rare labels, several modalities, no labels": multimodal.ROWS,
    "no server: neighbours' models": neighbours.ROWS,
    "baselines": baselines.ROWS,
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
    known = {plain(row.name): row for row in ALGORITHMS}
    if plain(name) not in known:  # other packages are read only where they are needed
        known |= {plain(row.name): row for row in installed()}
    if plain(name) in known:
        return known[plain(name)]
    close = [known[key].name for key in difflib.get_close_matches(plain(name), known, n=3, cutoff=0.5)]
    every = ", ".join(row.name for row in known.values())
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
    known = inspect.signature(cls).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        have = f"It has {', '.join(known)}." if known else "It has no options."
        raise ValueError(f"{row.name} has no option '{unknown[0]}'. {have}")
    return cls(**options)

"""The algorithms, one row each: what a person needs to choose one. Classes are imported when they are asked for.

>>> from fedlightning.catalogue import create, list_algorithms
>>> list_algorithms("*sgd")
['FedSGD']
>>> create("fedprox", mu=0.01)
<fedlightning.callbacks.fedprox.FedProx object at ...>

A new algorithm's row goes into the file of its kind:

================== =====================================================
``global_models``  one model for all clients
``shared_part``    a part of the model is shared, the rest stays
``own_model``      a model of each client's own, beside a global one
``from_others``    each client's model is made from other clients' models
``baselines``      what federations are compared with
================== =====================================================
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from typing import TYPE_CHECKING, Any

from fedlightning.catalogue import baselines, from_others, global_models, own_model, shared_part
from fedlightning.catalogue.algorithm import Algorithm, Option

if TYPE_CHECKING:
    from fedlightning.hooks import FederatedCallback

__all__ = ["ALGORITHMS", "Algorithm", "Option", "create", "find", "list_algorithms"]

ALGORITHMS: tuple[Algorithm, ...] = (
    *global_models.ROWS,
    *own_model.ROWS,
    *shared_part.ROWS,
    *from_others.ROWS,
    *baselines.ROWS,
)


def list_algorithms(filter: str = "*") -> list[str]:
    """Names of the algorithms that match ``filter`` (``"fed*"``) or are of that family (``"personal"``)."""
    wanted = filter.lower()
    return [a.name for a in ALGORITHMS if fnmatch.fnmatch(a.name.lower(), wanted) or a.family == wanted]


def find(name: str) -> Algorithm:
    """The row of an algorithm; upper and lower case, ``-`` and ``_`` make no difference.

    Raises:
        ValueError: there is none of that name; the sentence says which are close.
    """
    rows = {_plain(row.name): row for row in ALGORITHMS}
    if _plain(name) in rows:
        return rows[_plain(name)]
    close = [rows[key].name for key in difflib.get_close_matches(_plain(name), rows, n=3, cutoff=0.5)]
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(row.name for row in ALGORITHMS)}."
    raise ValueError(f"There is no algorithm '{name}'. {hint}")


def create(name: str, **options: Any) -> FederatedCallback:
    """Make an algorithm by its name, ready for ``FederatedTrainer(callbacks=[...])``.

    Args:
        name: as in :func:`list_algorithms`.
        options: arguments of its class.

    Raises:
        ValueError: an unknown name or option.
    """
    row = find(name)
    cls = row.load()
    known = inspect.signature(cls).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        have = f"It has {', '.join(known)}." if known else "It has no options."
        raise ValueError(f"{row.name} has no option '{unknown[0]}'. {have}")
    return cls(**options)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")

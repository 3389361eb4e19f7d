"""Conformance checks for algorithms, those of this package and your own."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedlightning.catalogue import create
from fedlightning.compat.lightning_runs import quiet
from fedlightning.contract import FederatedCallback
from fedlightning.testing.checks import CHECKS


def check_algorithm(
    algorithm: FederatedCallback | str,
    *,
    neutral: FederatedCallback | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    full: bool = False,
    **arguments: Any,
) -> list[str]:
    """Run the conformance checks on an algorithm.

    Args:
        algorithm: Instance with the options to check, which is copied for every check, or the name of an algorithm (as
            in :func:`fedlightning.catalogue.find`) for one with its defaults.
        neutral: Instance that must equal plain training with one client, such as `FedProx(mu=0)`. `None` runs the check
            `one_client` on `algorithm` itself.
        only: Names of the checks to run. `None` runs all of :data:`fedlightning.testing.checks.CHECKS`.
        skip: Names of checks that cannot hold by the definition of the method; say why where you skip them.
        full: Always use the toy module with batch normalisation, frozen, tied and integer entries.
        arguments: Arguments of the trainer that the algorithm needs, such as `local_steps=1`.

    Returns:
        The names of the checks that passed.

    Raises:
        AssertionError: If a check fails; the message says which rule was broken.
        ValueError: If there is no check of a given name.

    Example:
        >>> from fedlightning.callbacks import FedProx
        >>> check_algorithm(FedProx(mu=0.1), only=["arguments", "copies"])
        ['arguments', 'copies']
    """
    chosen, left_out = list(CHECKS if only is None else only), set(skip)
    unknown = sorted({*chosen, *left_out} - set(CHECKS))
    if unknown:
        raise ValueError(f"There is no check '{unknown[0]}'. The checks are {sorted(CHECKS)}.")
    algorithm = create(algorithm) if isinstance(algorithm, str) else algorithm
    passed = []
    for name in chosen:
        if name in left_out:
            continue
        subject = neutral if name == "one_client" and neutral is not None else algorithm
        with tempfile.TemporaryDirectory() as folder, quiet():
            CHECKS[name](copy.deepcopy(subject), Path(folder), full=full, **arguments)
        passed.append(name)
    return passed


__all__ = ["CHECKS", "check_algorithm"]

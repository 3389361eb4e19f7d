"""Checks that every algorithm must pass; for the algorithms here and for your own.

>>> from fedlightning.callbacks import FedProx
>>> from fedlightning.testing import check_algorithm
>>> check_algorithm(FedProx(mu=0.1), only=["copies"])
['copies']
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedlightning.compat.quiet import quiet
from fedlightning.hooks import FederatedCallback
from fedlightning.testing.checks import CHECKS


def check_algorithm(
    algorithm: FederatedCallback,
    *,
    neutral: FederatedCallback | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    full: bool = False,
    **arguments: Any,
) -> list[str]:
    """Run the conformance checks on an algorithm.

    Args:
        algorithm: an instance with the options to check; it is copied for every check.
        neutral: an instance that must equal plain training with one client (`FedProx(mu=0)`); by default the check
            `one_client` is run on `algorithm` itself.
        only: names of the checks to run; by default all of :data:`fedlightning.testing.checks.CHECKS`.
        full: always use the toy module with batch normalisation, frozen, tied and integer entries.
        arguments: of the trainer, where the algorithm needs some (`local_steps=1`).
        skip: checks that cannot hold by the definition of the method (say why where you skip).

    Returns:
        The names of the checks that passed.

    Raises:
        AssertionError: from the first check that fails, with what was broken.
        ValueError: for an unknown check.
    """
    chosen, left_out = list(CHECKS if only is None else only), set(skip)
    unknown = sorted({*chosen, *left_out} - set(CHECKS))
    if unknown:
        raise ValueError(f"There is no check '{unknown[0]}'. The checks are {sorted(CHECKS)}.")
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

"""Every registered algorithm passes every check; a check is left out only with its reason in ``cases.py``.

The first case of each class runs always; further variants of it are slow tests (``make test-all``).
"""

from __future__ import annotations

import copy

import pytest

from fedlightning.catalogue import list_algorithms
from fedlightning.testing import CHECKS, check_algorithm
from tests.conformance.cases import CASES, Case

FIRST = {type(case.algorithm): name for name, case in reversed(CASES.items())}
PAIRS = [
    pytest.param(
        case,
        check,
        id=f"{name}-{check}",
        marks=() if FIRST[type(case.algorithm)] == name else pytest.mark.slow,
    )
    for name, case in CASES.items()
    for check in CHECKS
    if check not in case.skip
]


@pytest.mark.parametrize(("case", "check"), PAIRS)
def test_conformance(case: Case, check: str) -> None:
    check_algorithm(copy.deepcopy(case.algorithm), neutral=case.neutral, only=[check], **case.arguments)


def test_every_registered_algorithm_is_here() -> None:
    checked = {type(case.algorithm).__name__ for case in CASES.values()}
    assert set(list_algorithms()) - checked == set()

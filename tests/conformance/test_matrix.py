"""Every case of an algorithm with every check, each with runs of its own."""

from __future__ import annotations

import copy

import pytest

from fedlightning.testing import CHECKS, check_algorithm
from tests.conformance.case import Case, collect

pytestmark = pytest.mark.slow

CASES: dict[str, Case] = collect("CASES")


@pytest.mark.parametrize("name", CASES)
def test_all_checks(name: str) -> None:
    case = CASES[name]
    passed = check_algorithm(copy.deepcopy(case.algorithm), neutral=case.neutral, skip=case.skip, **case.arguments)
    assert passed == [check for check in CHECKS if check not in case.skip]

"""Every registered algorithm passes the checks; a check is left out only with its reason, in the algorithm's tests.

The cases are the `CASES` of the modules in `tests/callbacks`. Here stands one test a class, whose checks share their runs.
The longer checks look at a third of the classes each; each case with each check as users run it is in `test_matrix.py`,
which is slow.
"""

from __future__ import annotations

import copy
import zlib
from typing import Any

import pytest

from fedlightning.catalogue import ALGORITHMS
from fedlightning.testing import CHECKS, check_algorithm
from tests.conformance.case import Case, collect, missing

CASES: dict[str, Case] = collect("CASES")
FIRST = {type(case.algorithm): name for name, case in reversed(CASES.items())}
SHORT: dict[str, Any] = {"max_rounds": 2, "local_steps": 2, "sanity_check": False}
WHOLE: dict[str, Any] = SHORT | {"max_rounds": 3, "participation": 3}
SHARED: dict[str, dict[str, Any]] = {
    "arguments": {},
    "copies": {},
    # All of these look at one run, which the interrupted one must equal ...
    "resume": WHOLE | {"evaluation": 2},
    "absent_clients": WHOLE | {"evaluation": 2},
    "unchanged_by_a_run": WHOLE,
    # ... these at that one and one that is not evaluated ...
    "evaluation_changes_nothing": WHOLE,
    "trains": WHOLE,
    "order_of_clients": WHOLE | {"evaluation": 0},
    # ... and these at one with every kind of entry.
    "wire": SHORT,
    "every_kind_of_entry": SHORT,
    "small_and_empty_clients": {},
    "nan_client": SHORT,
    "unseen_clients": SHORT | {"max_rounds": 1},
    "joining_clients": SHORT,
    "identical_clients": SHORT,
    "one_client": {},
    "mixed_precision": SHORT | {"max_rounds": 1},
}
"""Checks in the order in which they share their runs, with the trainer's arguments that let them."""
ALWAYS = ("arguments", "copies", "resume", "absent_clients", "unchanged_by_a_run", "trains")
"""Checks that every class is put to here; of the others it is put to a third."""
SEEN_ELSEWHERE = ["same_seed_same_result"]  # order_of_clients and resume compare two runs with one seed, too


@pytest.mark.parametrize("name", FIRST.values())
def test_conformance(name: str) -> None:
    case = CASES[name]
    left_out = {"participation"} if "absent_clients" in case.skip else set()
    if "loop" in case.arguments:  # a visit may take several of its rounds
        left_out |= {"max_rounds"}
    for check, given in SHARED.items():
        if check in case.skip or not looked_at(name, check):
            continue
        arguments = {key: value for key, value in given.items() if key not in left_out}
        try:
            check_algorithm(
                copy.deepcopy(case.algorithm), neutral=case.neutral, only=[check], **arguments | case.arguments
            )
        except Exception as error:
            error.add_note(f"in check '{check}'")
            raise


def looked_at(name: str, check: str) -> bool:
    """Return True if a class is put to a check here: a choice that other classes do not change."""
    return check in ALWAYS or zlib.crc32(f"{name} {check}".encode()) % 3 == 0


def test_every_check_is_here_for_many_classes() -> None:
    assert sorted([*SHARED, *SEEN_ELSEWHERE]) == sorted(CHECKS)
    for check in SHARED:
        assert sum(looked_at(name, check) and check not in CASES[name].skip for name in FIRST.values()) >= 15


def test_every_registered_algorithm_is_here() -> None:
    without = missing([row.name for row in ALGORITHMS], CASES)
    assert not without, (
        f"The conformance suite does not know {', '.join(without)}. "
        "Add CASES = {'Name': Case(Name())} to the algorithm's module in tests/callbacks."
    )


def test_cases_are_named_after_their_class() -> None:
    for name, case in CASES.items():
        assert type(case.algorithm).__name__ == name.partition(" ")[0]

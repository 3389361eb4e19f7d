"""Every method on a GPU: the numbers of the CPU, the same bits again, and after an interruption."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from fedlightning.testing.runs import StopAfter, Stopped, assert_same
from tests.conformance.case import Case, collect
from tests.gpu.on import HERE, kept, near, run

CASES: dict[str, Case] = collect("CASES")
NAMED = [
    "FedAvg",
    "FedProx",
    "SCAFFOLD",
    "FedAdam",
    "APFL",
    "FENDA",
    "Ditto",
    "FLIU",
    "PLayerFL",
    "FedProto",
    "IFCA",
    "FedDF",
]
ALL = [*NAMED, *(name for name in CASES if name not in NAMED and name != "SecureAggregation")]
pytestmark = pytest.mark.gpu


@pytest.mark.fast_cases(len(NAMED))
@pytest.mark.parametrize("name", ALL)
def test_in_double_precision_a_method_ends_where_it_does_on_a_cpu(name: str) -> None:
    here, there = (run(CASES[name], precision="64-true", **where) for where in (HERE, {}))
    near(here, there, 1e-9)


@pytest.mark.parametrize("name", NAMED)
def test_in_single_precision_it_ends_close_to_it(name: str) -> None:
    near(run(CASES[name], **HERE), run(CASES[name]), 1e-4)


@pytest.mark.parametrize("name", NAMED)
def test_a_second_run_and_one_that_was_interrupted_have_the_same_bits(name: str, tmp_path: Any) -> None:
    options: dict[str, Any] = {"max_rounds": 3, "full": True, "participation": 3, **HERE}
    whole = run(CASES[name], **options)
    assert kept(whole)
    assert_same(whole, run(CASES[name], **options), "A second run differs", rows=False)
    with suppress(Stopped):
        run(CASES[name], tmp_path, others=[StopAfter(2)], **options)
    resumed = run(CASES[name], tmp_path, resume="last", **options)
    assert_same(whole, resumed, "A resumed run differs", rows=False)

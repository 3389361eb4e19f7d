"""The faults of tools/faults.toml can still be planted: their texts are those of the code that is there."""

from __future__ import annotations

import pytest

from tools.faults import ROOT, Fault, read


@pytest.mark.parametrize("fault", read(), ids=lambda fault: fault.name)
def test_a_fault_is_of_the_code_that_is_there(fault: Fault) -> None:
    fault.planted_in((ROOT / fault.file).read_text())
    assert [path for path in fault.tests if not (ROOT / path).exists()] == []

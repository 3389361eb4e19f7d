"""What a run of PLayer-FL leaves about its decision."""

from __future__ import annotations

import json
import math

import pytest

from fedlightning.callbacks.diagnostics.sensitivity import write_sensitivity
from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity


@pytest.mark.parametrize("threshold", [1.05, math.inf])
def test_the_files_say_what_was_found_and_decided(tmp_path, threshold):
    names, counts = ["body", "neck", "head"], [10, 4, 5]
    total = Sensitivity(names, counts, [1.0, 3.0, 0.5])
    clients = {"a": Sensitivity(names, counts, [0.25, 1.0, 0.5]), "b": Sensitivity(names, counts, [0.75, 2.0, 0.0])}
    write_sensitivity(tmp_path / "run", total, clients, threshold, split=2)
    found = json.loads((tmp_path / "run/sensitivity.json").read_text())
    assert found["split"] == 2 and found["threshold"] == (threshold if threshold < math.inf else None)
    assert found["clients"] == {"a": [0.25, 1.0, 0.5], "b": [0.75, 2.0, 0.0]}
    assert found["cumulative"] == [1.0, 4.0, 4.5]
    assert (tmp_path / "run/figures/sensitivity.png").read_bytes().startswith(b"\x89PNG")

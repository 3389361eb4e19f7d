"""Verdicts and numbers as they are written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedlightning.experiments.reproduce.results import times


@pytest.mark.parametrize(
    ("sets", "minutes", "shown"),
    [
        (["cpu"], {"cpu": 2.0, "all": 2.0}, "cpu: 2"),
        (["cpu"], {"cpu": 2.0, "hours": 2.0}, "cpu: 2, hours: 2"),
        (["cpu", "gpu"], {"cpu": 2.0}, "cpu: 2, gpu"),
        (["cpu"], {"all": 3.0}, "cpu, all: 3"),
        ([], {"all": 0.5}, "all: 0.5"),
    ],
)
def test_sets_with_their_minutes(sets, minutes, shown):
    assert times(SimpleNamespace(sets=sets, minutes=minutes)) == shown

"""Writes `tests/long.txt`, the tests that take long: `make measure-tests` on an idle machine, a plugin of pytest."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import LONG

LIMIT = 0.1
"""Seconds, with what is set up for a test and taken down after it."""


class Durations:
    """Adds up what each test took, and writes the list when all have run."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        LONG.write_text("".join(f"{test}\n" for test in sorted(self.seconds) if self.seconds[test] > LIMIT))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hands out tests gets all reports
        config.pluginmanager.register(Durations())

"""Where there is no GPU, these tests are skipped, with the reason."""

from __future__ import annotations

import pytest

from tests.gpu.on import ACCELERATOR, tf32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder unless there is a device for them."""
    skip = pytest.mark.skip(reason="needs a GPU; FEDLIGHTNING_TEST_ACCELERATOR=cpu runs it without one")
    for item in items:
        if not ACCELERATOR and item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _whole_single_precision() -> None:
    tf32(False)

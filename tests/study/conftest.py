"""Reports without the figures for print, which take most of the time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quick_reports(figures_for_print, readers_fonts):
    """Write no figures for print, and fonts in the quick way."""

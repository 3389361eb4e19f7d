"""The page of a call of `fedlightning reproduce`: each table with a figure of published values against ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlightning.experiments.reproduce.summary import Told

FILE = "report.html"


def write_page(out: Path, tables: Sequence[Told], lost: Sequence[str], moved: Sequence[str]) -> Path:
    """Write the page into a folder."""
    return out / FILE

"""Reports without the figures for print, which take most of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlightning.report import context, drawing


@pytest.fixture(autouse=True, scope="session")
def figures_for_print() -> Iterator[Callable[..., None]]:
    """Write the SVG files of a report alone. Gives the function that writes all."""

    def save(figure: Any, text: str, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")

    with pytest.MonkeyPatch.context() as patch:
        real = context.save
        patch.setattr(context, "save", save)
        yield real


@pytest.fixture(autouse=True, scope="session")
def readers_fonts() -> Iterator[int]:
    """Embed fonts in PDFs in the quick way, which saves a third of a report. Gives the way that readers get."""
    with pytest.MonkeyPatch.context() as patch:
        kind: int = drawing._LOOK["pdf.fonttype"]
        patch.setitem(drawing._LOOK, "pdf.fonttype", 3)
        yield kind

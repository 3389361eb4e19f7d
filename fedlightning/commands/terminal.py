"""The terminal that commands print to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType


def console() -> Console:
    """Return the terminal, with 100 columns if the output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=100)


def say(screen: Console, text: RenderableType, **style: Any) -> None:
    """Print a text as it is: a terminal breaks its lines, and nothing in it is set in colour by itself."""
    screen.print(text, soft_wrap=True, highlight=False, **style)


def shown(path: Path) -> Path:
    """Return a path as it is shown: relative to the working directory if it is inside."""
    return path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path

"""Colour, marker and line of each method, the same on the whole page."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

INK, MUTED = "#1c2126", "#5b6570"
BAD, WARN = "#b3261e", "#8a5300"
ON_DARK, ON_BRIGHT = "#fefefe", "#1b2026"
"""Text in maps, whose ground stays as it is in a dark page."""

# After Okabe & Ito (2008), some made darker: each has a contrast of 3:1 against white, neighbours differ in lightness.
COLOURS = (
    "#0072b2", "#d55e00", "#008f6b", "#aa3377", "#9a7400", "#332288",
    "#3b93cf", "#7a4b2a", "#d9558f", "#5f7a1f", "#1c7c8c", "#c0392b",
)  # fmt: skip
GREYS = ("#4d4d4d", "#808080", "#2b2b2b", "#6b6b6b")
GREY_MARKERS = ("X", "P", "h", "d")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "p", "h", "d", "P", "X")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.2, 1.2)))
SEQUENTIAL = "cividis"


@dataclass(frozen=True)
class Style:
    """Colour, marker and line of a method.

    Attributes:
        colour: `#rrggbb`.
        marker: Marker of matplotlib.
        line: Line style of matplotlib.
    """

    colour: str
    marker: str
    line: Any = "-"


DARK = {
    "#ffffff": "#14181d", INK: "#e4e8ec", MUTED: "#9ba6b2", "#d9dee3": "#2f3740", BAD: "#ff8f85", WARN: "#f0b35a",
}  # fmt: skip
"""Colours of paper, text and grid, and those that take their place in a dark page."""


def in_dark(colour: str) -> str:
    """Return the colour that takes the place of one in a dark page: of a method, the same hue, as light as it must be.

    Example:
        >>> in_dark("#332288"), in_dark("#ffffff")
        ('#8d7cde', '#14181d')
    """
    if colour in DARK:
        return DARK[colour]
    hue, lightness, saturation = colorsys.rgb_to_hls(*(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)))
    light = max(lightness, 0.68) if saturation else 1 - lightness  # greys stay apart
    red, green, blue = colorsys.hls_to_rgb(hue, light, min(saturation, 0.75))
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def variable(colour: str) -> str:
    """Return a colour as the page's style sheet knows it, which has another one for dark pages.

    Example:
        >>> variable("#0072b2"), variable("#fefefe")
        ('var(--c-0072b2, #0072b2)', '#fefefe')
    """
    return f"var(--c-{colour[1:]}, {colour})" if colour in (*DARK, *COLOURS, *GREYS) else colour


def dark_variables() -> str:
    """Return the style sheet's declarations of the colours of figures in a dark page."""
    return " ".join(f"--c-{colour[1:]}: {in_dark(colour)};" for colour in (*DARK, *COLOURS, *GREYS))


def styles(methods: Iterable[str], baselines: Iterable[str] = ()) -> dict[str, Style]:
    """Return a style for every method, by its place in the list. Baselines are grey.

    After twelve methods, colours repeat with another marker and line, so that no two methods look the same.
    """
    grey = set(baselines)
    out: dict[str, Style] = {}
    places = {True: 0, False: 0}
    for method in dict.fromkeys(methods):
        baseline = method in grey
        place = places[baseline]
        places[baseline] += 1
        palette = GREYS if baseline else COLOURS
        turn = place // len(palette)
        markers = GREY_MARKERS if baseline else MARKERS
        marker = markers[(place + turn * 5) % len(markers)]
        out[method] = Style(palette[place % len(palette)], marker, LINES[(place + turn + baseline) % len(LINES)])
    return out


def shorten(name: str, limit: int = 22) -> str:
    """Return a name that fits beside an axis. Long names lose their middle, since they often differ at their ends.

    Example:
        >>> shorten("fedprox_with_a_very_long_name_mu_0.3")
        'fedprox_with…me_mu_0.3'
    """
    if len(name) <= limit:
        return name
    head = (limit - 1) * 3 // 5
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


def short_names(names: Iterable[str], limit: int = 22) -> dict[str, str]:
    """Return shortened names, numbered if two would look the same."""
    out: dict[str, str] = {}
    for name in names:
        short, number = shorten(name, limit), 2
        while short in out.values():
            ending = f" ({number})"
            short, number = shorten(name, limit - len(ending)) + ending, number + 1
        out[name] = short
    return out

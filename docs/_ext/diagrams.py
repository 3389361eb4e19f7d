"""Diagrams as SVG, drawn from text: what a method sends and keeps, and the data flow of a round.

Colours are those of the page around a diagram (`currentColor`), so that it is legible on light and on dark pages. A file that
stands alone (`python docs/_ext/diagrams.py` writes `docs/images/round.svg`) asks the browser which one it is on.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from pathlib import Path

LINE = 17
"""Height of a line of text."""
STYLE = """
.flow { color: #1f2328; font: 13px system-ui, sans-serif; max-width: 100%; height: auto }
.flow text { fill: currentColor }
.flow .name { font-weight: 600; font-size: 15px }
.flow .quiet { opacity: .75 }
.flow rect { fill: none; stroke: currentColor; stroke-width: 1.4; rx: 8 }
.flow path { fill: none; stroke: currentColor; stroke-width: 1.6 }
.flow .down { stroke: #2f81f7 } .flow .up { stroke: #d9822b }
.flow .stays { stroke-dasharray: 5 4 }
"""
ALONE = "@media (prefers-color-scheme: dark) { .flow { color: #e6edf3 } }\n"


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` characters."""
    return textwrap.wrap(text, width) or [""]


def lines_at(x: float, y: float, lines: Sequence[str], kind: str = "", anchor: str = "start") -> str:
    """Return lines of text, the first with its baseline at `y`."""
    spans = "".join(
        f'<tspan x="{x}" y="{y + LINE * number}">{html.escape(line)}</tspan>' for number, line in enumerate(lines)
    )
    return f'<text class="{kind}" text-anchor="{anchor}">{spans}</text>'


def arrow(x1: float, x2: float, y: float, kind: str) -> str:
    """Return a horizontal arrow from `x1` to `x2`."""
    back = -8 if x2 > x1 else 8
    return f'<path class="{kind}" d="M{x1} {y} H{x2} m{back} -5 l{-back} 5 l{back} 5"/>'


def drawing(width: float, height: float, title: str, parts: Sequence[str], alone: bool = False) -> str:
    """Return an SVG; `alone`: as a file with its own colours, else as a part of a page that has :data:`STYLE`."""
    style = f"<style>{STYLE}{ALONE}</style>" if alone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="flow" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{html.escape(title)}">{style}{"".join(parts)}</svg>\n'
    )


def of_method(name: str, down: str, up: str, leaves: str, client: str, server: str, without_server: bool) -> str:
    """Return the diagram of a method: what each side keeps, and what travels between them.

    Args:
        name: Name of the method.
        down: What goes to a client.
        up: What comes from a client.
        leaves: The entries that may ever leave a client.
        client: What a client keeps.
        server: What the server keeps; for a method without a server, what a neighbour does.
        without_server: Whether neighbours talk to each other.
    """
    if without_server:
        server, down = "each is a client like the other", "the same from each neighbour"
    left = wrapped(server if without_server else f"keeps: {server}", 27)
    right = wrapped(f"keeps: {client}", 27)
    foot = wrapped(f"may leave: {leaves}", 27)
    downs, ups = wrapped(down, 30), wrapped(up, 30)
    inner = max(len(left), len(right) + len(foot) + 0.5, len(downs) + len(ups) + 1.5)
    height = 46 + LINE * inner + 16
    middle = 46 + LINE * (len(downs) - 0.2)
    second = middle + 14 + LINE * len(ups)
    height = max(height, second + 16)
    parts = [
        f'<rect x="1" y="1" width="210" height="{height - 2}"/>',
        lines_at(14, 26, ["Its neighbours" if without_server else "Server"], "name"),
        lines_at(14, 48, left),
        f'<rect class="stays" x="449" y="1" width="210" height="{height - 2}"/>',
        lines_at(462, 26, ["A client"], "name"),
        lines_at(462, 48, right),
        lines_at(462, 48 + LINE * (len(right) + 0.5), foot, "quiet"),
        lines_at(330, 34, downs, anchor="middle"),
        arrow(216, 443, middle, "down"),
        lines_at(330, middle + 20, ups, anchor="middle"),
        arrow(443, 216, second + 6, "up"),
    ]
    return drawing(660, height, f"What {name} sends and keeps", parts)


def of_a_round(alone: bool = False) -> str:
    """Return the picture of a round; `alone`: as a file of its own."""
    server = ["picks participants,", "averages what comes,", "evaluates (stage G),", "saves the round"]
    visit = ["receive and merge (L1)", "train with Lightning", "your callbacks run here", "send an update (L2)"]
    parts = [
        '<rect x="1" y="60" width="190" height="150"/>',
        lines_at(96, 88, ["Server"], "name", "middle"),
        lines_at(96, 112, server, "", "middle"),
        '<rect x="740" y="60" width="170" height="150"/>',
        lines_at(825, 88, ["In a client"], "name", "middle"),
        lines_at(825, 112, visit, "", "middle"),
        lines_at(314, 20, ["model down"], "quiet"),
        lines_at(314, 268, ["update up"], "quiet"),
        '<path class="down" d="M290 16 h15"/><path class="up" d="M290 264 h15"/>',
    ]
    for number, (name, y) in enumerate((("Client A", 1), ("Client B", 100), ("Client C", 199))):
        first = "what is personal stays" if number == 1 else "your LightningModule"
        leaves, comes = 118 + 12 * number, 136 + 22 * number
        head, tail = "m-8 -5 l8 5 l-8 5", "m8 -5 l-8 5 l8 5"
        parts += [
            f'<rect class="stays" x="500" y="{y}" width="220" height="78"/>',
            lines_at(610, y + 24, [name], "name", "middle"),
            lines_at(610, y + 45, [first, "your data, which stay"], "", "middle"),
            f'<path class="down" d="M196 {leaves} C 330 {leaves}, 360 {y + 30}, 488 {y + 30} {head}"/>',
            f'<path class="up" d="M496 {y + 48} C 370 {y + 48}, 330 {comes}, 202 {comes} {tail}"/>',
        ]
    title = "One round: the server sends models, clients train on their own data and send updates"
    return drawing(912, 280, title, parts, alone)


if __name__ == "__main__":
    (Path(__file__).resolve().parents[1] / "images" / "round.svg").write_text(of_a_round(alone=True))

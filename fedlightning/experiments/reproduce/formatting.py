"""Verdicts and numbers as they are written on the terminal and on pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedlightning.experiments.reproduce.record import counts
from fedlightning.experiments.reproduce.results import Line
from fedlightning.experiments.reproduce.tables import ALL, Table
from fedlightning.experiments.reproduce.verdicts import BAD, INCONCLUSIVE


def chance(expected: float, judged: int) -> str:
    """Return how many verdicts chance alone would turn to *disagrees*, with the model behind the number.

    Example:
        >>> chance(0.0, 0)
        'No verdict rests on a random run, so none disagrees by chance.'
    """
    if not judged:
        return "No verdict rests on a random run, so none disagrees by chance."
    return (
        f"By chance alone at most {expected:.2g} of the {judged} verdicts that rest on random runs would be 'disagrees' "
        "(each with 2.5 %, if its true mean lies within the tolerance and seeds are independent)."
    )


def digits(line: Line) -> int:
    """Return decimals that show the published value and the tolerance.

    Example:
        >>> from fedlightning.experiments.reproduce.verdicts import judge
        >>> digits(Line("a", judge([0.7], 0.724, 0.03), published=0.724, tolerance=0.03))
        4
    """
    known = [one for one in (line.published, line.tolerance) if one]
    shown = max((len(f"{abs(one):.10f}".rstrip("0").partition(".")[2]) for one in known), default=2)
    return min(shown + 1, 8)


def number_of(value: float | None, places: int) -> str:
    """Write a number with as many decimals, or more briefly if it is large."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    return f"{value:.{places}f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.4g}"


def ours(line: Line) -> str:
    """Write the mean over seeds with its interval."""
    verdict, places = line.verdict, digits(line) if line.published is not None else 4
    if verdict.mean is None:
        return "-"
    text = f"{verdict.mean:.{places}f}"
    if verdict.low is not None and verdict.high is not None and verdict.low != verdict.high:
        text += f" [{verdict.low:.{places}f}, {verdict.high:.{places}f}]"
    return text


def row_of(line: Line) -> dict[str, str]:
    """Return the columns of a cell or order: its name, the published value with the tolerance, ours, and the verdict."""
    places = digits(line)
    published = "" if line.is_order else f"{number_of(line.published, places)} ± {number_of(line.tolerance, places)}"
    return {"name": line.name, "published": published, "ours": ours(line), "verdict": line.verdict.word}


def reasons(lines: Sequence[Line]) -> list[str]:
    """Return why verdicts are what they are, each reason once, with the cells that it is about."""
    found: dict[str, list[str]] = {}
    for line in lines:
        given = line.why if line.verdict.word in (*BAD, INCONCLUSIVE) else ""
        for text in filter(None, (line.verdict.why, given)):
            found.setdefault(text, []).append(line.name)
    return [f"{'all' if len(names) == len(lines) else _few(names)}: {text}" for text, names in found.items()]


def _few(names: Sequence[str]) -> str:
    return "; ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def left_out(lines: Sequence[Line]) -> list[str]:
    """Return a sentence on the lines that need runs of another set; none, if there are none."""
    number = sum(not line.asked for line in lines)
    return (
        [f"{number} more {'need' if number > 1 else 'needs'} runs of other sets than was asked for."] if number else []
    )


def times(table: Table) -> str:
    """Return the sets of a table with their expected minutes, and those of all runs if they are others."""
    known = dict.fromkeys(table.sets) | dict(table.minutes)
    if len(known) > 1 and known.get(ALL) == next(iter(known.values())):
        known.pop(ALL)
    return ", ".join(name if minutes is None else f"{name}: {minutes:g}" for name, minutes in known.items())


def verdict_counts(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return how many lines have each verdict, in words.

    Example:
        >>> verdict_counts([{"verdict": "agrees"}, {"verdict": "agrees"}, {"verdict": "not run"}])
        '2 agrees, 1 not run'
    """
    return ", ".join(f"{number} {word}" for word, number in counts(lines).items())

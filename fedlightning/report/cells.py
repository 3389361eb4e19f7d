"""Cells of tables: each column has one number of decimals, so that decimal points stand under each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

Kind = Literal["text", "method", "score", "difference", "amount", "count", "p", "percent", "interval", "figures"]
NONE = "–"
"""Text of a cell where nothing was measured and nothing went wrong."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: Key of the value in a row.
        title: Title above the column.
        kind: Format of the value. `score`: fixed decimals; `difference`: with its sign; `amount`: decimals by size;
            `count`: whole, with thin spaces; `interval`: a pair `[low, high]`; `p`: a p-value; `figures`: three
            significant digits.
        group: Title above several columns.
        decimals: Decimals of scores, differences and intervals.
        radius: Key of a half width, written small behind the value as ±.
        interval: Key of a pair, written small behind the value as [low, high].
        better: End that is set in bold type.
        help: Meaning of the column, in one line.
    """

    key: str
    title: str
    kind: Kind = "score"
    group: str = ""
    decimals: int = 3
    radius: str | None = None
    interval: str | None = None
    better: Literal["high", "low"] | None = None
    help: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: Text of the cell.
        extra: Small text behind it.
        value: The number with all its digits, for sorting.
        state: `"best"` is bold, `"none"` grey, `"bad"` red.
        title: Longer text, shown on hovering.
    """

    text: str
    extra: str = ""
    value: str = ""
    state: Literal["", "best", "none", "bad"] = ""
    title: str = ""


Missing = Callable[[Mapping[str, Any], Column], str | None]
"""Function that returns in a few words why a row has no value in a column, or `None` if there is nothing to say."""


def layout(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], missing: Missing | None = None, across: bool = False
) -> list[list[Cell]]:
    """Return the cells of a table, row by row."""
    down = {column.key: _best(column, rows) for column in columns}
    digits = {column.key: _decimals(column, rows) for column in columns}
    lines = []
    for row in rows:
        best = _best_across(columns, row) if across else down
        lines.append(
            _shortened([_cell(row, column, digits[column.key], best[column.key], missing) for column in columns])
        )
    return lines


def _shortened(cells: list[Cell]) -> list[Cell]:
    """Write a reason in full where it comes first in a row, and in brief after that."""
    reasons: set[str] = set()
    out = []
    for cell in cells:
        if cell.state == "bad" and cell.text in reasons:
            cell = Cell(re.split(r"[:(]", cell.text)[0].strip(), state="bad", title=cell.text)
        elif cell.state == "bad":
            reasons.add(cell.text)
        out.append(cell)
    return out


def is_number(value: Any) -> TypeGuard[float]:
    """Return True if `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: float, decimals: int = 3, sign: bool = False) -> str:
    """Write a number with fixed decimals, a true minus and thin spaces between thousands."""
    text = f"{value:+,.{decimals}f}" if sign else f"{value:,.{decimals}f}"
    if float(text.replace(",", "")) == 0:
        text = text.replace("-", "+" if sign else "")
    return text.replace(",", "\u2009").replace("-", "−")


def p_value(p: float) -> str:
    """Write a p-value with two or three decimals, and "< 0.001" below that."""
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if p < 0.095 else f"{p:.2f}"


def counted(key: str, title: str, rows: Iterable[Mapping[str, Any]], **options: Any) -> Column:
    """Return a column of counts that are means over seeds: whole where all of them are, else with one decimal.

    Example:
        >>> counted("rounds", "rounds", [{"rounds": 3.0}]).decimals, counted("n", "n", [{"n": 2.5}]).decimals
        (0, 1)
    """
    whole = all(float(row[key]).is_integer() for row in rows if is_number(row.get(key)))
    return Column(key, title, decimals=0 if whole else 1, **options)


def pair(interval: Sequence[float], decimals: int = 3, sign: bool = False) -> str:
    """Write an interval as `[low, high]`."""
    return f"[{number(interval[0], decimals, sign)}, {number(interval[1], decimals, sign)}]"


def interval_of(row: Mapping[str, Any], key: str = "ci95") -> Sequence[float] | None:
    """Return the interval of a row if both ends are numbers and it is made from more than one value, else `None`."""
    ends = row.get(key)
    if ends is None or not all(map(is_number, ends)) or row.get("n_seeds", 2) < 2:
        return None
    return list(ends)


def summary(values: Sequence[tuple[str, float | None]], decimals: int = 3, most: int = 12) -> str:
    """Return names with their numbers, for an alternative text."""
    numbered = [f"{name} {value:.{decimals}f}" for name, value in values if is_number(value)]
    more = f", and {len(numbered) - most} more" if len(numbered) > most else ""
    return ", ".join(numbered[:most]) + more


def _cell(row: Mapping[str, Any], column: Column, decimals: int, best: float | None, missing: Missing | None) -> Cell:
    value = row.get(column.key)
    if column.kind in ("text", "method"):
        return Cell(NONE, state="none") if value in (None, "") else Cell(str(value), value=str(value))
    if column.kind == "interval":
        if value is None or not all(map(is_number, value)):
            return _absent(row, column, value, missing)
        return Cell(pair(value, decimals), value=f"{value[0]!r} {value[1]!r}")
    if isinstance(value, str):  # a word instead of a number, such as "best"
        return Cell(value)
    if not is_number(value):
        return _absent(row, column, value, missing)
    return Cell(
        _text(float(value), column, decimals),
        _extra(row, column, decimals),
        repr(value),
        "best" if best is not None and value == best and is_ranked(row) else "",
    )


def _text(value: float, column: Column, decimals: int) -> str:
    if column.kind == "p":
        return p_value(value)
    if column.kind == "percent":
        return f"{number(value, decimals)}\u2009%"
    if column.kind == "figures":
        return f"{value:.3g}".replace("-", "−")
    return number(value, decimals, sign=column.kind == "difference")


def _extra(row: Mapping[str, Any], column: Column, decimals: int) -> str:
    if column.radius is not None:
        radius = row.get(column.radius)
        ends = row.get(column.radius.replace("_radius", "" if column.radius == "ci95_radius" else "_ci95"))
        if is_number(radius) or ends is None or not all(map(is_number, ends)):
            return f"±\u2009{number(radius, decimals)}" if is_number(radius) else ""
        return pair(ends, decimals)  # cut at the end of what the metric can be: not symmetric
    if column.interval is not None:
        interval = row.get(column.interval)
        complete = interval is not None and all(map(is_number, interval))
        return pair(interval, decimals, column.kind == "difference") if complete and interval is not None else ""
    return ""


def _absent(row: Mapping[str, Any], column: Column, value: Any, missing: Missing | None) -> Cell:
    why = missing(row, column) if missing is not None else None
    if isinstance(value, float) and why is None:  # NaN or infinite
        why = f"undefined ({value})"
    return Cell(why, state="bad") if why else Cell(NONE, state="none")


def _decimals(column: Column, rows: Iterable[Mapping[str, Any]]) -> int:
    if column.kind == "count":
        return 0
    if column.kind == "percent":
        return 0 if all(float(v or 0).is_integer() for row in rows if is_number(v := row.get(column.key))) else 1
    if column.kind != "amount":
        return column.decimals
    values = [abs(float(value)) for row in rows if is_number(value := row.get(column.key)) and value]
    if not values:
        return 0
    return max(0, min(3, 1 - math.floor(math.log10(min(values)))))


def _best(column: Column, rows: Iterable[Mapping[str, Any]]) -> float | None:
    if column.better is None:
        return None
    values = [value for row in rows if is_ranked(row) and is_number(value := row.get(column.key))]
    if len(values) < 2:
        return None
    return max(values) if column.better == "high" else min(values)


def _best_across(columns: Sequence[Column], row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the best value of a row for every column with a better end, which is the same for all of them."""
    asked = [column for column in columns if column.better is not None]
    values = [value for column in asked if is_number(value := row.get(column.key))]
    best = None if len(values) < 2 else max(values) if asked[0].better == "high" else min(values)
    return {column.key: best if column.better is not None else None for column in columns}


def is_ranked(row: Mapping[str, Any]) -> bool:
    """Return True if a row covers all seeds on the data of the other rows. Only such rows have best values."""
    return bool(row.get("comparable", True)) and row.get("n_seeds", 0) >= row.get("seeds", 0)

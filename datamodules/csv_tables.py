"""A CSV file as columns: numbers with gaps, or words."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from fedlightning.ranges import number_in

GAPS = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""Cells that hold no value, whatever their case."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest number that a sample holds, which is of single precision."""
PRECISION = 2.0**24
"""So many times a distance is the distance beside which it is none in single precision."""
MOST_LEVELS = 50
"""Different words that a column of categories may have."""


@dataclass
class Column:
    """A column of a table.

    Attributes:
        name: Its name in the header.
        cells: Its cells without spaces around them; `""` for a gap.
        numbers: The cells as float64, NaN for a gap; `None` if a cell is a word.
    """

    name: str
    cells: list[str]
    numbers: np.ndarray | None


@dataclass(frozen=True)
class Form:
    """How a CSV file is written; what is `None` is found out.

    Attributes:
        delimiter: Character between two cells: of comma, semicolon, tab and bar the one that gives the header and the first
            rows as many cells, and most.
        decimal: Sign before the fraction of a number. A comma is taken for one only where it cannot be a mark of thousands;
            in a file of such commas, so is a point.
        encoding: Of the text, as Python names it.
    """

    delimiter: str | None = None
    decimal: str | None = None
    encoding: str = "utf-8-sig"


def read_table(
    path: Path, form: Form = Form(), only: Collection[str] | None = None, index: str | None = None
) -> dict[str, Column]:
    r"""Return the columns of a CSV file with a header, by name.

    Args:
        path: The file.
        form: How it is written.
        only: Columns that are used; others are not looked at. `None`: all.
        index: Name of the first column if the header has none, as pandas writes it.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.csv_tables import read_table
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "patients.csv")
        ...     _ = path.write_text("age,sex\n63,f\n?,m\n")
        ...     table = read_table(path)
        >>> table["age"].numbers, table["sex"].cells
        (array([63., nan]), ['f', 'm'])
    """
    if not os.path.isfile(path):  # is_file() raises where a name is too long
        raise FileNotFoundError(f"There is no file {path}; give the path of a CSV file with a header.")
    rows: list[list[str]] = []
    try:
        delimiter = delimiter_of(path, form)
        with path.open(newline="", encoding=form.encoding) as file:
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(reader, [])]
            if header[:1] == [""] and index is not None:
                header[0] = index
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(row)} cells under {len(header)} names; write one cell for "
                        "each column, in quotes if it holds the delimiter."
                    )
                rows.append(row)
    except UnicodeError as error:  # not of bytes alone: utf-16 wants its mark at the beginning
        named = "UTF-8" if form.encoding == "utf-8-sig" else form.encoding
        raise ValueError(
            f"{path} cannot be read as CSV in {named} ({error}); save it as UTF-8, or give its encoding: cp1252 is usual for "
            "files of Excel in Western Europe, utf-16 for its Unicode text."
        ) from error
    except csv.Error as error:  # strict: an open quote would take the next rows into its cell
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}; it cannot be read as CSV, close each quote."
        ) from error
    if not rows or "" in header or len(set(header)) < len(header):
        wrong = "no rows" if not rows else "a column without a name" if "" in header else "two columns of one name"
        raise ValueError(f"{path} has {wrong}; the first line names every column, the others are the samples.")
    table: dict[str, Column] = {}
    marked: dict[str, list[str]] = {}
    commas = form.decimal == ","
    for place, name in enumerate(header):
        if only is not None and name not in only:
            continue
        cells = [row[place].strip() for row in rows]
        cells = ["" if cell.lower() in GAPS else cell for cell in cells]
        if delimiter != "," or form.decimal == ",":
            cells, written = _with_points(cells, form.decimal), cells
            commas |= cells != written
            marked[name] = [cell for cell in written if "." in cell]
        table[name] = Column(name, cells, _numbers(path, name, cells))
    for name, cells in marked.items():
        if commas and cells and all(_THOUSANDS.fullmatch(cell) for cell in cells):
            table[name].numbers = None  # words, until somebody asks for numbers: then they are refused
    return table


def delimiter_of(path: Path, form: Form = Form()) -> str:
    r"""Return the character between two cells of a file; see :class:`Form`.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "klinik.csv")
        ...     _ = path.write_text("alter;dosis\n63;0,5\n71;1,25\n")
        ...     delimiter_of(path), read_table(path)["dosis"].numbers
        (';', array([0.5 , 1.25]))
    """
    if form.delimiter is not None:
        return form.delimiter
    with path.open(newline="", encoding=form.encoding) as file:
        lines = [line for _, line in zip(range(5), file, strict=False)]
    counts = {}
    for delimiter in ",;\t|":
        with suppress(csv.Error):
            widths = {len(row) for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True) if row}
            counts[delimiter] = widths.pop() if len(widths) == 1 else 1
    best = max(counts, key=lambda delimiter: counts[delimiter], default=",")
    return best if counts.get(best, 1) > 1 else ","


_COMMA = re.compile(r"[-+]?\d*,\d+(?:[eE][-+]?\d+)?")
"""A number with a decimal comma."""
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}[.,]\d{3}")
"""A number whose sign may be a mark of thousands."""


def _with_points(cells: list[str], decimal: str | None) -> list[str]:
    """Return the cells of a column of numbers with points instead of decimal commas; others as they are."""
    commas = [cell for cell in cells if _COMMA.fullmatch(cell)]
    plain = all(not cell or _COMMA.fullmatch(cell) or re.fullmatch(r"[-+]?\d+", cell) for cell in cells)
    thousands = all(_THOUSANDS.fullmatch(cell) for cell in commas)
    if not commas or not plain or decimal == "." or (decimal is None and thousands):
        return cells
    return [cell.replace(",", ".") for cell in cells]


def text_of(path: Path) -> str:
    r"""Return a file of text in UTF-8, with or without a byte order mark.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.csv_tables import text_of
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "words.txt")
        ...     _ = path.write_bytes(b"\xef\xbb\xbfpain\n")
        ...     text_of(path)
        'pain\n'
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); get it again, or save it as that.") from error


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        ValueError: If it is not JSON, or a key is there twice, of which one would be lost.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.csv_tables import read_json
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.json")
        ...     _ = path.write_text('{"x": [1, 2]}')
        ...     read_json(path)
        {'x': [1, 2]}
    """

    def table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"the key {twice[0]!r} stands there twice")
        return dict(pairs)

    try:
        return json.loads(text_of(path), object_pairs_hook=table_of)
    except (ValueError, RecursionError) as error:
        deep = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{path} cannot be read as JSON: {deep}. Write it again.") from error


def read_header(path: Path, form: Form = Form()) -> list[str]:
    """Return the names of the columns of a CSV file."""
    with path.open(newline="", encoding=form.encoding) as file:
        rows = csv.reader(file, delimiter=delimiter_of(path, form), skipinitialspace=True)
        return [name.strip() for name in next(rows, [])]


def _numbers(path: Path, name: str, cells: Sequence[str]) -> np.ndarray | None:
    values, words = np.full(len(cells), np.nan), []
    for row, cell in enumerate(cells):
        try:
            values[row] = number_in(cell) if cell else math.nan
        except ValueError:
            words.append(row)
    num_filled = sum(map(bool, cells))
    if words and 2 * len(words) < num_filled:
        raise ValueError(
            f"{path}: column {name!r} holds numbers, but {cells[words[0]]!r} in sample {words[0] + 1}; correct it, leave the "
            "cell empty if the value is missing, or drop the column."
        )
    if np.isinf(values).any():
        raise ValueError(f"{path}: column {name!r} holds an infinite number; leave the cell empty if it is missing.")
    return None if words else values


_OTHER_NUMBER = re.compile(r"[-+\u2212]?[\d.,' ]*\d[\d.,' ]*%?")
"""A number with a decimal comma, marks of thousands, a percent sign, or digits of another script."""

_DATE = re.compile(r"(\d{4}([-./])\d{1,2}\2\d{1,2}|\d{1,2}([-./])\d{1,2}\3(\d{2}|\d{4}))([T ]\d{1,2}:\d\d.*)?")
"""A day in numbers, perhaps with the time."""


def refuse_other_numbers(path: Path, column: Column, way: str) -> None:
    """Refuse a column of words of which most are numbers that are written otherwise, and would be as many categories.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.csv_tables import Column, refuse_other_numbers
        >>> refuse_other_numbers(Path("a.csv"), Column("dose", ["0,5", "1,25", ""], None), "give categorical: [dose]")
        Traceback (most recent call last):
        ValueError: a.csv: column 'dose' holds '0,5', which is not a number here: write it as 1234.5, without ...
    """
    words = [cell for cell in column.cells if cell]
    other = [cell for cell in words if _OTHER_NUMBER.fullmatch(cell) or _DATE.fullmatch(cell)]
    if column.numbers is None and 2 * len(other) > len(words):
        signed = next((cell for cell in other if not cell.isdigit()), other[0])
        if _DATE.fullmatch(signed):
            raise ValueError(
                f"{path}: column {column.name!r} holds {signed!r}, a date, and features are numbers. Write an age or a "
                f"number of days in its place, or leave the column out with drop: [{column.name}]. If it is a word, {way}."
            )
        raise ValueError(
            f"{path}: column {column.name!r} holds {signed!r}, which is not a number here: write it as 1234.5, without marks "
            f"of thousands, or give decimal: ',' if the comma begins its fraction. If it is a word, {way}."
        )


def finite(cell: str) -> float:
    """Return a cell as a number that is neither infinite nor NaN.

    Raises:
        ValueError: If it is none.

    Example:
        >>> from fedlightning.datamodules.csv_tables import finite
        >>> finite(" 2.5")
        2.5
    """
    if not abs(value := number_in(cell)) <= LARGEST:
        raise ValueError(f"{cell!r} is not a finite number of single precision")
    return value


def column_of(table: dict[str, Column], name: str, what: str) -> Column:
    """Return a column by its name.

    Example:
        >>> from fedlightning.datamodules.csv_tables import Column, column_of
        >>> column_of({"age": Column("age", [], None)}, "agee", "target")
        Traceback (most recent call last):
        ValueError: There is no column 'agee' (target); did you mean 'age'? The columns are age.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"There is no column {name!r} ({what}){hint} The columns are {', '.join(table)}.")


def refuse_twice(path: Path, cells: Sequence[str], what: str) -> None:
    """Refuse a table that has something on two lines, which may then be trained on and tested.

    Raises:
        ValueError: With the first of them.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.csv_tables import refuse_twice
        >>> refuse_twice(Path("a.csv"), ["p1", "p2", "p1"], "patient")
        Traceback (most recent call last):
        ValueError: a.csv has the patient 'p1' on two lines; remove one of them.
    """
    again = next((cell for cell, count in Counter(cells).items() if count > 1), None)
    if again is not None:
        raise ValueError(f"{path} has the {what} {again!r} on two lines; remove one of them.")


def numbers_of(path: Path, column: Column) -> np.ndarray:
    """Return a column of numbers without gaps, float64 `(samples,)`.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.csv_tables import Column, numbers_of
        >>> numbers_of(Path("a.csv"), Column("age", ["61", "x"], None))
        Traceback (most recent call last):
        ValueError: a.csv, sample 2: 'x' in column 'age' is not a number.
    """
    if column.numbers is not None and not np.isnan(column.numbers).any():
        if (beyond := np.flatnonzero(np.abs(column.numbers) > LARGEST)).size:
            raise ValueError(
                f"{path}, sample {beyond[0] + 1}: {column.cells[beyond[0]]!r} in column {column.name!r} is not a number of "
                "single precision."
            )
        return column.numbers
    for sample, cell in enumerate(column.cells, start=1):
        try:
            number_in(cell)
        except ValueError:
            what = f"{cell!r} in column {column.name!r} is not a number" if cell else f"column {column.name!r} is empty"
            raise ValueError(f"{path}, sample {sample}: {what}.") from None
    refuse_other_numbers(path, column, "leave the column out")
    raise AssertionError("a column without numbers has a cell that is none")


def whole_of(path: Path, column: Column) -> np.ndarray:
    """Return a column of whole numbers without gaps, int64 `(samples,)`.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.csv_tables import Column, whole_of
        >>> whole_of(Path("a.csv"), Column("fold", ["1", "1.5"], np.array([1.0, 1.5])))
        Traceback (most recent call last):
        ValueError: a.csv, sample 2: '1.5' in column 'fold' is not a whole number.
    """
    values = numbers_of(path, column)
    broken = np.flatnonzero((values % 1 != 0) | (np.abs(values) >= 2.0**63))
    if len(broken):
        raise ValueError(
            f"{path}, sample {broken[0] + 1}: {column.cells[broken[0]]!r} in column {column.name!r} is not a whole number."
        )
    return values.astype(np.int64)


def extreme_of(values: np.ndarray) -> int | None:
    """Return the place of a value that no sample holds, or beside which all others are one number in single precision.

    Args:
        values: The values `(samples,)`, without gaps.

    Example:
        >>> from fedlightning.datamodules.csv_tables import extreme_of
        >>> extreme_of(np.array([21.0, 24.0, 1e30, 27.0])), extreme_of(np.array([0.0, 0.0, 1e30, 0.0]))
        (2, None)
    """
    if not len(values):
        return None
    far = np.abs(values - np.median(values))
    most = max(0, len(values) - 1 - max(1, len(values) // 100))  # one in a hundred may be damaged
    usual = np.partition(far, most)[most]
    if far.max() > PRECISION * usual > 0:
        return int(far.argmax())
    return int(np.abs(values).argmax()) if np.abs(values).max() > LARGEST else None


def refuse_extremes(place: str, values: np.ndarray, clients: Sequence[np.ndarray]) -> None:
    """Refuse values that are out of all others of a client.

    Args:
        place: What the values are, for the message.
        values: The values `(samples,)`, NaN for a gap.
        clients: The samples of each client.

    Raises:
        ValueError: With the value and its sample.
    """
    for rows in clients:
        filled_rows = rows[~np.isnan(values[rows])]
        if (extreme := extreme_of(values[filled_rows])) is not None:
            raise ValueError(
                f"{place} holds {values[filled_rows[extreme]]:g} in sample {filled_rows[extreme] + 1}, beside which all "
                "others are one number in single precision. Correct it, or leave the cell empty if it is missing."
            )


def codes_of(column: Column, kept: np.ndarray) -> np.ndarray:
    """Return the cells of a column of codes, `(kept rows,)`; 1.0 is 1 if all are whole numbers.

    Pandas writes them so where the column has gaps, which differs from site to site.

    Example:
        >>> from fedlightning.datamodules.csv_tables import Column, codes_of
        >>> codes_of(Column("unit", ["1.0", ""], np.array([1.0, np.nan])), np.array([True, True])).tolist()
        ['1', '']
    """
    cells = np.array(column.cells)[kept]
    if column.numbers is None or (np.nan_to_num(column.numbers) % 1).any():
        return cells
    return np.array([code_of(cell) for cell in cells.tolist()], dtype=np.str_)


def code_of(cell: str) -> str:
    """Return a whole number without its zeros behind the point, and any other cell as it is.

    Example:
        >>> from fedlightning.datamodules.csv_tables import code_of
        >>> code_of("2.0"), code_of("2.50"), code_of("E11.0")
        ('2', '2.50', 'E11.0')
    """
    whole, point, rest = cell.partition(".")
    return whole if point and rest and not rest.strip("0") and whole.lstrip("+-").isdigit() else cell


def complete(columns: Sequence[Column]) -> np.ndarray:
    """Return of each row whether no cell of some columns is empty.

    Example:
        >>> from fedlightning.datamodules.csv_tables import Column, complete
        >>> complete([Column("age", ["61", ""], None), Column("sex", ["m", "f"], None)])
        array([ True, False])
    """
    return np.array([all(cells) for cells in zip(*(column.cells for column in columns), strict=True)])


def repeats(column: Column) -> bool:
    """Return whether a column has more different words than a category has, and some of them on several rows."""
    filled = [cell for cell in column.cells if cell]
    return column.numbers is None and MOST_LEVELS < len(set(filled)) < len(filled)


def levels_of(column: Column) -> list[str]:
    """Return the different words of a column in ascending order, gaps left out.

    Example:
        >>> from fedlightning.datamodules.csv_tables import Column, levels_of
        >>> levels_of(Column("sex", ["m", "f", "", "m"], None))
        ['f', 'm']
    """
    levels = sorted({cell for cell in column.cells if cell})
    if len(levels) > MOST_LEVELS:
        group = f"If it names patients, whose rows belong together, give group: {column.name}; else l"
        raise ValueError(
            f"Column {column.name!r} has {len(levels)} different words, such as {levels[0]!r}; that is a name or a text, "
            f"not a category. {group if repeats(column) else 'L'}eave it out with drop: [{column.name}]."
        )
    return levels


def classes_named(path: Path, column: Column, kept: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return the rows of a column as places in a list of its values, int64 `(kept rows,)`; 1 and 1.0 are one value.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.csv_tables import Column, classes_named
        >>> classes_named(Path("a.csv"), Column("ill", ["yes", "no"], None), np.array([True, True]), ["no", "yes"])
        array([1, 0])
    """
    place: dict[Any, int] = {name: number for number, name in enumerate(names)}
    if column.numbers is not None:
        for number, name in enumerate(names):
            with suppress(ValueError):
                place[number_in(name)] = number
    values: list[Any] = column.cells if column.numbers is None else column.numbers.tolist()
    numbered = [(value, place.get(value)) for value, there in zip(values, kept, strict=True) if there]
    wrong = next((value for value, number in numbered if number is None), None)
    if wrong is not None:
        raise ValueError(f"{path}: {column.name!r} has the value {wrong!r}, which is not among classes {list(names)}.")
    return np.array([number for _, number in numbered], dtype=np.int64)

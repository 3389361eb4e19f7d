"""The table `layers.csv`: one row per quantity, layer, client's model, stage and round."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from fedlightning.algorithm import add_round, sheets

ALL = "all"
"""In the column of clients: all clients together."""


@dataclass(frozen=True)
class LayerRow:
    """One number.

    Attributes:
        round: The round, counted from 1 (of a plain Trainer's run: the epoch).
        stage: `L1` (before local training) or `L2` (after it).
        client: The client's id, or `all`: the sum over clients of a sensitivity, the mean over pairs of CKA.
        layer_index: The layer's number from 1, in the order in which a forward pass meets the layers.
        layer: The layer's name.
        quantity: The quantity's name.
        value: The number; a ratio may be infinite or NaN.
        std_error: Its standard error; NaN where there is none.

    Example:
        >>> LayerRow(round=1, stage="L2", client="0", layer_index=1, layer="net.0", quantity="cka", value=0.5).std_error
        nan
    """

    round: int
    stage: str
    client: str
    layer_index: int
    layer: str
    quantity: str
    value: float
    std_error: float = float("nan")


COLUMNS = [field.name for field in fields(LayerRow)]
_NUMBERS: dict[str, Callable[[str], Any]] = {"round": int, "layer_index": int, "value": float, "std_error": float}


def write_layers(path: Path, rows: Iterable[LayerRow]) -> None:
    """Add rounds to a CSV file. Rows of these rounds and later ones, left by a run that was resumed, go.

    Example:
        >>> path = Path("layers.csv")
        >>> for number in (1, 2, 3, 2):  # resumed after round 1
        ...     write_layers(path, [LayerRow(number, "L2", "0", 1, "net.0", "cka", 0.5)])
        >>> [(row.round, row.value) for row in read_layers(path)]
        [(1, 0.5), (2, 0.5)]
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, of_round in groupby(rows, key=lambda row: row.round):
        add_round(path, COLUMNS, number, map(astuple, of_round))


def read_layers(path: str | Path) -> list[LayerRow]:
    """Return the rows of a `layers.csv`; empty if there is none.

    A last line that was cut off when the process was killed is left out.

    Example:
        >>> read_layers("a/folder/without/a/run")
        []
    """
    path = Path(path)
    path = path / "layers.csv" if path.is_dir() else path
    if not path.exists():
        return []
    try:
        text = path.read_text()
        complete = text[: text.rfind("\n") + 1]
        return [
            LayerRow(**{name: _NUMBERS.get(name, str)(line[name]) for name in COLUMNS})
            for line in sheets.read_table(complete.splitlines())
        ]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is damaged: it holds something that LayerDiagnostics does not write ({type(error).__name__}: {error}). "
            "Restore the file, or remove it."
        ) from None

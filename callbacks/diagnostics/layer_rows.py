"""The table `layers.csv`: one row per quantity, layer, client's model, stage and round."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

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


def write_layers(path: Path, rows: Iterable[LayerRow], append: bool = True) -> None:
    """Write rows to a CSV file.

    Example:
        >>> write_layers(Path("layers.csv"), [LayerRow(1, "L2", "0", 1, "net.0", "cka", 0.5)])
        >>> read_layers("layers.csv")[0].value
        0.5
    """
    new = not append or not path.exists()
    written = path if append else path.with_name(path.name + ".tmp")
    written.parent.mkdir(parents=True, exist_ok=True)
    with written.open("w" if new else "a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(astuple(row) for row in rows)
    if written != path:
        os.replace(written, path)


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
            for line in csv.DictReader(complete.splitlines())
        ]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is damaged: it holds something that LayerDiagnostics does not write ({type(error).__name__}: {error}). "
            "Restore the file, or remove it."
        ) from None


def cut_layers(path: Path, rounds: int) -> None:
    """Keep the first `rounds` rounds of the CSV file at `path`: a resumed run writes the others again.

    Example:
        >>> path = Path("cut.csv")
        >>> write_layers(path, [LayerRow(number, "L2", "0", 1, "net.0", "cka", 0.5) for number in (1, 2, 3)])
        >>> cut_layers(path, rounds=2)
        >>> [row.round for row in read_layers(path)]
        [1, 2]
    """
    if not path.exists():
        return
    rows = read_layers(path)
    kept = [row for row in rows if row.round <= rounds]
    if len(kept) < len(rows) or not path.read_text().endswith("\n"):
        write_layers(path, kept, append=False)
